"""Stage a rank's own shards in memory that the engine maps, so that they need not travel to the rank that pushes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from drivetrain.types.weights import TensorSpec, WeightPlan
from drivetrain_weight_sync.copying.device_copies import DeviceCopy, Looks, Pace, can_look, fits, reaches
from drivetrain_weight_sync.copying.digest import part_sum
from drivetrain_weight_sync.copying.plan import place
from drivetrain_weight_sync.shards.links import PartSpec, PartsStaged, StageParts
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcSender
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender


class PartStager:
    """Copies shards into memory of this rank and sums their bits, on a GPU in one launch. Used by one thread."""

    def __init__(self) -> None:
        self._senders: dict[tuple[str, torch.device], Sender] = {}
        """The sender in use, by transport and device."""
        self._looks = Looks()
        self._buckets: tuple[tuple[PartSpec, ...], ...] = ()
        self._plan = WeightPlan(())
        self._dtypes: dict[str, torch.dtype] = {}
        """The engine's, by part."""

    def stage(
        self, wanted: StageParts, tensors: Sequence[torch.Tensor], reached: Callable[[float], None] = lambda _: None
    ) -> PartsStaged:
        """Stage the shards that are asked for.

        Args:
            wanted: Says which, and where.
            tensors: All shards of this rank.
            reached: Called with the fraction done, now and then; an exception from it ends the staging.
        """
        if wanted.buckets is not None:
            self._buckets = wanted.buckets
            self._plan = place([[TensorSpec(p.name, p.dtype, (p.numel,)) for p in bucket] for bucket in self._buckets])
            self._dtypes = {spec.name: dtype_of(spec) for spec in self._plan.tensors}
        sender = self._sender(wanted.transport, tensors[0].device)
        sender.begin(self._plan)
        slots = sender.slots()
        parts = [part for bucket in self._buckets for part in bucket]
        as_is = all(tensors[part.index].dtype == self._dtypes[part.name] for part in parts)
        sums: dict[str, int] = {}
        strange: dict[str, str] = {}
        # Converted tensors hold memory until they are staged, so convert one bucket at a time.
        groups = [parts] if as_is else self._buckets
        for number, group in enumerate(groups):
            pace = _pace(wanted.gpu_share, reached, number, len(groups))
            values = {part.name: _values(part, tensors[part.index], self._dtypes[part.name]) for part in group}
            sums |= self._put_at_once(group, values, slots, strange, pace)
            for part in group:
                if part.name not in sums:
                    value = values[part.name]
                    slots[part.name].copy_(value)
                    sums[part.name] = part_sum(value, part.begin)
                    strange |= non_finite({part.name: value})
        described: Any = sender.source()
        return PartsStaged(described.model_dump(), tuple(sums[part.name] for part in parts), strange)

    def _put_at_once(
        self,
        parts: Sequence[PartSpec],
        values: Mapping[str, torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        strange: dict[str, str],
        pace: Pace | None,
    ) -> dict[str, int]:
        """Copy GPU tensors in one launch, which also sums them; return the sums of the tensors that it copied."""
        copies = [DeviceCopy(values[part.name], slots[part.name], part.name, begin=part.begin) for part in parts]
        copies = [copy for copy in copies if reaches(copy.source) and can_look(copy.source.dtype) and fits(copy)]
        if not copies:
            return {}
        sums, names = self._looks(copies, pace)
        strange |= non_finite({name: values[name] for name in names})
        return sums

    def _sender(self, transport: str, device: torch.device) -> Sender:
        key = transport, device
        if key not in self._senders:
            self.close()
            self._senders = {key: CudaIpcSender(device) if transport == "cuda_ipc" else SharedMemorySender()}
        return self._senders[key]

    def close(self) -> None:
        """Free the memory."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.close()


def _pace(share: float, reached: Callable[[float], None], number: int, groups: int) -> Pace | None:
    """Return the pace of one of several groups, which reports the fraction of all."""
    return None if share >= 1 else Pace(share, lambda fraction: reached((number + fraction) / groups))


def _values(part: PartSpec, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return shard.contiguous().view(-1)[part.first : part.first + part.numel].to(dtype)


@cache
def this_host() -> str:
    """Return a name of this host and this process's view of its processes, through which memory is shared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return os.uname().nodename
    return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
