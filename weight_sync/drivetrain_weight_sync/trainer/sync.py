"""The trainer's side: connect a source to an engine once, and push a new version after each step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import require
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain_weight_sync.copying.plan import DEFAULT_BUCKET_BYTES
from drivetrain_weight_sync.shards.contributor import Contributor
from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.shards.rank_discovery import Ranks
from drivetrain_weight_sync.trainer.engine_push import EnginePush, PushOptions
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.logprob_probe import LogprobProbe, ScoringEngine
from drivetrain_weight_sync.trainer.rank_push import RankPush
from drivetrain_weight_sync.trainer.result import WeightSyncResult
from drivetrain_weight_sync.trainer.senders import sender_from_memory
from drivetrain_weight_sync.trainer.source import Source, WeightInput
from drivetrain_weight_sync.trainer.staging import Staged
from drivetrain_weight_sync.trainer.strategy import Strategy, choose
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcInPlaceSender, can_map
from drivetrain_weight_sync.transports.disk import DiskSender
from drivetrain_weight_sync.transports.plugins import Transport
from drivetrain_weight_sync.transports.process_groups import GroupBackend
from drivetrain_weight_sync.transports.updatable_engine import UpdatableEngine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightSync:
    """Pushes the weights of one source to one engine. Created by :meth:`connect`."""

    def __init__(self, way: EnginePush | RankPush[WeightSyncResult], staging_share: float) -> None:
        self._way: Any = way
        """``Any``: the two differ in the type that their steps hand on."""
        self._staging_share = staging_share
        self._lock = asyncio.Lock()
        self._closed = False
        self._open: WeightTransferHandle[WeightSyncResult] | None = None
        """A transfer that was started, and neither finished nor cancelled."""
        self.strategy = way.strategy
        """The strategy in use; ``AUTO`` on a rank without an engine."""

    @classmethod
    @checked
    def connect(
        cls,
        source: WeightInput,
        engine: UpdatableEngine | None,
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
        group: ProcessGroup | None = None,
    ) -> WeightSync:
        """Connect a source of tensors to an engine. Nothing is sent, and the engine need not be started.

        Args:
            source: a torch module or an object with one as its only module that has tensors, a mapping of names to
                tensors, (name, tensor) pairs, or a function without arguments that returns pairs. An object that can be
                iterated over or called without arguments yields pairs, whatever modules it has. A tensor may be a
                DTensor, as of FSDP2, or a :class:`WeightShard`. Names are those of the checkpoint, or of the
                transformers model in memory; prefixes of ``torch.compile`` and DDP are dropped. The module of an object
                is looked for now, and not at each push.
            engine: the engine to push to. Once started, it reports its GPUs, which ``auto`` takes into account. One
                rank of a sharded trainer passes it and all others pass None; every rank calls :meth:`push` with the
                same version, and every push returns or raises the same on all of them.
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
            group: the ``torch.distributed`` group of the ranks that push together; None: the default group if the
                source is a module or a mapping with DTensors or :class:`WeightShard` values, else this process alone.
                Ranks wait for each other as long as ``init_process_group``'s timeout says.

        Raises:
            InvalidRequest: an argument has the wrong type or value, or conflicts with ``share_tensors``; or a group is
                needed and ``torch.distributed`` has none, or this process is not in it.
            UnsupportedCapability: the engine cannot take weights that way, or cannot score the probe's sequences.
        """
        if engine is None:
            given = Source(source)
            return cls(RankPush(given.shards, Contributor(Ranks(group)), WeightSyncResult), staging_share)
        if not isinstance(engine, UpdatableEngine):
            raise InvalidRequest(f"engine={shown(engine)}: expected an InferenceEngine", field="engine")
        given = Source(source, InMemoryNames(engine.config))
        gatherer = Gatherer(Ranks(group), bucket_bytes) if group is not None or given.sharded else None
        directory = None if directory is None else Path(directory)
        mapped = can_map(given.gpu, engine.gpus)
        chosen = choose(strategy, engine.isolation, engine.capabilities, can_map=mapped, directory=directory)
        if probe is not None:
            if not isinstance(probe, LogprobProbe):
                raise InvalidRequest(f"probe={shown(probe)}: expected a LogprobProbe", field="probe")
            require(frozenset(engine.capabilities), Capability.SCORE_TOKENS, "a logprob probe", engine.config.backend)
            if not isinstance(engine, ScoringEngine):
                raise InvalidRequest("a probe needs an engine with compute_logprobs()", field="probe")
        if share_tensors and (chosen is not Strategy.CUDA_IPC or not given.held or gatherer is not None):
            how = f"strategy {chosen.value!r}" if isinstance(chosen, Strategy) else "a plugin's transport"
            raise InvalidRequest(
                "share_tensors is for strategy 'cuda_ipc' and the tensors of a module or a mapping; this is "
                + (how if chosen is not Strategy.CUDA_IPC else "a source that is read again at every push"),
                field="share_tensors",
            )
        options = PushOptions(bucket_bytes, cast, mode, probe)
        if isinstance(chosen, Transport):
            return cls(EnginePush(given, engine, Strategy.PLUGIN, chosen.sender(), options, gatherer), staging_share)
        if chosen is Strategy.DISK:
            sender: Sender = DiskSender(directory)
        else:
            sender = sender_from_memory(chosen, given.gpu, group_backend, master_address)
        if share_tensors:
            sender = CudaIpcInPlaceSender()
        return cls(EnginePush(given, engine, chosen, sender, options, gatherer), staging_share)

    @checked
    async def push(self, *, version: str) -> WeightSyncResult:
        """Make the engine serve the source's weights as ``version``; every push is a full one.

        Weights that fail a check are refused before the engine is asked for anything. Do not write to the tensors until
        this returns. Pushes of one ``WeightSync`` run one after another.

        Raises:
            InvalidRequest: the version is empty or differs from another rank's, or two ranks have an engine.
            WeightPlanMismatch: tensors are missing, extra, or of another dtype or shape; the engine keeps serving.
            InvalidWeights: the source holds NaN or infinity; the engine keeps serving.
            WeightTransferFailed, WeightVerifyFailed: the engine is dirty until a push succeeds.
            TrainerRankLost, DeadlineExceeded: another rank ended, or does not push; the engine keeps serving.
            WeightProbeFailed: the new weights are served, but the engine's logprobs differ from the trainer's.
            WeightSyncError: the sync is closed, a generator given as source was already read, or an adapter of a module
                is disabled or cannot be merged.
        """
        async with self._lock:
            self._require_open()
            try:
                ready = await self._way.stage(version, Staged(), gpu_share=1.0)
                result: WeightSyncResult = await self._way.update(ready)
                return result
            finally:
                await self._way.let_go()

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
            self._way.stage(version, staged, gpu_share=self._staging_share),
            self._way.update,
            self._way.let_go,
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

    async def close(self) -> None:
        """Wait for a push under way, then free the arena and everything else made for pushing. Idempotent.

        A transfer that was started and not finished is cancelled.
        """
        if self._open is not None and not self._open.over:
            await self._open.cancel()
        async with self._lock:
            self._closed = True
            await self._way.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
