"""The transformers backend: a scheduler in a separate thread, and the primitives that call it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from drivetrain.backend.base import (
    Backend,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReadMedium,
    StopKind,
    TokenDelta,
)
from drivetrain.backend.toolkit.capability_sets import (
    FREEZING,
    LOGPROBS,
    RECEIVED_WEIGHTS,
    SAMPLING,
    STOPS,
    STRUCTURED_OUTPUT,
)
from drivetrain.backend.toolkit.model_folder import has_experts
from drivetrain.backend.toolkit.translation import shortened_all
from drivetrain.errors import (
    DrivetrainError,
    EngineError,
    EngineInternalError,
    EngineOutOfMemory,
    UnsupportedCapability,
)
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, Task
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.prompts import MediaInput
from drivetrain.types.weights import (
    CommitUpdate,
    CommunicatorSpec,
    PrepareUpdate,
    TensorData,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
    WeightUpdateRequest,
)
from drivetrain_transformers.translate import (
    CONFIG_NAMES,
    SEEN_WORKING,
    check_attention,
    check_deterministic,
    check_model_folder,
    device_of,
    has_grammars,
    load_arguments,
    media_capabilities,
)

if TYPE_CHECKING:
    from drivetrain_transformers.lora import Adapters
    from drivetrain_transformers.media_preparation import MediaPreparation
    from drivetrain_transformers.model import LoadedModel
    from drivetrain_transformers.pooling import Pooler
    from drivetrain_transformers.scheduler_thread import SchedulerThread
    from drivetrain_transformers.sequences import Sink
    from drivetrain_transformers.weights import Weights
    from drivetrain_weight_sync import ModelFiles

_ALWAYS = (
    LOGPROBS
    | STOPS
    | SAMPLING
    | FREEZING
    | RECEIVED_WEIGHTS
    | {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.EMBED,
        Capability.HIDDEN_STATES,
        Capability.PRIORITY,
        Capability.PROMPT_RANKS,
        Capability.REWARD_SCORE,
        Capability.SAMPLING_MASK,
        Capability.SCORE_AT,
        Capability.SLEEP_WEIGHTS,
        Capability.SLEEP_KV_CACHE,
        Capability.WEIGHTS_IN_PROCESS,
        Capability.MOE,
    }
)

logger = logging.getLogger("drivetrain.transformers")

T = TypeVar("T")

_OPENING_S: Final = 0.02
"""Interval at which the source of an update is polled until it is open, and an update until it is loaded."""


class TransformersBackend(Backend):
    """Any causal LM that transformers loads, on the CPU or one GPU."""

    name = "transformers"
    engine_distribution = "transformers"
    seen_working: ClassVar[tuple[str, str] | None] = SEEN_WORKING
    oldest_version: ClassVar[str | None] = SEEN_WORKING[0]
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES
    counts_resumed_tokens = True
    native_stops = frozenset(StopKind)
    default_isolation: ClassVar[Isolation] = Isolation.INLINE

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._runner: SchedulerThread | None = None
        self._weights: Weights | None = None
        self._media: MediaPreparation[Any] | None = None
        self._preparing: set[str] = set()
        """Ids of requests whose media are being prepared."""
        self._aborted: set[str] = set()
        """Requests among them that were aborted meanwhile."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the backend's capabilities; weights can be kept during sleep only on a device other than the CPU."""
        claimed = set(_ALWAYS) | media_capabilities(config)
        if config.task is Task.GENERATE and has_experts(config):
            claimed |= {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}
        if config.enable_prefix_caching:
            claimed.add(Capability.PREFIX_CACHE)
        if has_grammars():
            claimed |= STRUCTURED_OUTPUT
        claimed.add(Capability.DETERMINISTIC if device_of(config).startswith("cpu") else Capability.SLEEP_KEEPS_WEIGHTS)
        if device_of(config).startswith("cuda"):
            from drivetrain_weight_sync.transports import device_memory

            if device_memory.is_available():
                claimed.add(Capability.WEIGHTS_CUDA_IPC)
        if config.enable_lora:
            if importlib.util.find_spec("peft") is None:
                raise UnsupportedCapability(
                    "enable_lora=True needs the package 'peft', which is not installed in the engine's environment; "
                    "run there: pip install 'drivetrain[lora]'",
                    capability=Capability.LORA.value,
                )
            claimed |= {Capability.LORA, Capability.WEIGHTS_LORA, Capability.WEIGHTS_LORA_TENSORS}
        if importlib.util.find_spec("fsspec") is not None:
            claimed.add(Capability.SAVE_REMOTE)
        return frozenset(claimed)

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        """Refuse arguments that the configuration sets already, and a context that is longer than the model's."""
        load_arguments(config)
        check_attention(config)
        check_deterministic(config)
        check_model_folder(config)

    @classmethod
    def preload(cls) -> None:
        """Import torch and transformers."""
        import drivetrain_transformers.scheduler_thread
        import drivetrain_transformers.weights

        if has_grammars():
            import drivetrain_transformers.grammars  # noqa: F401

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Load the model in a thread, and start the scheduler."""
        loop = asyncio.get_running_loop()

        def load(stage: Callable[[str], None]) -> tuple[SchedulerThread, Weights]:
            stage("importing torch and transformers")
            from drivetrain_transformers.scheduler_thread import SchedulerThread
            from drivetrain_transformers.weights import Weights

            runner = SchedulerThread.load(self.config, stage)
            return runner, Weights(runner.model, keep=self.config.sleep_keeps_weights)

        def stage(words: str) -> None:
            loop.call_soon_threadsafe(report, words)

        with ThreadPoolExecutor(1, thread_name_prefix="drivetrain-transformers-load") as pool:
            runner, self._weights = await loop.run_in_executor(pool, load, stage)
        self._media = _media_preparation(self.config, runner.model)
        if self._media is not None:
            await self._media.check()
        runner.start()
        self._runner = runner
        return runner.model.info

    async def close(self) -> None:
        """Stop the thread and free the model."""
        runner, weights = self._runner, self._weights
        self._runner = self._weights = self._media = None

        seconds = self.config.timeouts.close

        def stop(runner: SchedulerThread, weights: Weights) -> None:
            if not runner.stop(seconds):
                logger.error(
                    "the thread of the transformers engine did not end within %g s (timeouts.close): a step is still "
                    "running; its memory is freed when this process ends",
                    seconds,
                )
                return
            runner.scheduler.free_cache()
            weights.free()
            runner.model.release_unused_memory()

        if runner is not None and weights is not None:
            await runner.stop_compiling()
            await asyncio.get_running_loop().run_in_executor(None, stop, runner, weights)

    async def died(self) -> EngineError:
        """Wait for the thread to fail, and return the error."""
        return await self.runner.died()

    async def stats(self) -> EngineStats:
        """Return the scheduler's counts of requests and memory."""
        scheduler = self.runner.scheduler
        weights = self._received

        def look() -> EngineStats:
            return EngineStats(scheduler.running, scheduler.waiting, scheduler.kv_cache_bytes, weights.nbytes)

        return await self.runner.call(look)

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        runner = self.runner
        result: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()

        def deliver(item: GenerateResult | TokenDelta | DrivetrainError) -> None:
            if result.done():
                return
            if isinstance(item, DrivetrainError):
                result.set_exception(item)
            elif isinstance(item, GenerateResult):
                result.set_result(item)

        await self._submit(request, deliver)
        try:
            return await result
        except asyncio.CancelledError:
            runner.abort([request.request_id])
            raise

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, yielding a delta per step."""
        runner = self.runner
        deltas: asyncio.Queue[GenerateResult | TokenDelta | DrivetrainError] = asyncio.Queue()
        await self._submit(request, deltas.put_nowait, streamed=True)
        ended = False
        try:
            while not ended:
                item = await deltas.get()
                if isinstance(item, DrivetrainError):
                    ended = True
                    raise item
                if not isinstance(item, TokenDelta):
                    raise EngineInternalError(f"request {request.request_id}: a stream received {type(item).__name__}")
                ended = item.result is not None
                yield item
        finally:
            if not ended:
                runner.abort([request.request_id])

    async def _submit(self, request: GenerateRequest, deliver: Sink, *, streamed: bool = False) -> None:
        """Hand a request to the scheduler, with its media."""
        runner = self.runner
        if self._media is None or not request.media:
            runner.submit(request, deliver, streamed=streamed)
            return
        self._preparing.add(request.request_id)
        try:
            runner.submit(request, deliver, streamed=streamed, media=await self._media.of(request))
            if request.request_id in self._aborted:
                runner.abort([request.request_id])
        finally:
            self._preparing.discard(request.request_id)
            self._aborted.discard(request.request_id)

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Fetch and decode images, videos and sounds."""
        if self._media is None:
            raise self._unsupported(Capability.IMAGES)
        return await self._media.read(media)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, whether running, waiting or frozen."""
        self._aborted.update(self._preparing.intersection(request_ids))
        self.runner.abort(request_ids)

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Stop stepping; ``RETRACT`` also frees the caches."""
        await self.runner.freeze(retract=mode is PauseMode.RETRACT)

    async def unfreeze(self) -> None:
        """Step again."""
        await self.runner.unfreeze()

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Free keys and values, or parameters, or both."""
        runner, weights = self.runner, self._received

        def give_back() -> None:
            if MemoryTag.KV_CACHE in tags:
                runner.scheduler.free_cache()
            try:
                if MemoryTag.WEIGHTS in tags:
                    runner.scheduler.drop_graphs()
                    weights.sleep()
            finally:
                runner.model.release_unused_memory()

        await runner.call(give_back)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the parameters' memory again; keys and values take theirs when needed."""
        runner, weights = self.runner, self._received

        def take() -> None:
            try:
                weights.wake_up()
            except BaseException:
                runner.model.release_unused_memory()  # it sleeps on, and others need the memory
                raise

        if MemoryTag.WEIGHTS in tags:
            await runner.call(take)

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of ended sequences."""
        await self.runner.call(self.runner.scheduler.prefixes.clear)

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Return parameters and persistent buffers by their checkpoint names."""
        return await self.runner.call(self._received.manifest)

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update between two steps of the batch; generation continues while a source is opened."""
        runner, weights = self.runner, self._received
        if isinstance(message, PrepareUpdate):
            prepared = await runner.call(lambda: weights.prepare(message))
            while prepared is None:
                await asyncio.sleep(_OPENING_S)
                prepared = await runner.call(weights.prepared)
            return prepared

        def receive() -> WeightReply:
            reply = weights.receive(message)
            if isinstance(message, CommitUpdate):
                runner.scheduler.weights_changed(message.version)
            return reply

        return await runner.call(receive)

    async def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        runner = self.runner
        await runner.call(lambda: runner.scheduler.relabel(version))

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group in a separate thread, while generation continues."""
        await asyncio.to_thread(self._received.join, spec)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave the group in a separate thread: the batch's may wait in a broadcast that this ends."""
        await asyncio.to_thread(self._received.leave, group_name)

    async def read_weight(self, name: str) -> TensorData:
        """Return a copy of one tensor."""
        weights = self._received
        return await self.runner.call(lambda: weights.read(name))

    async def validate_weights(self) -> WeightReport:
        """Check every tensor in place for NaN, infinity, and nothing but zeros."""
        return await self.runner.call(self._received.validate)

    async def save_sharded(self, path: str) -> None:
        """Write a model folder; the weights are written by a separate thread."""
        from drivetrain_weight_sync import save_sharded

        await save_sharded(path, self._files, self._write_weights)

    async def save_remote(self, url: str) -> None:
        """Write a model folder, and upload it."""
        from drivetrain_weight_sync import save_remote

        await save_remote(url, self._files, self._write_weights)

    async def _write_weights(self, folder: Path) -> None:
        weights = self._received
        await self.runner.call(lambda: weights.write(folder))

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter; none is ever evicted, so each one is pinned."""
        from drivetrain_weight_sync.receiver.lora_adapters import adapter_in

        adapters = self._adapters
        adapter = await asyncio.to_thread(lambda: adapters.check(adapter_in(lora_path)))
        await self.runner.call(lambda: adapters.load(lora_name, adapter))

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Receive an adapter in a separate thread, and load it between two steps of the batch."""
        from drivetrain_weight_sync.receiver.received_adapters import receive_adapter

        adapters, groups = self._adapters, self._received.groups
        adapter = await asyncio.to_thread(lambda: adapters.check(receive_adapter(update, groups)))
        await self.runner.call(lambda: adapters.load(lora_name, adapter))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        await self.runner.call(lambda: self._adapters.unload(lora_name))

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one unit vector per prompt."""
        return shortened_all(await self._pooled(prompts, self._pooler.vectors), dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's first score per sequence."""
        return await self._pooled(sequences, self._pooler.scores)

    async def _pooled(self, sequences: list[list[int]], pool: Callable[[list[list[int]]], list[T]]) -> list[T]:
        """Return the result of each sequence; a group for which memory does not suffice is divided.

        Raises:
            EngineOutOfMemory: A sequence does not fit even alone.
        """
        runner, weights = self.runner, self._received
        found: dict[int, T] = {}

        def run(group: list[int]) -> None:
            weights.require_awake()
            found.update(zip(group, pool([sequences[index] for index in group]), strict=True))

        groups = list(self._pooler.groups(sequences))
        while groups:
            group = groups.pop()
            try:
                await runner.call(partial(run, group))
                continue
            except EngineOutOfMemory as error:
                if len(group) == 1:
                    length = len(sequences[group[0]])
                    raise EngineOutOfMemory(
                        f"out of memory with one input of {length} tokens; give shorter ones: {error}", batch_size=1
                    ) from error
            # The error is gone by now, and with it what its traceback held.
            await runner.call(runner.model.release_unused_memory)
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return [found[index] for index in range(len(sequences))]

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _pooler(self) -> Pooler:
        pooler = self.runner.pooler
        if pooler is None:
            raise EngineInternalError("the engine was created to generate, and reached for embeddings or scores")
        return pooler

    @property
    def _adapters(self) -> Adapters:
        adapters = self.runner.model.adapters
        if adapters is None:
            raise self._unsupported(Capability.LORA)
        return adapters

    @property
    def _files(self) -> ModelFiles:
        from drivetrain_weight_sync import ModelFiles

        return ModelFiles(self.config.model, self.config.revision, self.runner.model.info.dtype)

    @property
    def runner(self) -> SchedulerThread:
        """The thread that owns the scheduler and the model, while the engine runs."""
        if self._runner is None:
            raise EngineInternalError("the transformers backend is not running")
        return self._runner

    @property
    def _received(self) -> Weights:
        if self._weights is None:
            raise EngineInternalError("the transformers backend is not running")
        return self._weights


def _media_preparation(config: EngineConfig, model: LoadedModel) -> MediaPreparation[Any] | None:
    """Return the preparation of the media that the model takes; None if it takes none."""
    claimed = media_capabilities(config)
    if Capability.IMAGES in claimed:
        from drivetrain_transformers.vision import Vision

        return Vision(config, model)
    if Capability.AUDIO in claimed:
        from drivetrain_transformers.hearing import Hearing

        return Hearing(config, model)
    return None
