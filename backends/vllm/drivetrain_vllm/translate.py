# pyright: reportMissingImports=false
"""Translate drivetrain's names to vLLM's. Pure functions over plain values."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.collected_sample import Added, CollectedSample
from drivetrain.backend.toolkit.engine_versions import source_mentions
from drivetrain.backend.toolkit.translation import (
    as_slice,
    is_plain,
    no_token_allowed,
    non_finite_logits,
    require_fields_of_a_cpu,
    spreads_experts,
    wants_experts,
    with_engine_kwargs,
)
from drivetrain.errors import EngineInternalError, InvalidConfig, InvalidRequest
from drivetrain.media.qwen_vision import ENGINE_BOUNDS, ENGINE_FETCHES, ENGINE_PREPARES
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.outputs import FinishReason, TopLogprobs
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import EbnfGrammar, JsonSchema, LogprobsMode, RegexGrammar
from drivetrain.types.sampling import SamplingParams as OurParams
from drivetrain.types.token_scores import TokenScores
from drivetrain_sampling import NO_TOKEN, NOT_FINITE
from drivetrain_sampling.encoded_params import encode_params
from drivetrain_sampling.packed_masks import joined
from drivetrain_sampling.scores import encode_scoring, packed_scores

CONFIG_NAMES: Final[Mapping[str, str]] = {
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    "device": "CUDA_VISIBLE_DEVICES",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "context_length": "max_model_len, with one more",
    "enable_prefix_caching": "enable_prefix_caching",
    "attention_backend": "attention_backend",
    "tensor_parallel_size": "tensor_parallel_size",
    "expert_parallel_size": "enable_expert_parallel",
    "task": "runner",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "enable_sleep": "enable_sleep_mode",
    "sleep_keeps_weights": "additional_config",
    "media": "drivetrain.media",
    "engine_kwargs": "AsyncEngineArgs(**)",
}
"""EngineConfig fields, with the argument or component that honours each."""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "allowed_media_domains": ENGINE_FETCHES,
    "allowed_local_media_path": ENGINE_FETCHES,
    "media_io_kwargs": ENGINE_BOUNDS,
    "mm_processor_kwargs": ENGINE_PREPARES,
    "mm_processor_cache_gb": ENGINE_PREPARES,
    "mm_processor_cache_type": ENGINE_PREPARES,
    "mm_processor_device": ENGINE_PREPARES,
    "mm_device_do_normalize": ENGINE_PREPARES,
    "video_pruning_rate": ENGINE_PREPARES,
    "return_sampling_mask": "ask for masks request by request, with SamplingParams(return_sampling_mask=True)",
}
"""VLLM's arguments that have no effect here, and the reason."""

ADAPTERS_IN_PART: Final = ("lora_target_modules", "enable_tower_connector_lora")
"""VLLM's arguments that decide which layers of an adapter it serves. It drops the others without an error."""

SEEN_WORKING: Final = ("0.26.0", "0.32.0")
"""Oldest and newest release on which the conformance suite was run, on a GPU and on a CPU. Their difference is detected
by feature: whether vLLM labels tokens with weight versions."""

KEY: Final = "drivetrain"
"""Key of ``extra_args`` under which a request carries its sampling parameters."""

SCORING: Final = "drivetrain_scoring"
"""Key of ``extra_args`` under which a request carries what to score of its prompt."""

SCORES: Final = "drivetrain_scores"
"""Attribute of a prompt's logprobs in which its scores come, if the request asks for both."""

STOPS: Final = "drivetrain_stops"
"""Key of ``extra_args`` for a request's own stop ids, if it has a grammar."""

SECOND_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that selects vLLM's first (0) or second (1) model runner."""

ROUTED_EXPERTS: Final = "enable_return_routed_experts"
"""VLLM's argument for recording the experts of each token."""

KEEPS_WEIGHTS: Final = "drivetrain_sleep_keeps_weights"
"""Key of ``additional_config`` that tells vLLM's workers to copy weights to the host when they sleep."""

LORA_RANK: Final = 64
"""Largest rank of an adapter, unless set by ``max_lora_rank``."""
_RANKS_OF_VLLM: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that every release of vLLM takes for ``max_lora_rank``. Adapters are held to the configured one at loading."""

MOST_LORAS: Final = 8
"""Most adapters loaded at once, unless set by ``max_loras``."""

CPU_CACHE_BYTES: Final = 1 << 28
"""Size of the KV cache on a CPU, unless set in ``engine_kwargs``."""

_ON_A_CPU: Final[Mapping[str, object]] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": CPU_CACHE_BYTES,
    "block_size": 32,
    "distributed_executor_backend": "uni",
}
_ATTENTION_ON_A_CPU: Final = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
WITH_XGRAMMAR: Final = frozenset({"auto", "xgrammar"})
"""Settings of vLLM with which it may compile a grammar by xgrammar."""

_TEMPERATURES: Final = (0.01, 2.0)
"""Lowest and highest temperature that vLLM honours, besides zero: it raises lower ones, and refuses higher ones."""


def carries_masks() -> bool:
    """Return whether the installed vLLM has fields for sampling masks, without importing it."""
    return source_mentions("vllm", "v1/outputs.py", "class SamplingMaskLists")


def scores_on_a_gpu() -> bool:
    """Return whether the installed vLLM's second model runner, which GPUs have, computes what scores are taken of."""
    return source_mentions("vllm", "v1/worker/gpu/sample/prompt_logprob.py", "def compute_prompt_logprobs")


def records_experts_by_block() -> bool:
    """Return whether the installed vLLM keeps experts by the hashes of cached blocks, without importing it."""
    return source_mentions("vllm", "distributed/aux_output_connector/worker.py", "class AuxOutputWorkerConnector")


def refuse_plain_latent_attention(levels: Iterable[Mapping[str, object]]) -> None:
    """Refuse a model with multi-head latent attention (MLA) and plain rotary frequencies, for vLLM on a CPU.

    VLLM 0.32 does not rotate its queries and keys there: its kernel works in place on a copy. Those with YaRN, as
    published DeepSeek models have, are right.

    Args:
        levels: Fields of the model's ``config.json``, as ``config_levels`` returns them.

    Raises:
        InvalidConfig: naming the model's type.
    """
    for level in levels:
        rope = level.get("rope_parameters") or level.get("rope_scaling")
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
        if level.get("kv_lora_rank") is not None and kind == "default":
            raise InvalidConfig(
                f"model: {level.get('model_type', 'it')} has multi-head latent attention with plain rotary "
                "frequencies, which vLLM computes without positions on a CPU; use a GPU or the transformers backend",
                field="model",
            )


def refuse_overridden_fields(config: EngineConfig, made: Any) -> None:
    """Refuse fields in whose place vLLM chose something else, as it does on a CPU for models with latent attention.

    Args:
        config: The configuration.
        made: The ``VllmConfig`` that vLLM made of it.

    Raises:
        InvalidConfig: naming the field.
    """
    if config.task is Task.GENERATE and config.enable_prefix_caching and not made.cache_config.enable_prefix_caching:
        raise InvalidConfig(
            "enable_prefix_caching=True: vLLM caches no prefixes of this model here, as of models with multi-head "
            "latent attention on a CPU; give enable_prefix_caching=False, or use a GPU or the transformers backend",
            field="enable_prefix_caching",
        )
    asked, used = config.max_num_batched_tokens, made.scheduler_config.max_num_batched_tokens
    if asked is not None and used != asked:
        raise InvalidConfig(
            f"max_num_batched_tokens={asked}: vLLM takes {used} for this model here, as for models with multi-head "
            "latent attention on a CPU; leave it out",
            field="max_num_batched_tokens",
        )


def engine_arguments(
    config: EngineConfig, device: str, dtype: str, longest: int, overrides: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return keyword arguments for vLLM's ``AsyncEngineArgs``.

    Args:
        config: The configuration.
        device: The device type.
        dtype: Dtype of the checkpoint: vLLM's "auto" may choose another.
        longest: Most tokens of prompt and output together, with the reserve of :func:`room_of`.
        overrides: Fields of the model's own configuration to override.

    Raises:
        InvalidConfig: ``engine_kwargs`` sets an argument that the configuration has a field for, that the backend
            relies on, or that would have no effect; or a field is for GPUs, and there is none; or vLLM has no kernel
            for adapters of this dtype.
    """
    if device == "cpu":
        require_fields_of_a_cpu(config, "vLLM", _ATTENTION_ON_A_CPU, "kv_cache_memory_bytes")
    served = dtype if config.dtype == "auto" else config.dtype
    if config.enable_lora and device != "cpu" and served == "float32":
        raise InvalidConfig(
            f"dtype={config.dtype!r} serves float32, and vLLM runs adapters on a GPU in float16 or bfloat16 only; "
            "set dtype to one of them, or enable_lora=False",
            field="dtype",
        )
    relied_on: dict[str, object] = {
        "model": config.model,
        "tokenizer": config.tokenizer or config.model,
        "dtype": served,
        "trust_remote_code": config.trust_remote_code,
        "max_model_len": longest,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "scheduling_policy": "priority",
        "max_logprobs": -1,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # the model folder's own would change the meaning of requests
        "worker_extension_cls": "drivetrain_vllm.in_engine.worker.Extension",
        "disable_log_stats": True,
    }
    optional: dict[str, object | None] = {
        "revision": config.revision,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "attention_backend": config.attention_backend,
    }
    relied_on |= {name: value for name, value in optional.items() if value is not None}
    if overrides:
        relied_on["hf_overrides"] = dict(overrides)
    match config.task:
        case Task.GENERATE:
            pass
        case Task.EMBED:
            relied_on |= {"runner": "pooling", "convert": "embed"}
        case _:
            relied_on |= {"runner": "pooling", "convert": "classify"}
    if spreads_experts(config):
        relied_on["enable_expert_parallel"] = True
    if config.enable_lora:
        for name in ADAPTERS_IN_PART:
            if name in config.engine_kwargs:
                raise InvalidConfig(
                    f"engine_kwargs holds {name}: vLLM drops an adapter's other layers without an error, so adapters "
                    "are served whole, or refused; leave it out",
                    field="engine_kwargs",
                )
        relied_on |= {
            "enable_lora": True,
            "max_lora_rank": _room_for_rank(config.max_lora_rank or LORA_RANK),
            # One slot more for an update, which loads the new adapter beside the old one. On a CPU another one, kept
            # empty: in a batch with adapters, vLLM applies the last slot's to requests without one.
            "max_loras": (config.max_loras or MOST_LORAS) + 1 + (device == "cpu"),
        }
    if device != "cpu" and config.enable_sleep:
        relied_on["enable_sleep_mode"] = True
        if config.sleep_keeps_weights:
            relied_on["additional_config"] = {KEEPS_WEIGHTS: True}
    # VLLM's own default is 0: requests without a seed would draw the same in every engine.
    defaults = {"seed": secrets.randbits(31), **(_ON_A_CPU if device == "cpu" else {})}
    if config.tensor_parallel_size > 1:
        defaults = {name: value for name, value in defaults.items() if name != "distributed_executor_backend"}
    return with_engine_kwargs(config, relied_on, defaults, WITHOUT_EFFECT)


def _room_for_rank(most: int) -> int:
    """Return the least rank that vLLM takes as a limit and that leaves room for adapters of rank ``most``."""
    return next((rank for rank in _RANKS_OF_VLLM if rank >= most), most)


def room_of(config: EngineConfig) -> int:
    """Return how many tokens vLLM's limit needs beyond ours: it generates one token even if it only scores a prompt."""
    return int(config.task is Task.GENERATE)


def visible_devices(device: str, count: int, visible: Sequence[str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` with the engine's GPUs first, because vLLM always takes the first ones.

    The other GPUs follow, so that vLLM can map their memory.

    Args:
        device: Device of the first GPU, such as ``"cuda:1"``.
        count: Number of GPUs.
        visible: The GPUs visible now, as the variable names them.

    Raises:
        InvalidConfig: there are fewer than ``count`` GPUs from ``device`` on.
    """
    first = int(device.partition(":")[2])
    chosen = list(visible[first : first + count])
    if len(chosen) < count:
        raise InvalidConfig(
            f"device={device!r} with tensor_parallel_size={count} needs more than the GPUs "
            f"{', '.join(visible) or '(none)'}",
            field="device",
        )
    return ",".join([*chosen, *visible[:first], *visible[first + count :]])


# Requests ---------------------------------------------------------------------------------------------------------


def drawn_by_vllm(request: GenerateRequest) -> bool:
    """Return whether vLLM's own sampler and logprobs do exactly what this request asks for."""
    temperature = request.params.temperature
    honours_temperature = temperature == 0 or _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]
    return honours_temperature and is_plain(request, LogprobsMode.RAW)


def may_use_xgrammar(config: EngineConfig) -> bool:
    """Return whether vLLM may compile grammars with xgrammar, as it does unless another library is configured."""
    chosen = config.engine_kwargs.get("structured_outputs_config")
    library = chosen.get("backend", "auto") if isinstance(chosen, Mapping) else "auto"
    return library in WITH_XGRAMMAR


def sampling_params(request: GenerateRequest, *, stream: bool) -> Any:
    """Return vLLM's ``SamplingParams`` of a request.

    Args:
        request: The request.
        stream: True if the output is delivered chunk by chunk.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    params = request.params
    native: dict[str, Any] = {
        "max_tokens": max(request.max_new_tokens, 1),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # a request names every id that ends it
        "detokenize": False,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
    }
    if wants_experts(params):
        if stream and not params.return_sampling_mask:
            # Some releases lose experts when they join chunks that were not read yet, so each chunk holds everything.
            native["output_kind"] = RequestOutputKind.CUMULATIVE
        if hasattr(SamplingParams, "routed_experts_prompt_start"):
            own = max(len(request.prompt_token_ids) - 1, 0)
            native["routed_experts_prompt_start"] = 0 if params.return_prompt_routed_experts else own
    extra: dict[str, object] = {}
    if params.structured_output is not None and params.stop_token_ids:
        extra[STOPS] = list(params.stop_token_ids)
    if grammar := _grammar(params):
        native["structured_outputs"] = StructuredOutputsParams(**grammar)
    if drawn_by_vllm(request):
        native["temperature"] = params.temperature
        native["top_p"] = params.top_p
        native["top_k"] = params.top_k
        native["min_p"] = params.min_p
    else:
        native["temperature"] = 1.0
        extra[KEY] = encode_params(request)
    if request.scoring is not None:
        extra[SCORING] = encode_scoring(request.scoring)
        native["skip_reading_prefix_cache"] = True  # the states of cached tokens are not there to be scored
    return SamplingParams(**native, extra_args=extra or None)


def plain_sampling_params(request: GenerateRequest) -> dict[str, object]:
    """Return vLLM's ``SamplingParams`` of a request as JSON, for a server without drivetrain's plugin.

    Raises:
        InvalidRequest: vLLM would change the temperature.
    """
    params = request.params
    if params.temperature and not _TEMPERATURES[0] <= params.temperature <= _TEMPERATURES[1]:
        raise InvalidRequest(
            f"sampling_params.temperature={params.temperature:g}: a vLLM server samples only at 0, and from "
            f"{_TEMPERATURES[0]:g} to {_TEMPERATURES[1]:g}",
            field="sampling_params.temperature",
        )
    native: dict[str, object] = {
        "max_tokens": max(request.max_new_tokens, 1),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # a request names every id that ends it
        "detokenize": False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
    }
    if params.logprobs is not None:
        # vLLM counts the drawn token among the requested ones.
        native["logprobs"] = params.logprobs and params.logprobs + 1
    if params.prompt_logprobs is not None:
        native["prompt_logprobs"] = params.prompt_logprobs
    if params.logit_bias:
        native["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if request.seed is not None:
        native["seed"] = request.seed
    if grammar := _grammar(params):
        native["structured_outputs"] = grammar
    return native


def _grammar(params: OurParams) -> dict[str, str]:
    """Return a request's grammar by vLLM's name of its kind; empty if it has none."""
    match params.structured_output:
        case JsonSchema(json_schema=schema):
            return {"json": schema}
        case RegexGrammar(regex=expression):
            return {"regex": expression}
        case EbnfGrammar(ebnf=grammar):
            return {"grammar": grammar}
        case None:
            return {}


PLAIN_FIELDS: Final = frozenset(
    {"max_tokens", "stop_token_ids", "ignore_eos", "detokenize", "temperature", "top_p", "top_k"}
    | {"frequency_penalty", "presence_penalty", "logprobs", "prompt_logprobs", "logit_bias", "seed"}
    | {"structured_outputs"}
)
"""Fields that :func:`plain_sampling_params` may set; a server silently drops unknown ones."""


# Results ----------------------------------------------------------------------------------------------------------


class Collected(CollectedSample):
    """Outputs of vLLM for one sample, collected chunk by chunk.

    Args:
        request: The request.
        expert_layers: Numbers of the layers for which vLLM records the experts.
    """

    def __init__(self, request: GenerateRequest, expert_layers: Sequence[int] = ()) -> None:
        super().__init__(request)
        self._expert_layers = as_slice(expert_layers)
        self._last: Any = None
        self._prompt: Any = None
        """Prompt logprobs, which come with the first chunk of a stream."""

    def add(self, output: Any) -> Added:
        """Add a ``RequestOutput``; return its new ids, their logprobs, and the top logprobs."""
        self._last = output
        if output.prompt_logprobs:
            self._prompt = output.prompt_logprobs
        completion = output.outputs[0]
        seen = len(self.token_ids) if self._is_cumulative else 0
        ids = list(completion.token_ids[seen:]) if self.request.max_new_tokens else []
        logprobs, top = None, None
        if self.params.logprobs is not None:
            positions = completion.logprobs or ()
            logprobs = [_of(positions, index, token) for index, token in enumerate(ids, seen)]
            if self.params.logprobs:
                top = [_top(positions, index, self.params.logprobs) for index in range(seen, seen + len(ids))]
        mask = None
        if self.params.return_sampling_mask and completion.sampling_mask is not None:
            mask = joined(map(bytes, completion.sampling_mask.token_ids[: len(ids)]))
        return self.extend(ids, logprobs, top, mask)

    @property
    def _is_cumulative(self) -> bool:
        """True if each chunk holds everything, as :func:`sampling_params` asks for."""
        return wants_experts(self.params) and not self.params.return_sampling_mask

    @property
    def ended(self) -> bool:
        """True if the last chunk was added."""
        return bool(self._last.finished)

    def result(self, version: str) -> GenerateResult:
        """Return the complete sample.

        Args:
            version: Version of the weights that are served now.

        Raises:
            NonFiniteLogits: the model gave NaN or infinity for the next token.
            NoTokenAllowed: no token was left to draw.
        """
        params, count = self.params, len(self.token_ids)
        completion = self._last.outputs[0]
        if self.request.max_new_tokens and completion.finish_reason == "abort":
            match completion.stop_reason:
                case int(code) if code == NOT_FINITE:
                    raise non_finite_logits(self.request, count)
                case int(code) if code == NO_TOKEN:
                    raise no_token_allowed(self.request, count)
        reason, matched = _finish(completion.finish_reason, completion.stop_reason, completion.token_ids, self.request)
        prompt_ids = self.request.prompt_token_ids
        prompt = self._prompt if params.prompt_logprobs is not None else None
        if reason is FinishReason.ABORT and prompt is not None and len(prompt.start_indices) < len(prompt_ids):
            prompt = None  # aborted during prefill
        return GenerateResult(
            token_ids=self.token_ids,
            finish_reason=reason,
            weight_versions=self.weight_versions(self._reported(), version),
            matched_stop=matched,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=(
                [None, *(_of(prompt, index, prompt_ids[index]) for index in range(1, len(prompt_ids)))]
                if prompt
                else None
            ),
            prompt_top_logprobs=(
                [None, *(_top(prompt, index, params.prompt_logprobs) for index in range(1, len(prompt_ids)))]
                if prompt and params.prompt_logprobs
                else None
            ),
            prompt_ranks=(
                # The prompt's own token comes first at each position.
                [None, *(int(prompt.ranks[prompt.start_indices[index]]) for index in range(1, len(prompt_ids)))]
                if prompt and params.return_prompt_ranks
                else None
            ),
            cached_tokens=self._last.num_cached_tokens or 0,
            routed_experts=self._experts(slice(-count, None), count) if params.return_routed_experts else None,
            prompt_routed_experts=(
                self._experts(slice(len(prompt_ids)), len(prompt_ids))
                if params.return_prompt_routed_experts and (count or reason is not FinishReason.ABORT)
                else None
            ),
            sampling_mask=self.sampling_mask,
            scores=self._scores(),
        )

    def _scores(self) -> TokenScores | None:
        """Return the prompt's scores, if the request asks for them and its prompt was read."""
        scoring = self.request.scoring
        tensors = self._prompt if self.params.prompt_logprobs is None else getattr(self._prompt, SCORES, None)
        if scoring is None or tensors is None:
            return None
        rows = slice(-scoring.scored(len(self.request.prompt_token_ids)), None)
        top_ids, logprobs = (tensor[rows] for tensor in tensors[:2])
        given = 1 + scoring.width
        return packed_scores(scoring, logprobs[:, :given], logprobs[:, given:], top_ids)

    def _experts(self, tokens: slice, count: int) -> RoutedExperts:
        """Return the experts of some tokens.

        vLLM returns the experts of the prompt's tokens, or of its last one, and of all output tokens but the last. It
        fills layers without experts with zeros.

        Args:
            tokens: The tokens, among the ones whose experts vLLM returns.
            count: Number of tokens.

        Raises:
            EngineInternalError: vLLM gave the experts of fewer tokens.
        """
        if not count:
            return RoutedExperts()
        every = self._last.outputs[0].routed_experts
        if every is None or len(every) < count:
            given = 0 if every is None else len(every)
            raise EngineInternalError(
                f"request {self.request.request_id}: vLLM gave experts of {given} tokens where {count} have some"
            )
        return RoutedExperts.of(every[tokens, self._expert_layers])

    def _reported(self) -> list[tuple[str, float]] | None:
        """Return versions and the ends of their tokens, if this vLLM reports them."""
        spans = getattr(self._last.outputs[0], "weight_versions", None)
        return None if spans is None else [(str(span.version), float(span.end)) for span in spans]


def _of(positions: Any, index: int, token: int) -> float:
    """Return a token's logprob at a position of vLLM's ``FlatLogprobs``."""
    start = positions.start_indices[index]
    if positions.token_ids[start] == token:  # the drawn token comes first
        return float(positions.logprobs[start])
    return float(positions[index][token].logprob)


def _top(positions: Any, index: int, count: int) -> TopLogprobs:
    start, end = positions.start_indices[index], positions.end_indices[index]
    # The drawn token comes first, then the likeliest ones, which may repeat it; joined chunks hold it only once.
    ranked: dict[int, tuple[int, bool, float]] = {}
    for place in range(start, end):
        ranked[positions.token_ids[place]] = (positions.ranks[place], place == start, positions.logprobs[place])
    likeliest = sorted(ranked.items(), key=lambda item: item[1])[:count]
    # Tokens that cannot be drawn are no alternatives.
    return [(int(token), float(logprob)) for token, (_, _, logprob) in likeliest if logprob > -1e30]


def _finish(
    reason: str | None, matched: int | str | None, ids: Sequence[int], request: GenerateRequest
) -> tuple[FinishReason, int | None]:
    """Return the finish reason of a sample, and its stop id; ``ids`` end with its last id."""
    if not request.max_new_tokens and (reason != "abort" or matched in (NOT_FINITE, NO_TOKEN)):
        return FinishReason.LENGTH, None
    match reason:
        case "stop":
            return FinishReason.STOP, int(matched) if matched in request.stop_token_ids else None
        case "length":
            last = ids[-1] if ids else None
            if last in request.stop_token_ids:
                return FinishReason.STOP, last
            return FinishReason.LENGTH, None
        case "abort":
            return FinishReason.ABORT, None
        case other:
            raise EngineInternalError(f"request {request.request_id}: vLLM ended it with finish_reason {other!r}")


_CLAMPED: Final = -9998.0
"""Logprobs below this stand for minus infinity, which a server sends as -9999: a token that cannot be drawn."""


class Served(CollectedSample):
    """Answers of a vLLM server for one sample, collected one by one."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self._prompt: Sequence[Mapping[str, Any] | None] | None = None
        self._spans: Sequence[Mapping[str, Any]] = ()
        self._cached = 0
        self._reason: str | None = None
        self._matched: int | str | None = None

    @property
    def ended(self) -> bool:
        """True if the server has sent a finish reason."""
        return self._reason is not None

    def add(self, answer: Mapping[str, Any]) -> Added:
        """Add an answer or an event of a stream; return its ids, their logprobs, and the top logprobs."""
        self._prompt = answer.get("prompt_logprobs") or self._prompt
        usage = answer.get("usage") or {}
        self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self._cached
        if not answer["choices"]:
            return [], None, None
        choice = answer["choices"][0]
        self._reason, self._matched = choice["finish_reason"], choice["stop_reason"]
        self._spans = choice.get("weight_versions") or self._spans
        ids: list[int] = list(choice["token_ids"] or ()) if self.request.max_new_tokens else []
        logprobs, top = None, None
        if self.params.logprobs is not None:
            drawn = ((choice.get("logprobs") or {}).get("content") or ())[: len(ids)]
            logprobs = [0.0 if self._is_certain else float(entry["logprob"]) for entry in drawn]
            if self.params.logprobs:
                top = [self._alternatives(entry, self.params.logprobs) for entry in drawn]
        return self.extend(ids, logprobs, top)

    @property
    def _is_certain(self) -> bool:
        """True if the drawn token was the only one possible: vLLM reports the distribution before the greedy choice."""
        return self.params.temperature == 0 and self.request.logprobs_mode is LogprobsMode.PROCESSED

    def _alternatives(self, entry: Mapping[str, Any], count: int) -> TopLogprobs:
        if self._is_certain:
            return [(int(entry["token_id"]), 0.0)]
        return _likeliest(entry["top_logprobs"], count)

    def result(self, version: str) -> GenerateResult:
        """Return the complete sample.

        Args:
            version: Version of the weights that are served now.
        """
        params = self.params
        reason, matched = _finish(self._reason, self._matched, self.token_ids, self.request)
        prompt_ids = self.request.prompt_token_ids
        prompt = [entries or {} for entries in self._prompt[1:]] if self._prompt else None
        ends = [(str(span["version"]), float(span["end"])) for span in self._spans]
        return GenerateResult(
            token_ids=self.token_ids,
            finish_reason=reason,
            weight_versions=self.weight_versions([*ends, (version, math.inf)], version),
            matched_stop=matched,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=(
                [None, *(float(of[str(token)]["logprob"]) for of, token in zip(prompt, prompt_ids[1:], strict=True))]
                if prompt is not None
                else None
            ),
            prompt_top_logprobs=(
                [None, *(_likeliest(_entries(of), params.prompt_logprobs) for of in prompt)]
                if prompt is not None and params.prompt_logprobs
                else None
            ),
            prompt_ranks=(
                [None, *(int(of[str(token)]["rank"]) for of, token in zip(prompt, prompt_ids[1:], strict=True))]
                if prompt is not None and params.return_prompt_ranks
                else None
            ),
            cached_tokens=self._cached,
        )


def _entries(of: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"token_id": int(token), **entry} for token, entry in of.items()]


def _likeliest(entries: Sequence[Mapping[str, Any]], count: int) -> TopLogprobs:
    # The drawn token comes first, then the likeliest ones, which may repeat it.
    ranked = sorted(enumerate(entries), key=lambda item: (item[1]["rank"] or math.inf, item[0] == 0))
    found = [(int(entry["token_id"]), float(entry["logprob"])) for _, entry in ranked[:count]]
    return [(token, logprob) for token, logprob in found if logprob > _CLAMPED]
