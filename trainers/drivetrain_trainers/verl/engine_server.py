# pyright: reportMissingImports=false
"""The Ray actor that owns a replica's engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.expert_layers import ExpertLayers
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.handle import EngineHandle
from drivetrain.types.modes import MemoryTag
from drivetrain.types.prompts import ImageInput, TokenPrompt
from drivetrain.types.sampling import SamplingParams
from drivetrain_trainers.verl.adapters import adapter_rank, sleeping_memory
from drivetrain_trainers.verl.gate import Gate
from drivetrain_trainers.verl.outputs import aborted, token_output
from drivetrain_trainers.verl.plugin_names import ADAPTER, ROLLOUT
from drivetrain_trainers.verl.prompt_scores import PROMPT_LOGPROBS, score_fields, scored, top_k_of
from drivetrain_trainers.verl.routing_replay import ASKED, recording_engine, replayed_experts
from drivetrain_trainers.verl.sampling import Lengths, sampling_params
from drivetrain_trainers.verl.settings import engine_config

if TYPE_CHECKING:
    from PIL.Image import Image


class EngineServer:
    """Owns one engine, and answers the calls that verl makes to a rollout's server.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        model: ``actor_rollout_ref.model``.
        mode: Value of verl's ``RolloutMode``.
        is_teacher: True for a distillation's teacher, which never sleeps, and whose weights stay as they are.
    """

    def __init__(self, rollout: object, model: object, mode: str, is_teacher: bool = False) -> None:
        self._rollout: RolloutConfig = omega_conf_to_dataclass(rollout)
        self._model: HFModelConfig = omega_conf_to_dataclass(model, dataclass_type=HFModelConfig)
        sleeps = bool(self._rollout.free_cache_engine) and not is_teacher
        self._sleeps = sleeps and mode != "standalone"
        self._frees_cache = sleeps and mode != "colocated"
        self._mode = mode
        self._is_teacher = is_teacher
        self._lora = ADAPTER if adapter_rank(self._model) else None

    async def start(self) -> str:
        """Start the engine; return its address.

        Raises:
            InvalidConfig: The engine cannot do what a field of the configuration asks for.
            UnsupportedCapability: Routing is to be replayed, and the engine does not return the experts of all tokens.
            EngineStartError: The engine did not start.
        """
        engine = self._make()
        needed = {Capability.SLEEP_KV_CACHE} if self._frees_cache else set()
        needed |= {Capability.SLEEP_KV_CACHE, Capability.SLEEP_WEIGHTS} if self._sleeps else set()
        if not engine.capabilities >= needed:
            raise InvalidConfig(
                f"actor_rollout_ref.rollout.free_cache_engine=True: the {engine.config.backend} backend cannot free "
                "the memory of weights and KV cache here; set it to false",
                field="actor_rollout_ref.rollout.free_cache_engine",
            )
        await engine.start()
        handle = await engine.handle()
        self._handles = {ray.get_runtime_context().get_node_id() if ray.is_initialized() else "": handle}
        self.engine: InferenceEngine = engine
        """The engine that this server owns, once it has started."""
        self._expert_layers = ExpertLayers(engine.config)
        self._gate = Gate()
        context = engine.model_info.context_length
        self._lengths = Lengths(self._rollout.prompt_length, self._rollout.response_length, context)
        return handle.address

    def _make(self) -> InferenceEngine:
        config = engine_config(self._rollout, self._model, mode=self._mode, is_teacher=self._is_teacher)
        engine = recording_engine(config) if self._rollout.enable_rollout_routing_replay else create_engine(config)
        if self._lora and self._sleeps and Capability.SLEEP_KEEPS_WEIGHTS in engine.capabilities:
            if self._rollout.engine_kwargs[ROLLOUT].get("sleep_keeps_weights") is None:
                return create_engine(engine.config.model_copy(update={"sleep_keeps_weights": True}))
        return engine

    async def handle(self, node: str = "") -> EngineHandle:
        """Return a handle to the started engine: a Unix socket for this node's processes, a TCP address for others.

        Args:
            node: Ray's id of the node that the handle is for.
        """
        if node not in self._handles:
            address = ray.util.get_node_ip_address()
            listen = f"[{address}]:0" if ":" in address else f"{address}:0"
            self._handles[node] = await self.engine.handle(listen, announce=address)
        return self._handles[node]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        request_id: str,
        image_data: Sequence[Image] | None = None,
        video_data: Sequence[object] | None = None,
        audio_data: Sequence[object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> TokenOutput:
        """Sample one response, and score the prompt if ``sampling_params`` have ``prompt_logprobs``.

        Requests that arrive between ``abort_all_requests`` and ``resume_generation`` wait, for at most
        ``timeouts.generate`` seconds, or come back aborted if that call said so.

        Raises:
            InvalidRequest: A parameter is unknown or out of range, or the prompt fills the context.
            UnsupportedCapability: The engine cannot do what a parameter or the prompt asks for.
        """
        _refuse_media(video_data, audio_data, mm_processor_kwargs)
        _check_images(len(image_data or ()), self._rollout.limit_images)
        ids = tuple(int(token) for token in prompt_ids)
        given = dict(sampling_params)
        top_k = top_k_of(given.pop(PROMPT_LOGPROBS, None))
        params = self._params(given, request_id, ids)
        prompt = TokenPrompt(token_ids=ids, media=tuple(map(ImageInput.from_pil, image_data or ())))
        async with deadline(self.engine.config.timeouts.generate, "a response"), self._gate.admitted() as admitted:
            if not admitted:
                return aborted(self.engine.get_weight_version())
            if top_k is not None:
                completion = await scored(self.engine, prompt, params, top_k, self._lora)
            else:
                completion = (await self.engine.generate([prompt], params, lora=self._lora)).completions[0]
        output = token_output(completion, self.engine.get_weight_version())
        if self._rollout.enable_rollout_routing_replay:
            output.routed_experts = replayed_experts(completion, self._expert_layers)
        if top_k is not None:
            output.extra_fields |= score_fields(completion, top_k)
        return output

    def _params(self, given: Mapping[str, object], request_id: str, prompt_ids: Sequence[int]) -> SamplingParams:
        rollout = self._rollout
        defaults = {"repetition_penalty": rollout.repetition_penalty, "ignore_eos": rollout.ignore_eos}
        if rollout.enable_rollout_routing_replay:
            defaults |= ASKED
        if rollout.full_determinism:
            # verl keeps the id in later turns and when an aborted response goes on, which must not draw the same again.
            defaults["seed"] = rollout.seed + zlib.crc32(f"{request_id} {prompt_ids}".encode())
        return sampling_params(given, len(prompt_ids), self._lengths, defaults)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        """Abort all requests; later ones wait for :meth:`resume_generation`.

        Args:
            reject_request: Later requests come back aborted instead.
        """
        async with deadline(self.engine.config.timeouts.control, "aborted requests to come back"):
            count = await self._gate.close(self.engine.abort_generation, rejecting=reject_request)
        return {"aborted_count": count}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._gate.open()

    async def sleep(self) -> None:
        """Wait for the requests in flight, and free the memory of weights and KV cache."""
        if self._sleeps:
            await self._free(*sleeping_memory(self.engine.config))

    async def release_kv_cache(self) -> None:
        """Wait for the requests in flight, and free the memory of the KV cache."""
        if self._frees_cache:
            await self._free(MemoryTag.KV_CACHE)

    async def _free(self, *tags: MemoryTag) -> None:
        await self.engine.sleep(tags, drain_timeout=self.engine.config.timeouts.control)

    async def wake_up(self) -> None:
        """Allocate memory again; the weights of a hybrid engine come with the next update."""
        if self._sleeps:
            await self.engine.wake_up([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])

    async def resume_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        if self._frees_cache:
            await self.engine.wake_up([MemoryTag.KV_CACHE])

    async def clear_kv_cache(self) -> None:
        """Discard every cached prefix. A weight update does so by itself."""
        await self.engine.reset_prefix_cache()

    async def start_profile(self, **_: object) -> None:
        """Do nothing: a configuration that enables verl's profiler was refused."""

    async def stop_profile(self) -> None:
        """Do nothing, as :meth:`start_profile`."""


def _check_images(count: int, most: int | None) -> None:
    if most is not None and count > most:
        raise InvalidRequest(
            f"image_data has {count} images, and actor_rollout_ref.rollout.limit_images={most}; raise the limit or "
            "leave some out",
            field="image_data",
        )


def _refuse_media(
    video: Sequence[object] | None, audio: Sequence[object] | None, processor: Mapping[str, object] | None
) -> None:
    for name, given in (("video_data", video), ("audio_data", audio)):
        if given:
            raise UnsupportedCapability(
                f"{name} has {len(given)} items, and the drivetrain rollout takes images alone; leave them out"
            )
    if processor:
        raise InvalidRequest(
            f"mm_processor_kwargs names {', '.join(processor)}: engines read images with the model's own settings; "
            "leave it out",
            field="mm_processor_kwargs",
        )
