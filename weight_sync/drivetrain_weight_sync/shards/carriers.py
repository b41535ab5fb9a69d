"""Move shards to the rank that pushes: over its connections, or over NCCL between GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from drivetrain.errors import DrivetrainError
from drivetrain_weight_sync.shards.links import Link, Send, Sending
from drivetrain_weight_sync.shards.rank_discovery import Ranks
from drivetrain_weight_sync.transports.device_memory import uuid_of
from drivetrain_weight_sync.transports.process_groups import Group, NcclGroupSpec

Wanted = Mapping[int, Sequence[tuple[int, torch.Tensor]]]
"""By rank: indices of its shards, and the regions that they fill."""


class Carrier(ABC):
    """A way to move shards between ranks."""

    @abstractmethod
    def fetch(self, wanted: Wanted, links: Mapping[int, Link]) -> None:
        """Fill regions with other ranks' shards. A rank that fails leaves the connections to the others usable.

        Raises:
            DrivetrainError: a rank was lost, is late, or reports an error.
        """

    @abstractmethod
    def send(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        """Send shards to the rank that asked for them."""

    def close(self) -> None:  # noqa: B027
        """Give up the transfers under way."""


class SocketCarrier(Carrier):
    """Sends bytes over the connections, from and to any device."""

    def fetch(self, wanted: Wanted, links: Mapping[int, Link]) -> None:
        """Read the shards of one rank after the other; the others' connections buffer meanwhile."""

        def fill(link: Link, regions: Sequence[torch.Tensor]) -> None:
            for region in regions:
                link.fill(region)

        _ask(wanted, links, fill)

    def send(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        """Write the shards' bytes."""
        link.say(Sending())
        for tensor in tensors:
            link.send(tensor)


class NcclCarrier(Carrier):
    """Sends between GPUs, in a group of its own: if a rank is lost, it is abandoned and the trainer's groups are not.

    Args:
        ranks: The ranks, each on a GPU of its own; all of them form the group at once.
        name: Name of the group, the same on every rank.
        device: This rank's GPU.

    Raises:
        DeadlineExceeded, WeightSyncError: the group does not form.
    """

    def __init__(self, ranks: Ranks, name: str, device: torch.device) -> None:
        spec = NcclGroupSpec(name, ranks.size, ranks.timeout)
        self._group = Group(spec, ranks.rank, device, ranks.store)

    def fetch(self, wanted: Wanted, links: Mapping[int, Link]) -> None:
        """Receive the shards of all ranks at once."""
        _ask(wanted, links, lambda link, regions: None)
        received = [
            (region, torch.empty(region.shape, dtype=region.dtype, device=region.device), rank)
            if not region.is_contiguous()
            else (region, region, rank)
            for rank, parts in wanted.items()
            for _, region in parts
        ]

        def watch() -> None:
            for rank in wanted:
                links[rank].require_silent()

        self._group.exchange([], [(buffer, rank) for _, buffer, rank in received]).wait(watch)
        for region, buffer, _ in received:
            if buffer is not region:
                region.copy_(buffer)

    def send(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        """Send the shards, unless the rank that asked is lost or gives up."""
        link.say(Sending())
        under_way = self._group.exchange([(tensor.contiguous(), link.rank) for tensor in tensors], [])
        under_way.wait(link.require_silent)

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()


def _ask(wanted: Wanted, links: Mapping[int, Link], read: Callable[[Link, Sequence[torch.Tensor]], None]) -> None:
    """Ask every rank before any answer is read, and read them all, also if one fails."""
    errors: dict[int, DrivetrainError] = {}
    for rank, parts in wanted.items():
        try:
            links[rank].say(Send(tuple(index for index, _ in parts)))
        except DrivetrainError as error:
            errors[rank] = error
    for rank, parts in wanted.items():
        if rank not in errors:
            try:
                answer = links[rank].hear()
                assert isinstance(answer, Sending)
                read(links[rank], [region for _, region in parts])
            except DrivetrainError as error:
                errors[rank] = error
    for rank in errors:
        links[rank].close()  # the connection may be in the middle of a shard
    for failed in errors.values():
        raise failed


def gpu_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the UUID of the GPU that holds all of the tensors; empty if they are elsewhere."""
    devices = {tensor.device for tensor in tensors}
    (device,) = devices if len(devices) == 1 else (torch.device("cpu"),)
    return uuid_of(device) if device.type == "cuda" else ""
