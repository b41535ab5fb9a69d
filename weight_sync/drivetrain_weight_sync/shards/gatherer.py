"""The rank that pushes: it asks the others for their shards, bucket by bucket."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final

import torch

from drivetrain.errors import DeadlineExceeded, DrivetrainError, InvalidRequest, WeightSyncError
from drivetrain.types.weights import Bucket
from drivetrain_weight_sync.shards.carriers import Carrier, NcclCarrier, SocketCarrier, gpu_of
from drivetrain_weight_sync.shards.inventory import Inventory, Part
from drivetrain_weight_sync.shards.links import (
    Committed,
    FormGroup,
    Hello,
    Link,
    Message,
    Offer,
    PartSpec,
    PartsStaged,
    Staged,
    StageParts,
    failure,
)
from drivetrain_weight_sync.shards.part_staging import PartStager, this_host
from drivetrain_weight_sync.shards.pieces import Piece, own_pieces
from drivetrain_weight_sync.shards.rank_discovery import Place, Ranks, new_key
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.transports.base import slot

_BUFFERS: Final = 2
"""Buffers for buckets: one is staged while the next is gathered."""
_POLL_S: Final = 0.1
"""Seconds between two looks of a wait for other ranks at whether it was interrupted."""
_HELLO_S: Final = 10.0
"""Seconds that a connection may take to show the key."""

Rename = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class Gatherer:
    """Gathers the ranks' shards, for one push at a time.

    Used by one thread at a time; :meth:`interrupt` is safe from any.
    """

    def __init__(self, ranks: Ranks, bucket_bytes: int) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._listening: socket.socket | None = None
        self._key = new_key()
        self._links: dict[int, Link] = {}
        self._waiting = False
        """True while the other ranks wait to hear how a push ends."""
        self._taking_part: set[int] = set()
        """Ranks whose offers for this push were read."""
        self._owing: set[int] = set()
        """Ranks that were told of a push's failure before their offers for it were read."""
        self._left: set[int] = set()
        """Ranks that told this one of an error of their own in this push, and left."""
        self._late: set[int] = set()
        """Ranks that had not come when the last push failed; its error waits for them in the store."""
        self._interrupted = threading.Event()
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        """Pieces that each other rank offered last."""
        self._offered: dict[int, tuple[Piece, ...]] = {}
        """Pieces of all ranks in the inventory."""
        self._inventory = Inventory({}, ranks.rank, bucket_bytes)
        self._carrier: Carrier = SocketCarrier()
        self._grouped: dict[int, Link] = {}
        """The connections when the group of NCCL was formed; empty without one."""
        self._tensors: list[torch.Tensor] = []
        self._rename: Rename = dict
        self._outlines: dict[str, torch.Tensor] = {}
        """Each tensor's shape and dtype as a meta tensor, by the first name that the trainer gave the tensor."""
        self._of_storage: dict[int, str] = {}
        """Names of ``_outlines``, by the meta tensor's storage."""
        self.gpus: dict[int, str] = {}
        """UUID of the GPU that holds a rank's shards; empty if none does."""
        self._hosts: set[str] = set()
        self._parts = PartStager()
        self._asked: dict[int, tuple[Link, tuple[tuple[PartSpec, ...], ...]]] = {}
        """By rank: the connection, and the parts that the rank was last asked to stage."""
        self._ahead = ThreadPoolExecutor(1, "drivetrain-gathers")
        self._coming: Future[dict[str, torch.Tensor]] | None = None

    def meet(
        self,
        version: str,
        shards: Callable[[], Iterable[tuple[str, object]]],
        rename: Rename,
        gathered_with: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Wait until every rank takes part in the push of ``version``, and compare their shards.

        Args:
            version: Version of the push, the same on every rank.
            shards: Returns names and tensors of this rank.
            rename: Names and splits whole tensors as the checkpoint does.
            gathered_with: Returns the name of a layer for a tensor that must be renamed together with all others of
                the layer.

        Raises:
            TrainerRankLost, DeadlineExceeded: a rank is gone, or does not push.
            InvalidRequest: another rank has an engine too, or pushes another version.
            WeightPlanMismatch: the shards do not make up every tensor.
            DrivetrainError: the error of a rank that could not describe its shards.
        """
        self._interrupted.clear()
        self._taking_part.clear()
        self._listen()
        self._left.clear()
        self._ranks.forget_late_ranks(self._late)
        self._late.clear()
        self._waiting = True
        offers = self._offers(version)
        self._rename = rename
        own, self._tensors = own_pieces(shards())
        offered = {**self._pieces, self._ranks.rank: own}
        if offered != self._offered:
            self._inventory = Inventory(offered, self._ranks.rank, self._bucket_bytes, gathered_with)
            self._offered = offered
            specs = self._inventory.specs
            self._outlines = {n: torch.empty(s.shape, dtype=dtype_of(s), device="meta") for n, s in specs.items()}
            self._of_storage = {storage_of(outline): name for name, outline in self._outlines.items()}
        self.gpus = {rank: offer.gpu for rank, offer in offers.items()} | {self._ranks.rank: gpu_of(self._tensors)}
        self._hosts = {this_host(), *(offer.host for offer in offers.values())}

    @property
    def on_one_host(self) -> bool:
        """True if all ranks of the push are on this host."""
        return len(self._hosts) == 1

    def outline(self) -> dict[str, torch.Tensor]:
        """Return a meta tensor of each tensor's shape and dtype, by checkpoint name."""
        return self._named(self._outlines)

    def parts_of(self, outline: torch.Tensor) -> Sequence[Part] | None:
        """Return the parts of the trainer's tensor that a tensor of :meth:`outline` shows in whole or as a view.

        None if the tensor is computed from others.
        """
        name = self._of_storage.get(storage_of(outline))
        return None if name is None else self._inventory.parts[name]

    def stage_parts(
        self,
        transport: str,
        wanted: Mapping[int, tuple[tuple[PartSpec, ...], ...]],
        gpu_share: float,
        reached: Callable[[float], None],
    ) -> dict[int, PartsStaged]:
        """Have every rank stage parts of tensors in its own memory, all at the same time.

        Args:
            transport: ``cuda_ipc`` or ``shared_memory``.
            wanted: For each rank that has any: parts, by bucket of the plan.
            gpu_share: Share of a GPU's time that copies may take.
            reached: Called with the fraction of this rank's own parts that is staged.

        Raises:
            TrainerRankLost, DeadlineExceeded: a rank is gone, or stands still.
            DrivetrainError: the error of a rank that could not stage its parts.
        """
        found: dict[int, PartsStaged] = {}
        errors: list[BaseException] = []
        asked: list[Link] = []
        try:
            for rank in wanted.keys() - {self._ranks.rank}:
                link, buckets = self._links[rank], wanted[rank]
                known = self._asked.get(rank) == (link, buckets)
                link.say(StageParts(transport, gpu_share, None if known else buckets))
                asked.append(link)
                self._asked[rank] = link, buckets
            if self._ranks.rank in wanted:
                own = StageParts(transport, gpu_share, wanted[self._ranks.rank])
                found[self._ranks.rank] = self._parts.stage(own, self._tensors, reached)
        except BaseException as error:
            errors.append(error)
        for link in asked:  # read every answer, so that none is mistaken for an answer to the next push
            try:
                answer = link.hear()
                assert isinstance(answer, PartsStaged)
                found[link.rank] = answer
            except DrivetrainError as error:
                self._drop(link)
                errors.append(error)
        for failed in errors:
            raise failed
        return found

    def buckets(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the tensors of each bucket under their checkpoint names, gathering the next one meanwhile.

        The tensors of a bucket may be overwritten as soon as the next one is read.

        Raises:
            TrainerRankLost, DeadlineExceeded: a rank is gone, or stands still.
        """
        self._choose_carrier()
        buckets = self._inventory.buckets
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        largest = max((bucket.nbytes for bucket in buckets), default=0)
        memory = [torch.empty(max(largest, 1), dtype=torch.uint8, device=device) for _ in buckets[:_BUFFERS]]
        for index in range(len(buckets)):
            coming = self._coming or self._ahead.submit(self._gather, buckets[index], memory[index % _BUFFERS])
            gathered = coming.result()
            self._coming = None
            if index + 1 < len(buckets):
                following = index + 1
                self._coming = self._ahead.submit(self._gather, buckets[following], memory[following % _BUFFERS])
            yield self._named(gathered)

    def staged(self) -> None:
        """Tell the other ranks that every tensor is staged."""
        self._tensors = []
        self._tell(Staged())

    def committed(self, result: dict[str, Any]) -> None:
        """Tell the other ranks how the push went."""
        self._waiting = False
        self._tell(Committed(result))

    def failed(self, error: BaseException) -> None:
        """Release the other ranks with this error, unless they know already how the push ended."""
        if not self._waiting:
            return
        self._waiting = False
        if self._coming is not None:
            wait([self._coming])  # then no connection is in the middle of a shard
            self._coming = None
        self._tensors = []
        self._tell(failure(error))
        self._owing |= self._links.keys() - self._taking_part
        self._late = {*range(self._ranks.size)} - self._links.keys() - self._left - {self._ranks.rank}
        with suppress(DrivetrainError):  # without the store no rank can come
            self._ranks.tell_late_ranks(self._late, error)

    def interrupt(self) -> None:
        """End all waits of other threads, by leaving the other ranks."""
        self._interrupted.set()
        for link in list(self._links.values()):
            with suppress(DrivetrainError):
                link.say(failure(WeightSyncError("the push was cancelled on the rank that pushes")))
            link.close()

    def close(self) -> None:
        """Leave the other ranks."""
        self.failed(WeightSyncError("the WeightSync of the rank that pushes was closed"))
        self._ahead.shutdown()
        self._carrier.close()
        self._parts.close()
        self.interrupt()
        if self._listening is not None:
            self._listening.close()

    def _listen(self) -> None:
        if self._listening is None and self._ranks.size > 1:
            address = self._ranks.own_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listening = socket.create_server((address, 0), family=family, backlog=self._ranks.size)
            self._ranks.publish(Place(self._ranks.rank, address, self._listening.getsockname()[1], self._key))

    def _offers(self, version: str) -> dict[int, Offer]:
        """Collect an offer from every other rank."""
        offers: dict[int, Offer] = {}
        ends = time.monotonic() + self._ranks.timeout
        with selectors.DefaultSelector() as selector:
            if self._listening is not None:
                selector.register(self._listening, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ, link)
            while len(offers) < self._ranks.size - 1:
                ready = selector.select(_POLL_S)
                if self._interrupted.is_set():
                    raise CancelledError
                if not ready and time.monotonic() > ends:
                    absent = sorted({*range(self._ranks.size)} - offers.keys() - {self._ranks.rank})
                    raise DeadlineExceeded(
                        f"timed out after {self._ranks.timeout:g} s waiting for ranks {', '.join(map(str, absent))} of "
                        "the trainer to push; every rank of the group calls push()"
                    )
                for key, _ in ready:
                    if key.data is not None:
                        offer = self._offer(key.data, version)
                        if offer is not None:
                            selector.unregister(key.data)
                            offers[key.data.rank] = offer
                    elif (accepted := self._accepted()) is not None:
                        selector.register(accepted, selectors.EVENT_READ, accepted)
        return offers

    def _accepted(self) -> Link | None:
        """Take a connection; None if it does not show the key."""
        assert self._listening is not None
        connection, _ = self._listening.accept()
        with suppress(DrivetrainError):
            hello = Link(connection, -1, _HELLO_S).hear()
            if isinstance(hello, Hello) and hmac.compare_digest(hello.key, self._key):
                self._owing.discard(hello.rank)
                self._links[hello.rank] = link = Link(connection, hello.rank, self._ranks.timeout)
                return link
        connection.close()
        return None

    def _offer(self, link: Link, version: str) -> Offer | None:
        """Read a rank's offer; None if it is for a push of whose failure the rank was told already."""
        try:
            offer = link.hear()
        except DrivetrainError:
            self._drop(link)
            raise
        assert isinstance(offer, Offer)
        if offer.pieces is not None:
            self._pieces[link.rank] = offer.pieces
        if link.rank in self._owing:
            self._owing.remove(link.rank)
            return None
        self._taking_part.add(link.rank)
        if offer.version != version:
            raise InvalidRequest(
                f"rank {self._ranks.rank} of the trainer pushes {version!r}, rank {link.rank} {offer.version!r}; pass "
                "the same version on every rank",
                field="version",
            )
        return offer

    def _drop(self, link: Link) -> None:
        """Close the connection to a rank that was lost, or that left with an error and connects again."""
        if not link.broken:
            self._left.add(link.rank)
        self._links.pop(link.rank).close()

    def _choose_carrier(self) -> None:
        """Use NCCL if every rank's shards are on a GPU of its own."""
        gpus = [*self.gpus.values()]
        on_gpus = len(gpus) > 1 and all(gpus) and len(set(gpus)) == len(gpus)
        if on_gpus == bool(self._grouped) and self._grouped in ({}, self._links):
            return
        self._carrier.close()
        self._carrier, self._grouped = SocketCarrier(), {}
        if on_gpus:
            name = f"drivetrain-shards-{uuid.uuid4().hex[:12]}"
            self._tell(FormGroup(name))
            self._carrier = NcclCarrier(self._ranks, name, self._tensors[0].device)
            self._grouped = dict(self._links)

    def _gather(self, bucket: Bucket, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a bucket, whole, in ``memory``."""
        whole: dict[str, torch.Tensor] = {}
        wanted: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for placed in bucket.tensors:
            name = placed.spec.name
            whole[name] = slot(memory, 0, placed)
            for part in self._inventory.parts[name]:
                region = whole[name][part.piece.region]
                if part.rank == self._ranks.rank:
                    region.copy_(self._tensors[part.index])
                else:
                    wanted.setdefault(part.rank, []).append((part.index, region))
        try:
            self._carrier.fetch(wanted, self._links)
        except DrivetrainError:
            self._carrier.close()
            self._grouped = {}
            self._carrier = SocketCarrier()
            raise
        return whole

    def _named(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole tensors under all of their names in the checkpoint."""
        return dict(self._rename({name: whole[first] for first in whole for name in self._inventory.names[first]}))

    def _tell(self, message: Message) -> None:
        """Send a message to every other rank; drop ranks that are gone."""
        for rank, link in list(self._links.items()):
            try:
                link.say(message)
            except DrivetrainError:
                self._links.pop(rank).close()
