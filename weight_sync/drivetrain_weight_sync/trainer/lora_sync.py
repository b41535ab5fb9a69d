"""Weight sync for LoRA training: only the adapter is sent, megabytes instead of the base weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import require
from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import LORA_TRANSPORTS
from drivetrain_weight_sync.copying.plan import DEFAULT_BUCKET_BYTES
from drivetrain_weight_sync.shards.contributor import Contributor
from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.shards.pieces import is_sharded
from drivetrain_weight_sync.shards.rank_discovery import Ranks
from drivetrain_weight_sync.trainer.adapter_ways import AdapterWay, FolderWay, TensorWay
from drivetrain_weight_sync.trainer.gathered_adapter import GatheredAdapter
from drivetrain_weight_sync.trainer.pushed_adapter import AdapterTensors, PeftAdapter, PushedAdapter
from drivetrain_weight_sync.trainer.rank_push import RankPush
from drivetrain_weight_sync.trainer.senders import sender_from_memory
from drivetrain_weight_sync.trainer.staging import Staged
from drivetrain_weight_sync.trainer.strategy import Strategy, choose
from drivetrain_weight_sync.transports.cuda_ipc import can_map
from drivetrain_weight_sync.transports.process_groups import GroupBackend
from drivetrain_weight_sync.transports.updatable_engine import AdaptableEngine

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from drivetrain_weight_sync.trainer.source import Actor

_FROM_MEMORY: Final = frozenset(
    {
        Capability.WEIGHTS_IN_PROCESS,
        Capability.WEIGHTS_SHARED_MEMORY,
        Capability.WEIGHTS_CUDA_IPC,
        Capability.WEIGHTS_BROADCAST,
    }
)

_NAMES: Final = frozenset(LORA_TRANSPORTS) | {Strategy(name) for name in LORA_TRANSPORTS}


@dataclass(frozen=True, slots=True)
class LoraSyncResult:
    """Sizes and timings of a push; times are in seconds."""

    version: str
    lora_name: str
    strategy: Strategy
    tensors: int
    nbytes: int
    """Bytes of the adapter's tensors."""
    stage_seconds: float
    """Time to check the adapter and copy or write it, while the engine keeps serving."""
    update_seconds: float
    """Time until the engine has loaded the new adapter and unloaded the old one."""
    total_seconds: float


class LoraSync:
    """Pushes the adapter of a peft model to an engine with ``enable_lora``. Created by :meth:`connect`.

    The first push loads the adapter, each later push updates it. Requests select it by ``lora_name``. Several policies
    are served side by side by one ``LoraSync`` each, with different names.
    """

    def __init__(
        self, way: AdapterWay | RankPush[LoraSyncResult], lora_name: str, gathered: GatheredAdapter | None = None
    ) -> None:
        self._way = way
        self._gathered = gathered
        """The adapter of ``way``, if other ranks hold parts of it."""
        self._lora_name = lora_name
        self._lock = asyncio.Lock()
        self._closed = False
        self.strategy = way.strategy
        """The strategy in use; ``AUTO`` on a rank without an engine."""

    @classmethod
    @checked
    def connect(
        cls,
        model: nn.Module | Actor | AdapterTensors,
        engine: AdaptableEngine | None,
        lora_name: str = "policy",
        strategy: Strategy | str = Strategy.AUTO,
        *,
        adapter: str = "default",
        mode: PauseMode = PauseMode.WAIT,
        directory: Path | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        group_backend: GroupBackend = "gloo",
        master_address: str = "127.0.0.1",
        group: ProcessGroup | None = None,
    ) -> LoraSync:
        """Connect an adapter to an engine. Nothing is sent, and the engine need not be started.

        Args:
            model: a ``peft.PeftModel`` with a LoRA adapter, also compiled, in DDP or sharded by FSDP2; a module or
                another object that holds one, and no other, which is looked for now and not at each push; or the
                tensors of an adapter.
            engine: the engine to push to. One rank of a sharded trainer passes it and all others pass None; every rank
                calls :meth:`push` with the same version, and every push returns or raises the same on all of them.
            lora_name: the name by which requests select the adapter.
            strategy: the transport of the adapter's tensors, as for ``WeightSync``; ``"disk"`` writes a peft folder
                that the engine loads. ``auto`` takes the fastest that the engine claims, which is ``disk`` for servers
                and fleets.
            adapter: the peft model's adapter to push.
            mode: pause mode for requests in flight that use the adapter: ``wait`` or ``abort``. They cannot continue
                with another adapter: with ``retract`` or ``in_place``, a push is refused while there are any.
            directory: parent of the folders that strategy ``disk`` creates, readable by the engine's process; None:
                the temporary folder. The folder of the last push is kept until the next push or :meth:`close`.
            bucket_bytes: most bytes that strategy ``broadcast`` sends at once.
            group_backend: as for ``WeightSync.connect``.
            master_address: as for ``WeightSync.connect``.
            group: the ``torch.distributed`` group of the ranks that push together; None: the default group if the
                adapter's tensors are DTensors or ``engine`` is None, else this process alone.

        Raises:
            InvalidRequest: an argument has the wrong type or value; the model has no adapter of that name, or holds
                several peft models; or a group is needed and ``torch.distributed`` has none, or this process is not in
                it.
            UnsupportedCapability: the engine takes no adapters, or not by that strategy.
        """
        pushed: PushedAdapter = model if isinstance(model, AdapterTensors) else PeftAdapter(model, adapter)
        if engine is None:
            rank_push = RankPush(lambda: pushed.tensors.items(), Contributor(Ranks(group)), LoraSyncResult)
            return cls(rank_push, lora_name)
        if not isinstance(engine, AdaptableEngine):
            raise InvalidRequest(f"engine={shown(engine)}: expected an InferenceEngine", field="engine")
        claimed, usable = frozenset(engine.capabilities), _transports(engine.capabilities)
        if strategy in _NAMES:
            what = f"an adapter by strategy {getattr(strategy, 'value', strategy)!r}"
            require(claimed, Capability.WEIGHTS_LORA_TENSORS, what, engine.config.backend)
        if not usable:
            require(claimed, Capability.WEIGHTS_LORA, "LoraSync", engine.config.backend)
        tensors = pushed.tensors
        gathered: GatheredAdapter | None = None
        if group is not None or any(is_sharded(tensor) for tensor in tensors.values()):
            pushed = gathered = GatheredAdapter(pushed, Gatherer(Ranks(group), bucket_bytes))
        gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        mapped = can_map(gpu, engine.gpus)
        chosen = choose(strategy, engine.isolation, usable, can_map=mapped)
        assert isinstance(chosen, Strategy), "no plugin's transport is usable"
        if chosen is Strategy.DISK:
            folder = None if directory is None else Path(directory)
            return cls(FolderWay(pushed, engine, lora_name, mode, folder), lora_name, gathered)
        sender = sender_from_memory(chosen, gpu, group_backend, master_address)
        way = TensorWay(pushed, engine, lora_name, mode, chosen, sender, bucket_bytes)
        return cls(way, lora_name, gathered)

    @checked
    async def push(self, *, version: str) -> LoraSyncResult:
        """Make the engine serve the adapter's current weights as ``version``. Pushes run one after another.

        If the push fails, the old adapter keeps serving. Base weights and other adapters do not change. Do not write to
        the adapter until this returns.

        Raises:
            InvalidRequest: the version is empty or differs from another rank's, two ranks have an engine, or the engine
                does not accept such an adapter.
            WeightPlanMismatch: the ranks' shards do not make up every tensor; nothing was sent.
            InvalidWeights: the adapter holds NaN or infinity; nothing was sent.
            WeightVerifyFailed: the tensors that arrived differ from those that were sent.
            TrainerRankLost, DeadlineExceeded: another rank ended, or does not push.
            EngineBusy: requests in flight use the adapter, and ``mode`` is ``retract`` or ``in_place``.
            WeightSyncError: the sync is closed, or the adapter was deleted, or cannot be written to its folder.
        """
        async with self._lock:
            if self._closed:
                raise WeightSyncError("this LoraSync is closed; connect a new one")
            if isinstance(self._way, RankPush):
                await self._way.stage(version, Staged(), gpu_share=1.0)
                return await self._way.update(None)
            with nullcontext() if self._gathered is None else self._gathered.releasing_ranks_if_it_fails():
                return await self._push(version, self._way, self._gathered)

    async def _push(self, version: str, way: AdapterWay, gathered: GatheredAdapter | None) -> LoraSyncResult:
        begun = time.perf_counter()
        failed = True
        try:
            if gathered is not None:
                await gathered.gather(version)
            ready = await way.stage(version)
            if gathered is not None:
                await gathered.staged()
            staged = time.perf_counter()
            await way.update(ready)
            failed = False
        finally:
            await way.end(failed=failed)
        ended = time.perf_counter()
        result = LoraSyncResult(
            version=version,
            lora_name=self._lora_name,
            strategy=self.strategy,
            tensors=ready.tensors,
            nbytes=ready.nbytes,
            stage_seconds=staged - begun,
            update_seconds=ended - staged,
            total_seconds=ended - begun,
        )
        if gathered is not None:
            await gathered.committed(result)
        return result

    async def close(self) -> None:
        """Wait for a push under way, then free the buffers of pushes; the engine keeps the adapter. Idempotent."""
        async with self._lock:
            self._closed = True
            await self._way.close()
            if self._gathered is not None:
                await self._gathered.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _transports(capabilities: Set[Capability]) -> frozenset[Capability]:
    """Return the transports by which an engine takes adapters; a folder counts as ``WEIGHTS_DISK``."""
    usable = set(_FROM_MEMORY & capabilities) if Capability.WEIGHTS_LORA_TENSORS in capabilities else set()
    if Capability.WEIGHTS_LORA in capabilities:
        usable.add(Capability.WEIGHTS_DISK)
    return frozenset(usable)
