"""The trainer's side: connect a source to an engine once, and push a new version after each step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import require
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.errors import (
    DrivetrainError,
    InvalidRequest,
    WeightBaseMismatch,
    WeightSyncError,
)
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import WeightManifest, WeightPlan, WeightSource, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import DEFAULT_BUCKET_BYTES, make_plan
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.logprob_probe import LogprobProbe, ScoringEngine
from drivetrain_weight_sync.trainer.source import Source, WeightInput
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.trainer.strategy import Strategy, choose
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.broadcast import BroadcastSender
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcInPlaceSender, CudaIpcSender, can_map
from drivetrain_weight_sync.transports.disk import DiskSender
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.plugins import Transport
from drivetrain_weight_sync.transports.process_groups import GroupBackend
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender
from drivetrain_weight_sync.transports.threads import in_thread
from drivetrain_weight_sync.transports.updatable_engine import UpdatableEngine

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightSyncResult:
    """Sizes and timings of a push; times are in seconds."""

    version: str
    strategy: Strategy
    tensors: int
    buckets: int
    nbytes: int
    """Bytes of the tensors, each counted once."""
    sent_nbytes: int
    """Bytes that were sent; fewer than ``nbytes`` if the transport sends only changes."""
    check_seconds: float
    """Time to check names, dtypes, shapes and NaN and to compute digests, while the engine keeps serving."""
    stage_seconds: float
    """Time to copy the tensors to where the engine reads them, while the engine keeps serving."""
    update_seconds: float
    """Time from the update request to the engine's answer."""
    paused_seconds: float
    """The part of ``update_seconds`` during which the engine generated nothing: begin to commit, measured in the
    engine."""
    total_seconds: float
    probe_gap: float | None = None
    """Largest difference in nats between the engine's logprobs and the trainer's; None without a probe."""

    @property
    def gb_per_second(self) -> float:
        """Throughput of the whole push in 10**9 bytes per second."""
        return self.nbytes / self.total_seconds / 1e9


class WeightSync:
    """Pushes the weights of one source to one engine. Created by :meth:`connect`."""

    def __init__(
        self, source: Source, engine: UpdatableEngine, strategy: Strategy, sender: Sender, options: _Options
    ) -> None:
        self._source = source
        self._engine = engine
        self._sender = sender
        self._options = options
        self._lock = asyncio.Lock()
        self._agreed: tuple[WeightManifest, WeightPlan] | None = None
        self._prepared = False
        """True from the moment the engine is told of a source until the update begins."""
        self._mapped = False
        """True if the engine was told of a source that it may still have mapped."""
        self._closed = False
        self._stager = Stager()
        self._open: WeightTransferHandle[WeightSyncResult] | None = None
        """A transfer that was started, and neither finished nor cancelled."""
        self.strategy = strategy
        """The strategy in use; never ``AUTO``."""

    @classmethod
    @checked
    def connect(
        cls,
        source: WeightInput,
        engine: UpdatableEngine,
        strategy: Strategy | str | Transport = Strategy.AUTO,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        cast: bool = False,
        mode: PauseMode = PauseMode.RETRACT,
        directory: Path | None = None,
        group_backend: GroupBackend = "gloo",
        master_address: str = "127.0.0.1",
        staging_share: float = 0.1,
        share_tensors: bool = False,
        probe: LogprobProbe | None = None,
    ) -> WeightSync:
        """Connect a source of tensors to an engine. Nothing is sent, and the engine need not be started.

        Args:
            source: a torch module, a mapping of names to tensors, (name, tensor) pairs, or a function that returns
                pairs. Names are those of the checkpoint, or of the transformers model in memory; prefixes of
                ``torch.compile`` and DDP are dropped.
            engine: the engine to push to. Once started, it reports its GPUs, which ``auto`` takes into account.
            strategy: the transport. ``auto`` takes the fastest that the engine claims. ``"delta"`` sends only changes
                since the last push, for slow links. Other plugin transports are chosen by name, or by passing a
                transport object.
            bucket_bytes: most bytes per bucket; a larger layer gets a bucket of its own.
            cast: round floating-point tensors to the engine's dtype. If false, a dtype that would be rounded is
                refused. Conversions that keep every value, such as bfloat16 to float32, are always made.
            mode: pause mode for requests in flight while the weights change.
            directory: parent of the folders that strategies ``disk`` and ``delta`` create; None: the temporary folder.
            group_backend: for strategy ``broadcast``: ``"gloo"`` sends from CPU memory to CPU memory over any network;
                ``"nccl"`` sends between GPUs, from the tensors' GPU or else this thread's current one.
            master_address: for strategy ``broadcast``: address at which the engine's ranks reach this host.
            staging_share: share of the GPU's time that :meth:`start_weight_transfer` takes for copies within the GPU,
                above 0 and at most 1; the rest is left to the engine, which keeps generating. :meth:`push` takes all of
                it.
            share_tensors: for strategy ``cuda_ipc``: the engine reads the trainer's own tensors instead of a copy in an
                arena, which takes less time and no extra memory. The source must be a module or a mapping; its tensors
                must be contiguous, have the engine's dtypes, and lie in memory that CUDA can share (not in torch's
                expandable segments). The engine keeps that memory mapped until :meth:`close`, and maps it again when a
                tensor has moved.
            probe: compares the engine's logprobs with the trainer's after each commit, if the engine can generate then.

        Raises:
            InvalidRequest: an argument has the wrong type or value, or conflicts with ``share_tensors``.
            UnsupportedCapability: the engine cannot take weights that way, or cannot score the probe's sequences.
        """
        if not isinstance(engine, UpdatableEngine):
            raise InvalidRequest(f"engine={shown(engine)}: expected an InferenceEngine", field="engine")
        given = Source(source, InMemoryNames(engine.config))
        directory = None if directory is None else Path(directory)
        mapped = can_map(given.gpu, engine.gpus)
        chosen = choose(strategy, engine.isolation, engine.capabilities, can_map=mapped, directory=directory)
        if probe is not None:
            if not isinstance(probe, LogprobProbe):
                raise InvalidRequest(f"probe={shown(probe)}: expected a LogprobProbe", field="probe")
            require(frozenset(engine.capabilities), Capability.SCORE_TOKENS, "a logprob probe", engine.config.backend)
            if not isinstance(engine, ScoringEngine):
                raise InvalidRequest("a probe needs an engine with compute_logprobs()", field="probe")
        if share_tensors and (chosen is not Strategy.CUDA_IPC or not given.held):
            how = f"strategy {chosen.value!r}" if isinstance(chosen, Strategy) else "a plugin's transport"
            raise InvalidRequest(
                "share_tensors is for strategy 'cuda_ipc' and the tensors of a module or a mapping; this is "
                + (how if chosen is not Strategy.CUDA_IPC else "a source that is read again at every push"),
                field="share_tensors",
            )
        options = _Options(bucket_bytes, cast, mode, staging_share, probe)
        if isinstance(chosen, Transport):
            return cls(given, engine, Strategy.PLUGIN, chosen.sender(), options)
        device = torch.device("cpu")
        if (group_backend == "nccl" or chosen is Strategy.CUDA_IPC) and torch.cuda.is_available():
            device = given.gpu or torch.device("cuda", torch.cuda.current_device())
        match chosen:
            case Strategy.BROADCAST:
                sender: Sender = BroadcastSender(device, group_backend, master_address)
            case Strategy.CUDA_IPC:
                if not torch.cuda.is_available():
                    raise InvalidRequest("strategy 'cuda_ipc' needs a GPU in the trainer's process", field="strategy")
                sender = CudaIpcInPlaceSender() if share_tensors else CudaIpcSender(device)
            case Strategy.SHARED_MEMORY:
                sender = SharedMemorySender()
            case Strategy.DISK:
                sender = DiskSender(directory)
            case _:
                sender = InProcessSender()
        return cls(given, engine, chosen, sender, options)

    @checked
    async def push(self, *, version: str) -> WeightSyncResult:
        """Make the engine serve the source's weights as ``version``; every push is a full one.

        Weights that fail a check are refused before the engine is asked for anything. Do not write to the tensors until
        this returns. Pushes of one ``WeightSync`` run one after another.

        Raises:
            InvalidRequest: the version is empty.
            WeightPlanMismatch: tensors are missing, extra, or of another dtype or shape; the engine keeps serving.
            InvalidWeights: the source holds NaN or infinity; the engine keeps serving.
            WeightTransferFailed, WeightVerifyFailed: the engine is dirty until a push succeeds.
            WeightProbeFailed: the new weights are served, but the engine's logprobs differ from the trainer's.
            WeightSyncError: the sync is closed, or a generator given as source was already read.
        """
        async with self._lock:
            self._require_open()
            try:
                return await self._update(await self._stage(version, Staged(), gpu_share=1.0))
            finally:
                await self._let_go()

    @checked
    async def start_weight_transfer(self, *, version: str) -> WeightTransferHandle[WeightSyncResult]:
        """Check and stage a push in the background, while the engine keeps serving; the handle's ``finish`` applies it.

        The handle raises the errors of :meth:`push`. No other push can start until the transfer is finished or
        cancelled. Once it is staged, the tensors may be written to again if the strategy copied them, as shared_memory,
        cuda_ipc and disk do; in_process, broadcast and ``share_tensors`` read them only at ``finish``.

        Raises:
            InvalidRequest: the version is empty.
            WeightSyncError: the sync is closed, a push is under way, or another transfer was neither finished nor
                cancelled.
        """
        self._require_open()
        if self._lock.locked():
            raise WeightSyncError("a push is under way; wait for it before you start a transfer")
        staged = Staged()
        self._open = WeightTransferHandle(
            version,
            self._stage(version, staged, gpu_share=self._options.staging_share),
            self._update,
            self._let_go,
            lambda: staged.fraction,
        )
        return self._open

    def _require_open(self) -> None:
        if self._closed:
            raise WeightSyncError("this WeightSync is closed; connect a new one")
        if self._open is not None and not self._open.over:
            raise WeightSyncError(
                f"the transfer of {self._open.version!r} was neither finished nor cancelled; do one or the other first"
            )

    async def _let_go(self) -> None:
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
        """Wait for a push under way, then free the arena and everything else made for pushing. Idempotent.

        A transfer that was started and not finished is cancelled.
        """
        if self._open is not None and not self._open.over:
            await self._open.cancel()
        async with self._lock:
            self._closed = True
            await self._sender.disconnect(self._engine)
            await self._unmap()
            await in_thread(self._sender.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stage(self, version: str, staged: Staged, *, gpu_share: float) -> _Ready:
        begun = time.perf_counter()
        with self._disagreeing_if_it_fails():
            manifest, plan = await self._agree()
            sender, options = self._sender, self._options

            def put() -> WeightSource:
                stage(
                    self._source, sender, manifest, plan, staged, self._stager, cast=options.cast, gpu_share=gpu_share
                )
                return sender.source()

            source = await in_thread(put, staged.stop)
            await sender.connect(self._engine)
            try:
                request = await self._prepare(version, plan, staged, source)
            except WeightBaseMismatch as error:
                _logger.info("every tensor is sent whole: %s", error)
                await in_thread(sender.put_whole)
                request = await self._prepare(version, plan, staged, await in_thread(sender.source))
        return _Ready(request, plan, staged, time.perf_counter() - begun)

    async def _prepare(
        self, version: str, plan: WeightPlan, staged: Staged, source: WeightSource
    ) -> WeightUpdateRequest:
        request = WeightUpdateRequest(
            version=version, source=source, plan=plan, digests=staged.digests, mode=self._options.mode
        )
        self._mapped = self._prepared = True
        await self._engine.prepare_weight_update(request)
        return request

    async def _update(self, ready: _Ready) -> WeightSyncResult:
        begun = time.perf_counter()
        plan, staged = ready.plan, ready.staged
        with self._disagreeing_if_it_fails():
            self._prepared = False
            update = await self._sender.apply(self._engine, ready.request)
        ended = time.perf_counter()
        self._sender.committed(staged.digests)
        gap = await self._probe()
        sent_nbytes = self._sender.sent_nbytes
        return WeightSyncResult(
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

    async def _probe(self) -> float | None:
        probe, engine = self._options.probe, self._engine
        if probe is None:
            return None
        assert isinstance(engine, ScoringEngine)
        return await probe.gap(engine)

    @contextmanager
    def _disagreeing_if_it_fails(self) -> Iterator[None]:
        try:
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


@dataclass(frozen=True, slots=True)
class _Options:
    bucket_bytes: int
    cast: bool
    mode: PauseMode
    staging_share: float
    probe: LogprobProbe | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A staged push."""

    request: WeightUpdateRequest
    """The request, which the engine has prepared."""
    plan: WeightPlan
    staged: Staged
    seconds: float
