# pyright: reportMissingImports=false
"""The SGLang backend: ``sglang.Engine`` in this process, its schedulers in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import psutil

from drivetrain.backend.base import (
    GenerateRequest,
    ModelInfo,
    ReadMedium,
)
from drivetrain.backend.toolkit.folder_pooling import folder_pooling
from drivetrain.backend.toolkit.folders import made_folder
from drivetrain.backend.toolkit.launcher_variables import outside_the_trainers_group
from drivetrain.backend.toolkit.model_folder import (
    check_model_folder,
    config_levels,
    has_experts,
    require_dense_for_adapters,
)
from drivetrain.backend.toolkit.serial_calls import SerialCalls
from drivetrain.backend.toolkit.start_errors import start_errors
from drivetrain.backend.toolkit.translation import shortened_all
from drivetrain.backend.toolkit.xgrammar_limits import refuse_ignored_parts
from drivetrain.errors import (
    EngineDied,
    EngineInternalError,
    InvalidRequest,
    UnsupportedCapability,
)
from drivetrain.media.qwen_audio import SoundReader, audio_capabilities
from drivetrain.media.qwen_vision import VisionReader
from drivetrain.process.process_tree import runs
from drivetrain.process.shared_memory_files import shared_memory_of, unlink
from drivetrain.process.worker_calls import CallNotTaken
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.modes import PauseMode
from drivetrain.types.prompts import MediaInput
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_sglang.errors import as_engine_error
from drivetrain_sglang.in_engine import invite
from drivetrain_sglang.multimodal_inputs import audio_data, image_data, keep_token_ids
from drivetrain_sglang.translate import (
    ABORTED_UNREAD,
    ABORTED_WORDS,
    ADAPTED_WITH,
    CONFIG_NAMES,
    LORA_RANK,
    MOVES_CACHE,
    ROUTED_EXPERTS,
    SEEN_WORKING,
    Collected,
    RowFailure,
    carries_masks,
    carries_scores,
    engine_arguments,
    fitting,
    is_in_blocks,
    labels_tokens,
    refuse_latent_attention,
    request_fields,
    require_pooling,
    sampling_params,
    was_aborted_unread,
)
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters
from drivetrain_weight_sync.receiver.served_model import ServedModel, name_of_dtype
from drivetrain_weight_sync.receiver.worker_backend import OF_PLAIN_WEIGHTS, WorkerBackend, device_type_of

_MEMORY_SAVERS: Final = frozenset(
    {
        Capability.SLEEP_WEIGHTS,
        Capability.SLEEP_KV_CACHE,
        Capability.SLEEP_CUDA_GRAPH,
        Capability.SLEEP_KEEPS_WEIGHTS,
    }
)
"""Capabilities that SGLang's memory saver provides on a GPU."""

_RECOMPUTED: Final = frozenset({Capability.PAUSE_RETRACT, Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT})
"""Capabilities that recompute generated tokens in one pass, whose rounding on a GPU differs from single steps'."""

_SEEN_S: Final = 1.0
"""Time within which the end of one of SGLang's processes is noticed."""


class SGLangBackend(WorkerBackend[Collected]):
    """Any model that SGLang serves. Needs a host process, which SGLang may end together with its children."""

    name = "sglang"
    engine_distribution = "sglang"
    seen_working: ClassVar[tuple[str, str] | None] = SEEN_WORKING
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES
    counts_resumed_tokens = True
    endangers_its_process: ClassVar[bool] = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.engine: Any = None
        """SGLang's own ``Engine``, while it runs."""
        self._processes: list[psutil.Process] = []
        """SGLang's own processes."""
        self._adaptable: Sequence[Mapping[str, tuple[int, ...]]] = ()
        """Shapes of the weights that adapters can change, once for each way to name them."""
        self._plain = PlainAdapters(config.max_lora_rank or LORA_RANK, ADAPTED_WITH)
        self._staged: dict[str, str] = {}
        """Paths of the adapters that came as tensors, by name."""
        self._expert_shape = (0, 0)
        """Number of layers, and of experts per token."""
        self._expert_layers: list[int] = []
        """Layers whose experts SGLang records, if it was told to."""
        self._media: VisionReader | SoundReader | None = None
        self._profile: tuple[Path, set[Path]] = (Path(), set())
        self._manager_calls = SerialCalls()
        """Calls of SGLang's that number no answers."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the capabilities of SGLang with the in-engine plugin."""
        claimed = set(super().capabilities(config))
        if is_in_blocks(config_levels(config.model)):
            claimed -= OF_PLAIN_WEIGHTS
        if config.deterministic:
            claimed -= _RECOMPUTED
        if carries_masks():
            claimed.add(Capability.SAMPLING_MASK)
        if config.engine_kwargs.get("enable_return_hidden_states"):
            claimed.add(Capability.HIDDEN_STATES)
        is_on_cpu = device_type_of(config) == "cpu"
        if config.engine_kwargs.get(ROUTED_EXPERTS) and config.task is Task.GENERATE and has_experts(config):
            claimed.add(Capability.ROUTED_EXPERTS)
            if is_on_cpu:
                claimed.add(Capability.PROMPT_ROUTED_EXPERTS)  # not run on a GPU yet
        if is_on_cpu and carries_scores():
            claimed.add(Capability.SCORE_AT)  # on a GPU, a graph may hold the logits' computation
        if is_on_cpu:
            claimed |= audio_capabilities(config)  # not run on a GPU yet
        else:
            claimed |= _of_a_gpu(config)
            if not config.enable_sleep or importlib.util.find_spec("torch_memory_saver") is None:
                claimed -= _MEMORY_SAVERS
        return frozenset(claimed)

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        """Refuse arguments that SGLang would not honour, and values that do not fit the model."""
        arguments = engine_arguments(config, device_type_of(config), config.dtype, config.context_length or 0)
        check_model_folder(config, "SGLang")
        folder_pooling(config)
        if device_type_of(config) == "cpu":
            require_dense_for_adapters(config, config_levels(config.model), "SGLang")
            refuse_latent_attention(arguments, config_levels(config.model))

    @classmethod
    def preload(cls) -> None:
        """Import SGLang, which takes most of a start."""
        import sglang.srt.managers.scheduler  # noqa: F401
        import transformers.models.auto.modeling_auto  # noqa: F401

        _engine_class()

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start SGLang, which uses this event loop from here on."""
        report("importing SGLang")
        invite(self.listen())
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        # SGLang disables this for its processes, but NCCL forms no group of ranks that differ in it: keep NCCL's
        # default.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "-2")
        if Capability.SLEEP_CUDA_GRAPH in self.capabilities(self.config):
            os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        with start_errors("SGLang"), outside_the_trainers_group():
            info = self._start(report)
        await self.connect("SGLang's scheduler is gone")
        report("warming up")
        await self._warm_up()
        if (pooling := folder_pooling(self.config)) is not None:
            require_pooling(pooling, cast("str | None", await self.ask("pooling")))
        if Capability.ROUTED_EXPERTS in self.capabilities(self.config):
            self._expert_layers = cast("list[int]", await self.ask("expert_layers"))
        return replace(info, gpus=await self.gpus())

    def _start(self, report: Callable[[str], None]) -> ModelInfo:
        # In this thread: SGLang installs signal handlers, which only the main thread can.
        config = self.config
        model = ServedModel.read(config, device_type_of(config), "SGLang")
        model.require_weights()
        report(f"starting SGLang {version(self.engine_distribution)} on {model.device}")
        arguments = engine_arguments(config, model.device, model.dtype, model.context_length, model.overrides)
        if Capability.ROUTED_EXPERTS not in self.capabilities(config):
            arguments.pop(ROUTED_EXPERTS, None)  # without experts, SGLang would fail to start
        self.engine = _engine_class()(**arguments)
        self._processes = psutil.Process().children(recursive=True)
        started = self.engine._scheduler_init_result.scheduler_infos[0]
        served = self._manager.model_config
        claimed = self.capabilities(config)
        if Capability.IMAGES in claimed:
            self._media = VisionReader(config, model.model_config, model.context_length)
        elif Capability.AUDIO in claimed:
            self._media = SoundReader(config, model.model_config, model.context_length)
            keep_token_ids(self._manager.mm_processor)
        experts = getattr(model.text, "num_experts_per_tok", None) or 0
        self._expert_shape = (int(model.text.num_hidden_layers), int(experts))
        self._adaptable = model.adaptable if config.enable_lora else ()
        room = fitting(model.context_length, started.get("max_total_num_tokens", float("inf")))
        return model.info(vocab_size=served.vocab_size, dtype=served.dtype, context_length=room)

    async def _warm_up(self) -> None:
        if self.config.task is not Task.GENERATE:
            await self._pooled([[0, 0]])
            return
        media = self._media
        if isinstance(media, VisionReader):
            await self.warm_up([await media.example(size) for size in ((64, 64), (64, 128))])
        else:
            await self.warm_up([] if media is None else [await media.example()])

    async def close(self) -> None:
        """End SGLang's processes."""
        engine, self.engine = self.engine, None
        self.disconnect()
        if engine is not None:
            # SGLang kills its processes, including the one that would remove their shared memory.
            this = psutil.Process()
            files = shared_memory_of([this, *this.children(recursive=True)])
            await asyncio.to_thread(engine.shutdown)
            unlink(files)
        self._plain.close()

    # Generation --------------------------------------------------------------------------------------------------

    def collect(self, request: GenerateRequest) -> Collected:
        """Return an empty sample."""
        return Collected(request, self._expert_shape, self._expert_layers)

    async def outputs(
        self, request: GenerateRequest, sample: Collected, *, stream: bool
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of SGLang's output."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        read: dict[str, list[dict[str, Any]]] = {}
        try:
            grammar = request.params.structured_output
            if grammar is not None and self.config.engine_kwargs.get("grammar_backend") in (None, "xgrammar"):
                refuse_ignored_parts(grammar)
            async with self.admitted(request, sample) as rid:
                if request.media and isinstance(self._media, VisionReader):
                    read["image_data"] = image_data(await self._media.patches(request.media))
                elif request.media and isinstance(self._media, SoundReader):
                    read["audio_data"] = audio_data(await self._media.prepared(request.media))
                params_of = partial(sampling_params, deterministic=self.config.deterministic)
                key = self.cache_key_of(request)
                fields = request_fields(request, rid, key, stream=stream, params_of=params_of, **read)
                wanted = GenerateReqInput(**fields)
                async with aclosing(self._manager.generate_request(wanted)) as outputs:
                    try:
                        async for output in outputs:
                            failure = RowFailure.of(output)
                            if failure is not None and failure.is_cached:
                                self.renew_cache_key()
                            yield ABORTED_UNREAD if was_aborted_unread(output) else output
                    except (asyncio.CancelledError, GeneratorExit):
                        await self.send_abort([rid])
                        raise
        except Exception as error:
            if str(error) != ABORTED_WORDS:
                raise as_engine_error(error) from error
            yield ABORTED_UNREAD

    def cache_key_of(self, request: GenerateRequest) -> str:
        """Return the key of a request's prefixes: one of its own if their experts may be lost."""
        key = super().cache_key_of(request)
        moves = any(self.config.engine_kwargs.get(name) for name in MOVES_CACHE)
        return f"{key}-{self.new_id()}" if moves and request.params.return_prompt_routed_experts else key

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Fetch and decode images, videos and sounds."""
        if self._media is None:
            raise UnsupportedCapability("this model takes no images", capability=Capability.IMAGES.value)
        return await self._media.read(media)

    async def send_abort(self, names: Sequence[str]) -> None:
        """Abort requests past SGLang's own ``abort_request``, which sends one abort each, and none without a waiter."""
        if self.engine is None:
            return
        from sglang.srt.managers.io_struct import AbortReq

        for rid in names:
            self._manager._dispatch_to_scheduler(AbortReq(rid=rid))

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Stop stepping; ``RETRACT`` also frees the caches."""
        await self.ask("freeze", mode)

    async def unfreeze(self) -> None:
        """Step again."""
        await self.ask("unfreeze")

    async def clear_hicache_storage(self) -> None:
        """Clear the cache's storage tier."""
        answer = await self._manager_calls.run(self._manager.clear_hicache_storage)
        if not answer.success:
            raise EngineInternalError("SGLang did not clear the storage tier of its cache")

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_adapter_folder(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        folder = await asyncio.to_thread(self._plain.folder_for, lora_name, lora_path, *self._adaptable)
        wanted = LoadLoRAAdapterReqInput(lora_name=lora_name, lora_path=folder, pinned=pinned)
        try:
            _require_success("lora_path", await self._manager.load_lora_adapter(wanted, None))
        except InvalidRequest:
            self._plain.remove(lora_name)
            raise

    async def load_adapter_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Have every worker receive an adapter, then load it."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        path = await self.stage_adapter(update, self._plain, self._adaptable)
        wanted = LoadLoRAAdapterReqInput(lora_name=lora_name, lora_path=path, pinned=pinned)
        try:
            _require_success("lora", await self._manager.load_lora_adapter(wanted, None))
        except Exception:
            await self.drop_adapter(path)
            raise
        self._staged[lora_name] = path

    async def unload_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        wanted = UnloadLoRAAdapterReqInput(lora_name=lora_name)
        _require_success("lora_name", await self._manager.unload_lora_adapter(wanted, None))
        self._plain.remove(lora_name)
        if lora_name in self._staged:
            await self.drop_adapter(self._staged.pop(lora_name))

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one unit vector per prompt."""
        return shortened_all(await self._pooled(prompts), dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's first score per sequence."""
        return [scores[0] for scores in await self._pooled(sequences)]

    async def _pooled(self, sequences: list[list[int]]) -> list[list[float]]:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        try:
            async with aclosing(self._manager.generate_request(EmbeddingReqInput(input_ids=sequences))) as outputs:
                async for output in outputs:
                    return [list(one["embedding"]) for one in output]
        except Exception as error:
            raise as_engine_error(error) from error
        raise EngineInternalError("SGLang ended a request for embeddings without a result")

    # Profile -----------------------------------------------------------------------------------------------------

    async def start_profile(self, directory: str) -> None:
        """Start recording the scheduler with torch's profiler."""
        from sglang.srt.managers import io_struct

        activities = ["CPU"] if device_type_of(self.config) == "cpu" else ["CPU", "GPU"]
        folder = await asyncio.to_thread(made_folder, directory, "directory")
        request = io_struct.ProfileReq(output_dir=str(folder), activities=activities, with_stack=False)
        self._profile = folder, await asyncio.to_thread(_files_in, folder)
        await self._manager_calls.run(lambda: self._manager.start_profile(request))

    async def stop_profile(self) -> str:
        """Write the trace file, and return its path."""
        await self._manager_calls.run(self._manager.stop_profile)
        directory, before = self._profile
        after = await asyncio.to_thread(_files_in, directory)
        written = sorted(path for path in after - before if ".json" in path.name)
        if not written:
            raise EngineInternalError(f"SGLang wrote no trace file into {directory}")
        return str(written[0])

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _manager(self) -> Any:
        if self.engine is None:
            raise EngineInternalError("the SGLang backend is not running")
        return self.engine.tokenizer_manager

    def labels_tokens(self) -> bool:
        """Return whether this SGLang release reports the weight version of each token."""
        return labels_tokens()

    def served_dtype(self) -> str:
        """Return the dtype of SGLang's weights."""
        return name_of_dtype(self._manager.model_config.dtype)

    async def ask(self, method: str, *arguments: object) -> object:
        """Call the worker in the scheduler's process."""
        from drivetrain_sglang.in_engine.scheduler_calls import methods

        try:
            return await self.worker.call(methods[method], arguments)
        except CallNotTaken as error:
            if await self._lost_process():
                raise EngineDied(f"SGLang lost a process of its own: {error}") from error
            raise EngineInternalError(f"SGLang's scheduler could not take a call: {error}") from error

    async def _lost_process(self) -> bool:
        """Return whether one of SGLang's processes has ended; waits a moment, as a rank may notice it earlier."""
        ends = asyncio.get_running_loop().time() + _SEEN_S
        while all(runs(process) for process in self._processes):
            if asyncio.get_running_loop().time() > ends:
                return False
            await asyncio.sleep(0.01)
        return True


def _files_in(directory: Path) -> set[Path]:
    return set(directory.iterdir())


def _require_success(field: str, result: Any) -> None:
    if not result.success:
        raise InvalidRequest(f"SGLang refused the adapter: {result.error_message}", field=field)


def _engine_class() -> Any:
    """Return ``sglang.Engine`` without a detokenizer: its requests and results are token ids."""
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, *arguments: object, **named: object) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine


def _of_a_gpu(config: EngineConfig) -> set[Capability]:
    """Return capabilities that need a GPU."""
    from drivetrain_weight_sync.transports import device_memory

    found = {
        Capability.SLEEP_KEEPS_WEIGHTS,
        Capability.SLEEP_CUDA_GRAPH,
        Capability.DETERMINISTIC,
        Capability.EXPERT_PARALLEL,
    }
    if device_memory.is_available():
        found.add(Capability.WEIGHTS_CUDA_IPC)
    if config.engine_kwargs.get("hicache_storage_backend"):
        found.add(Capability.HICACHE_STORAGE)
    return found
