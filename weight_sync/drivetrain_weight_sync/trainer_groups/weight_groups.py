"""Groups in which trainers broadcast weights to this server, and the update made from their buckets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from drivetrain.checks.extras import from_extra
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain_weight_sync.trainer_groups.process_messages import AnyJoin
from drivetrain_weight_sync.trainer_groups.refused_rendezvous import release_trainer
from drivetrain_weight_sync.trainer_groups.trainer_group import TrainerGroup

if TYPE_CHECKING:
    import torch

    from drivetrain_weight_sync import WeightSync
    from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
    from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket
    from drivetrain_weight_sync.trainer_groups.open_update import OpenUpdate, TiedTensors

_logger: Final = logging.getLogger(__name__)
_KEPT_MAPPED_BYTES: Final = 256 << 20
"""Larger buckets stay in the memory that received them; smaller ones are copied out of it."""
_RELEASE_S: Final = 30.0
"""Seconds in which a trainer that announced a group must begin to wait for its ranks."""


class WeightGroups:
    """Receives buckets, stages them in memory, and pushes complete updates to the engine by weight sync.

    Until the commit the engine serves its old weights. An update opens with :meth:`begin`, or with the first bucket. It
    is committed by :meth:`end`, by :meth:`commit_open_update`, or, unless :meth:`begin` opened it, as soon as every
    tensor of the engine has come. It is dropped if a group is lost or a new one forms.

    Args:
        engine: A started engine, or a fleet.
        cast: Round floating-point tensors to the engine's dtype; if false, they are refused.
    """

    def __init__(self, engine: InferenceEngine, *, cast: bool = True) -> None:
        self._engine = engine
        self._cast = cast
        self._groups: dict[str, TrainerGroup] = {}
        self._turn = asyncio.Lock()
        """Held while a bucket is received, and while an update is committed."""
        self._open: OpenUpdate | None = None
        self._committed: TiedTensors | None = None
        """Tied weights of the last committed update."""
        self._sync: WeightSync | None = None
        self._source: dict[str, torch.Tensor] = {}
        """The tensors that ``_sync`` pushes; empty between pushes."""
        self._names: InMemoryNames | None = None
        self._commits = 0
        self._rounded = False
        """True once the log says that weights are rounded."""
        self._announced: dict[tuple[str, int], object] = {}
        """The latest request to join a group at each address and port, while it is served."""
        self._releases: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks that end the waits of trainers whose groups were refused, by the trainer's address and port."""

    @property
    def is_open(self) -> bool:
        """True if an update is open, and has not failed."""
        return self._open is not None and not self._open.failed

    @property
    def complete(self) -> bool:
        """True if an update is open and every tensor of it has come."""
        return self._open is not None and self._open.complete

    # Groups ------------------------------------------------------------------------------------------------------

    @contextmanager
    def releasing(self, address: object, port: object, world_size: object) -> Iterator[None]:
        """End the trainer's wait for this server if the context ends with a refusal of the trainer's group.

        The trainer may begin to wait after the refusal, so that a task of up to half a minute looks for it.

        Args:
            address: Where the trainer's rank 0 waits, as the trainer wrote it; without one, no trainer is looked for.
            port: Its port, which may be text.
            world_size: Ranks of the group.
        """
        place = _place(address, port)
        if place is None or type(world_size) is not int:
            yield
            return
        if place in self._releases:
            self._releases.pop(place).cancel()
        self._announced[place] = latest = object()
        try:
            yield
        except DrivetrainError as error:
            if self._announced.get(place) is latest:
                releasing = self._release(place, world_size, str(error))
                self._releases[place] = asyncio.get_running_loop().create_task(releasing)
            raise
        finally:
            if self._announced.get(place) is latest:
                del self._announced[place]

    async def _release(self, place: tuple[str, int], world_size: int, refusal: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_S):
                released = await release_trainer(*place, world_size)
        except TimeoutError:
            released = False
        finally:
            if self._releases.get(place) is asyncio.current_task():
                del self._releases[place]
        if released:
            _logger.warning(
                "the trainer at %s:%d waited for this server in a group that was refused; its wait was ended. The "
                "refusal: %s",
                *place,
                refusal,
            )

    async def init(self, join: AnyJoin) -> None:
        """Join a trainer's group; return once every rank has joined. A group of that name is left first.

        Call it within :meth:`releasing`.

        Raises:
            UnsupportedCapability: The engine takes no weight updates.
            InvalidRequest: The server cannot join such a group.
            DeadlineExceeded, WeightSyncError: The group did not form.
        """
        self._connect()
        name = join.group_name
        if name in self._groups:
            await self._groups[name].end()
        group = self._groups[name] = TrainerGroup(join)
        self._drop("a trainer formed a new group")
        try:
            await group.join()
        except BaseException:
            self._forget(group)
            raise

    async def destroy(self, name: str) -> None:
        """Leave a group; a bucket that is being received fails.

        Raises:
            InvalidRequest: There is no group of that name.
        """
        group = self._group(name)
        self._forget(group)
        await group.end()

    async def close(self) -> None:
        """Leave all groups, and drop an open update."""
        for release in self._releases.values():
            release.cancel()
        self._releases.clear()
        for group in list(self._groups.values()):
            self._forget(group)
            await group.end()
        self._drop("the server closes")
        sync, self._sync = self._sync, None
        if sync is not None:
            await sync.close()

    def _group(self, name: str) -> TrainerGroup:
        if name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise InvalidRequest(
                f"group_name={shown(name)}: the server is in no such group (it is in: {known}); form it first",
                field="group_name",
            )
        return self._groups[name]

    def has(self, name: str) -> bool:
        """Return whether the group exists: it has formed, or is forming, and was not lost."""
        return name in self._groups

    def _forget(self, group: TrainerGroup) -> None:
        if self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _connect(self) -> WeightSync:
        if self._sync is None:
            with from_extra("weight-sync", "weights by a trainer's group"):
                from drivetrain_weight_sync import WeightSync
                from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames

            self._sync = WeightSync.connect(self._source, self._engine, cast=self._cast)
            self._names = InMemoryNames(self._engine.config)
        return self._sync

    # Updates -----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Open an update that :meth:`end` or :meth:`commit_open_update` commits.

        Raises:
            InvalidRequest: An update is open, and has not failed.
        """
        async with self._turn:
            if self._open is not None and not self._open.failed:
                raise InvalidRequest("an update is open; end it first")
            self._open = await self._new_update(explicit=True)

    def require_open(self) -> None:
        """Raise unless an update is open, for trainers that must begin each.

        Raises:
            InvalidRequest: No update is open.
        """
        if self._open is None:
            raise InvalidRequest("no update was started; start one first")

    async def end(self, version: str | None = None) -> None:
        """Commit the open update as ``version``, or drop it if it cannot be committed.

        Raises:
            InvalidRequest: No update is open.
            DrivetrainError: as :meth:`commit_open_update`.
        """
        async with self._turn:
            if self._open is None:
                raise InvalidRequest("no update is open; begin one, or send a bucket")
            self._open.version = version or self._open.version
            try:
                await _to_its_end(self._commit(self._open))
            finally:
                self._drop("it could not be committed")

    async def commit_open_update(self) -> None:
        """Commit the open update if there is one; call it before requests go on after a pause.

        If this raises, don't let requests go on: the trainer expects new weights, and the engine has the old ones, or
        is dirty. The update stays open until the next bucket begins another, and calling this again tries again.

        Raises:
            InvalidRequest, WeightPlanMismatch: A bucket was refused, or tensors are missing; nothing was changed.
            DrivetrainError: as ``WeightSync.push``.
        """
        async with self._turn:
            if self._open is not None:
                await _to_its_end(self._commit(self._open))

    async def replace(self, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Push these tensors as a whole update.

        Args:
            tensors: Every tensor of the engine's manifest by name, with its shape and dtype, on the CPU.
            version: Their version.

        Raises:
            InvalidRequest: An update is open.
            DrivetrainError: as ``WeightSync.push``.
        """
        async with self._turn:
            if self.is_open:
                raise InvalidRequest("an update is open; end it first")
            await _to_its_end(self._push_source(self._connect(), tensors, version))
            self._committed = None

    def drop_open_update(self) -> None:
        """Drop the open update if there is one; call it when the engine got all weights in another way."""
        self._drop("the weights came in another way")

    async def receive(self, bucket: WeightBucket) -> None:
        """Receive a bucket; commit the update if it completes it.

        Tensors that the engine cannot take are received and then refused, because the trainer broadcasts them anyway.

        Raises:
            InvalidRequest: There is no such group, or the tensors cannot be taken.
            WeightPlanMismatch: The tensors differ from the engine's.
            DeadlineExceeded, WeightSyncError: The group is lost, and the update is dropped. The engine is as before.
            DrivetrainError: as ``WeightSync.push``, if the bucket completes the update.
        """
        group = self._group(bucket.group_name)
        received = False
        try:
            async with self._turn:
                before = self._open
                update, names, refusal = await self._checked(bucket)
                tensors = await self._received(group, bucket, keep=refusal is None)
                received = True
                if self._open is not before:
                    raise InvalidRequest("the update was dropped while this bucket came; send every tensor again")
                await self._take(bucket, tensors, update, names, refusal)
        except BaseException:
            if not received:  # the trainer would wait for a receiver that has given up
                await self._lose(group)
            raise

    async def collect(self, bucket: WeightBucket) -> dict[str, torch.Tensor]:
        """Receive a bucket of tensors that are not the engine's weights, and return them by name, on the CPU.

        Raises:
            InvalidRequest: There is no such group, or no tensors have these dtypes and shapes.
            DeadlineExceeded, WeightSyncError: The group is lost.
        """
        group = self._group(bucket.group_name)
        try:
            async with self._turn:
                return await self._received(group, bucket, keep=True)
        except BaseException:
            await self._lose(group)  # the trainer would wait for a receiver that has given up
            raise

    async def add(self, bucket: WeightBucket, tensors: dict[str, torch.Tensor]) -> None:
        """Take a bucket that came in another way than by a group's broadcasts; commit the update if it completes it.

        Args:
            bucket: Names, dtypes and shapes; its group need not exist.
            tensors: The tensors by name, on the CPU. They are kept until the commit, which changes none.

        Raises:
            InvalidRequest, WeightPlanMismatch: The tensors cannot be taken.
            DrivetrainError: as ``WeightSync.push``, if the bucket completes the update.
        """
        async with self._turn:
            await self._take(bucket, tensors, *await self._checked(bucket))

    async def _take(
        self,
        bucket: WeightBucket,
        tensors: dict[str, torch.Tensor],
        update: OpenUpdate | None,
        names: set[str],
        refusal: DrivetrainError | None,
    ) -> None:
        if refusal is not None:
            if update is not None:
                update.refuse(bucket, str(refusal))
                self._open = update
            raise refusal
        assert update is not None
        if self._open is None and await self._repeats_committed(tensors):
            return
        update.take(bucket, tensors, names)
        self._open = update
        if update.complete and not update.explicit:
            await _to_its_end(self._commit(update))

    async def _checked(self, bucket: WeightBucket) -> tuple[OpenUpdate | None, set[str], DrivetrainError | None]:
        """Return the bucket's update, the engine's names of its tensors, and why they cannot be taken."""
        update: OpenUpdate | None = None
        try:
            update = (self._open or await self._new_update()).for_bucket(bucket)
            return update, await asyncio.to_thread(update.check, bucket), None
        except DrivetrainError as error:
            return update, set(), error

    async def _repeats_committed(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are second names of tied tensors, sent after the update that they belong to."""
        return self._committed is not None and await asyncio.to_thread(self._committed.hold, tensors)

    async def abandon(self, name: str) -> None:
        """Leave a group, if there is one, whose trainer broadcasts what cannot be received."""
        group = self._groups.get(name)
        if group is not None:
            await self._lose(group)

    async def _lose(self, group: TrainerGroup) -> None:
        self._forget(group)
        self._drop(f"the group {group.name!r} was lost")
        await group.end()

    async def _new_update(self, *, explicit: bool = False) -> OpenUpdate:
        from drivetrain_weight_sync.trainer_groups.open_update import OpenUpdate

        self._connect()
        assert self._names is not None
        return OpenUpdate(await self._engine.weight_manifest(), self._names, cast=self._cast, explicit=explicit)

    async def _received(self, group: TrainerGroup, bucket: WeightBucket, *, keep: bool) -> dict[str, torch.Tensor]:
        from drivetrain_weight_sync.trainer_groups.bucket_layout import BucketLayout
        from drivetrain_weight_sync.transports.shared_arena import Arena

        layout = BucketLayout(bucket)
        if not keep:
            await group.receive(layout.pieces, None, 0)
            return {}
        arena = await asyncio.to_thread(Arena, layout.nbytes)
        await group.receive(layout.pieces, arena.path, layout.nbytes)
        tensors = layout.tensors(arena.memory)
        if layout.nbytes > _KEPT_MAPPED_BYTES:
            return tensors
        # A mapping holds a file descriptor until the commit, and there may be a bucket for each of 50,000 tensors.
        return await asyncio.to_thread(lambda: {name: tensor.clone() for name, tensor in tensors.items()})

    async def _commit(self, update: OpenUpdate) -> None:
        try:
            await self._push(update)
        except BaseException:
            update.failed = True
            raise
        self._commits += 1
        self._open = None
        self._committed = await asyncio.to_thread(update.tied)

    async def _push(self, update: OpenUpdate) -> None:
        update.require_complete()
        if update.rounded and not self._rounded:
            self._rounded = True
            _logger.warning("weights are rounded to the engine's dtype: %s", ", ".join(sorted(update.rounded)))
        sync = self._connect()
        # AReaL always asks for it. An engine that cannot abort recomputes the caches of its requests instead.
        if update.abort_requests and self._engine.supports(Capability.ABORT):
            await self._engine.abort_generation()
        await self._push_source(sync, update.tensors, update.version or self.next_version())

    async def _push_source(self, sync: WeightSync, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        self._source.update(tensors)
        try:
            await sync.push(version=version)
        finally:
            self._source.clear()

    def next_version(self) -> str:
        """Return the version of an update that names none: one more than the served one, or a count from 1."""
        served = self._engine.get_weight_version()
        return str(int(served) + 1 if served.isdecimal() else self._commits + 1)

    def _drop(self, reason: str) -> None:
        if self._open is not None:
            _logger.warning("the weight update under way was dropped: %s", reason)
            self._open = None


def _place(address: object, port: object) -> tuple[str, int] | None:
    """Return the address and port that a trainer wrote; None if they are not of a rendezvous."""
    if isinstance(port, str) and port.isascii() and port.isdecimal() and len(port) <= 5:
        port = int(port)
    if not isinstance(address, str) or not address or type(port) is not int or not 0 < port < 1 << 16:
        return None
    return address.removeprefix("[").removesuffix("]"), port


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Run ``work`` to its end, also if the caller is cancelled: a commit that is cut off leaves the engine dirty."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        raise
