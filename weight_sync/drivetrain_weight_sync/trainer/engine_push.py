"""Push to an engine, as the rank that has it does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from drivetrain.errors import DrivetrainError, WeightBaseMismatch, WeightSyncError
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import WeightManifest, WeightPlan, WeightSource, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import make_plan
from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.logprob_probe import LogprobProbe, ScoringEngine
from drivetrain_weight_sync.trainer.result import WeightSyncResult
from drivetrain_weight_sync.trainer.shared_parts import SharedParts
from drivetrain_weight_sync.trainer.source import GatheredSource, Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.threads import in_thread
from drivetrain_weight_sync.transports.updatable_engine import UpdatableEngine

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Further arguments of ``WeightSync.connect``."""

    bucket_bytes: int
    cast: bool
    mode: PauseMode
    probe: LogprobProbe | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A staged push."""

    request: WeightUpdateRequest
    """The request, which the engine has prepared."""
    plan: WeightPlan
    staged: Staged
    seconds: float


class EnginePush:
    """One push at a time to an engine: :meth:`stage`, then :meth:`update`, and :meth:`let_go` at the end of any.

    Args:
        source: The weights, or this rank's part of them.
        engine: The engine to push to.
        strategy: The strategy of ``sender``.
        sender: The transport.
        options: Further arguments.
        gatherer: Gathers the weights from several ranks; None: ``source`` is whole.
    """

    def __init__(
        self,
        source: Source,
        engine: UpdatableEngine,
        strategy: Strategy,
        sender: Sender,
        options: PushOptions,
        gatherer: Gatherer | None = None,
    ) -> None:
        self._given = source
        self._engine = engine
        self._sender = sender
        self._options = options
        self._gatherer = gatherer
        self._source: Source = source
        if gatherer is not None:
            self._source = GatheredSource(gatherer.buckets, InMemoryNames(engine.config), gatherer.outline)
        self._shared = None if gatherer is None else SharedParts(gatherer, strategy)
        self._agreed: tuple[WeightManifest, WeightPlan] | None = None
        self._prepared = False
        """True from the moment the engine is told of a source until the update begins."""
        self._mapped = False
        """True if the engine was told of a source that it may still have mapped."""
        self._stager = Stager()
        self.strategy = strategy

    async def stage(self, version: str, staged: Staged, *, gpu_share: float) -> Ready:
        """Check and stage the weights, and have the engine prepare the update."""
        begun = time.perf_counter()
        with self._disagreeing_if_it_fails():
            await self._meet(version)
            manifest, plan = await self._agree()
            sender, options = self._sender, self._options

            def put() -> WeightSource:
                given, cast = self._source, options.cast
                if self._shared is not None:
                    gpus = self._engine.gpus
                    shared = self._shared.stage(
                        given, manifest, plan, staged, engines=gpus, cast=cast, gpu_share=gpu_share
                    )
                    if shared is not None:
                        return shared
                stage(given, sender, manifest, plan, staged, self._stager, cast=cast, gpu_share=gpu_share)
                return sender.source()

            def stop() -> None:
                staged.stop()
                if self._gatherer is not None:
                    self._gatherer.interrupt()

            source = await in_thread(put, stop)
            await sender.connect(self._engine)
            try:
                request = await self._prepare(version, plan, staged, source)
            except WeightBaseMismatch as error:
                _logger.info("every tensor is sent whole: %s", error)
                await in_thread(sender.put_whole)
                request = await self._prepare(version, plan, staged, await in_thread(sender.source))
            if self._gatherer is not None:
                await in_thread(self._gatherer.staged)
        return Ready(request, plan, staged, time.perf_counter() - begun)

    async def _prepare(
        self, version: str, plan: WeightPlan, staged: Staged, source: WeightSource
    ) -> WeightUpdateRequest:
        request = WeightUpdateRequest(
            version=version, source=source, plan=plan, digests=staged.digests, mode=self._options.mode
        )
        self._mapped = self._prepared = True
        await self._engine.prepare_weight_update(request)
        return request

    async def update(self, ready: Ready) -> WeightSyncResult:
        """Have the engine apply the staged update, and return when it serves the new weights."""
        begun = time.perf_counter()
        plan, staged = ready.plan, ready.staged
        with self._disagreeing_if_it_fails():
            self._prepared = False
            update = await self._sender.apply(self._engine, ready.request)
        ended = time.perf_counter()
        self._sender.committed(staged.digests)
        with self._releasing_ranks_if_it_fails():
            gap = await self._probe()
        sent_nbytes = self._sender.sent_nbytes
        result = WeightSyncResult(
            version=ready.request.version,
            strategy=self.strategy,
            tensors=sum(len(bucket.tensors) for bucket in plan.buckets),
            buckets=len(plan.buckets),
            nbytes=staged.nbytes,
            sent_nbytes=staged.nbytes if sent_nbytes is None else sent_nbytes,
            check_seconds=staged.check_seconds,
            stage_seconds=staged.stage_seconds,
            update_seconds=ended - begun,
            paused_seconds=update.paused_seconds,
            total_seconds=ready.seconds + ended - begun,
            probe_gap=gap,
        )
        if (gatherer := self._gatherer) is not None:
            await in_thread(lambda: gatherer.committed(msgspec.to_builtins(result)))
        return result

    async def _meet(self, version: str) -> None:
        """Wait for the other ranks of a sharded source."""
        gatherer, given = self._gatherer, self._given
        if gatherer is not None:
            await in_thread(
                lambda: gatherer.meet(version, given.shards, given.whole, given.gathered_with), gatherer.interrupt
            )

    @contextmanager
    def _releasing_ranks_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._gatherer is not None:
                self._gatherer.failed(error)
            raise

    async def _probe(self) -> float | None:
        probe, engine = self._options.probe, self._engine
        if probe is None:
            return None
        assert isinstance(engine, ScoringEngine)
        return await probe.gap(engine)

    @contextmanager
    def _disagreeing_if_it_fails(self) -> Iterator[None]:
        try:
            with self._releasing_ranks_if_it_fails():
                yield
        except BaseException:
            # The engine may have loaded another model since the plan was agreed, which may be why this failed.
            self._agreed = None
            self._sender.forget()
            raise

    async def _agree(self) -> tuple[WeightManifest, WeightPlan]:
        if self._agreed is None:
            manifest = await self._engine.weight_manifest()
            self._agreed = manifest, make_plan(manifest.tensors, self._options.bucket_bytes)
        return self._agreed

    async def let_go(self) -> None:
        """Free what only this push needs; the engine and other ranks forget a push that was given up."""
        if (gatherer := self._gatherer) is not None:
            await in_thread(lambda: gatherer.failed(WeightSyncError("the push was cancelled")))
        if self._sender.lends and self._prepared:
            await self._unmap()
        if self._sender.release_blocks:  # otherwise spare the thread switch, which takes as long as the engine call
            await in_thread(self._sender.release)
        else:
            self._sender.release()

    async def _unmap(self) -> None:
        """Make the engine unmap memory that the sender is about to free."""
        mapped, self._mapped = self._mapped, False
        if mapped:
            try:
                await self._engine.release_weight_sources()
            except DrivetrainError as error:
                # An engine that is closed or dead holds no mapping.
                _logger.info("the engine did not release its weight sources: %s", error)

    async def close(self) -> None:
        """Free the arena and everything else made for pushing."""
        await self._sender.disconnect(self._engine)
        await self._unmap()
        await in_thread(self._sender.close)
        if self._gatherer is not None:
            await in_thread(self._gatherer.close)
