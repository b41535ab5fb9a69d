"""Translate drivetrain's names to SGLang's. Pure functions over plain values."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.collected_sample import Added, CollectedSample
from drivetrain.backend.toolkit.engine_versions import source_mentions
from drivetrain.backend.toolkit.folder_pooling import PoolingMode
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
from drivetrain.errors import DrivetrainError, EngineInternalError, InvalidConfig
from drivetrain.media.qwen_vision import ENGINE_BOUNDS, ENGINE_FETCHES, ENGINE_PREPARES
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.outputs import FinishReason, TopLogprobs
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import EbnfGrammar, JsonSchema, LogprobsMode, RegexGrammar
from drivetrain.types.token_scores import TokenScores
from drivetrain_sampling.encoded_params import encode_params
from drivetrain_sampling.packed_masks import joined
from drivetrain_sampling.scores import decode_scores, encode_scoring

_POOLING_TYPES: Final[Mapping[PoolingMode, str]] = {
    PoolingMode.LAST: "LAST",
    PoolingMode.FIRST: "CLS",
    PoolingMode.MEAN: "MEAN",
}
"""Names of SGLang's ``PoolingType``."""
CONFIG_NAMES: Final[Mapping[str, str]] = {
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    "device": "device",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "context_length": "context_length",
    "enable_prefix_caching": "disable_radix_cache",
    "attention_backend": "attention_backend",
    "tensor_parallel_size": "tp_size",
    "expert_parallel_size": "ep_size",
    "deterministic": "enable_deterministic_inference",
    "task": "is_embedding",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras_per_batch",
    "max_lora_rank": "max_lora_rank",
    "enable_sleep": "enable_memory_saver",
    "sleep_keeps_weights": "enable_weights_cpu_backup",
    "media": "drivetrain.media",
    "engine_kwargs": "Engine(**)",
}
"""EngineConfig fields, with the argument or component that honours each."""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "allowed_media_domains": ENGINE_FETCHES,
    "media_url_max_file_size_mb": ENGINE_BOUNDS,
    "limit_mm_data_per_request": "SGLang gets all media of a prompt as one; count them before you pass them",
    "mm_process_config": ENGINE_PREPARES,
    "mm_processor_worker_num": ENGINE_PREPARES,
    "mm_io_worker_num": ENGINE_PREPARES,
    "mm_preprocess_cache_size_mb": ENGINE_PREPARES,
    "trust_mm_content_hashes": ENGINE_PREPARES,
    "image_processor_backend": ENGINE_PREPARES,
    "disable_fast_image_processor": ENGINE_PREPARES,
}
"""SGLang's arguments that have no effect here, and the reason."""

SEEN_WORKING: Final = ("0.5.17", "0.5.23")
"""Oldest and newest release on which the conformance suite was run, on a GPU and on a CPU. Their differences are
detected by feature: :func:`labels_tokens`, and ``drivetrain_sglang.in_engine``."""

KEY: Final = "drivetrain"
"""Key of ``custom_params`` under which a request carries its sampling parameters."""

MASK: Final = "drivetrain_mask"
"""Key of ``customized_info``, and then of ``meta_info``, for the ids that each token was drawn from."""

SCORING: Final = "drivetrain_scoring"
"""Key of ``custom_params`` under which a request carries what to score of its prompt."""

SCORES: Final = "drivetrain_scores"
"""Key of ``customized_info``, and then of ``meta_info``, for a prompt's scores."""

ROUTED_EXPERTS: Final = "enable_return_routed_experts"
"""SGLang's argument for recording the experts of each token."""

MOVES_CACHE: Final = ("enable_hierarchical_cache", "enable_lmcache")
"""SGLang's arguments for caches whose prefixes return to other slots, where the record has no experts of theirs."""

HOST_MEMORY: Final = "hicache_host_memory_mode"
"""SGLang's argument for the use of host memory by its hierarchical cache."""
BUFFER_ONLY: Final = "buffer_only"
"""The value of ``hicache_host_memory_mode`` for prefixes that pass through host memory on their way from a storage."""

REPLICATED_QUERIES: Final = "dcp_replicate_q_proj"
"""SGLang's argument for copies of MLA weights on every rank of decode context parallelism, made once at the start."""

ROOM: Final = 8
"""Tokens added to SGLang's limits: without them SGLang truncates a request that fits exactly by one token."""

CPU_POOL: Final = 65536
"""Tokens in the KV pool on a CPU, unless set in ``engine_kwargs``."""

LORA_RANK: Final = 64
"""Largest rank of an adapter, unless set by ``max_lora_rank``."""

ADAPTED_WITH: Final[Mapping[str, tuple[str, ...]]] = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
    "q_a_proj": ("kv_a_proj_with_mqa",),
    "kv_a_proj_with_mqa": ("q_a_proj",),
}
"""For each layer that SGLang fuses, the layers to adapt with it; without them its scheduler crashes."""

_ON_A_CPU: Final[Mapping[str, object]] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": CPU_POOL,
    "lora_backend": "torch_native",
}


_ATTENTION_ON_A_CPU: Final = ("torch_native", "intel_amx")


def carries_masks() -> bool:
    """Return whether the installed SGLang passes a sampler's additions to a token on to its client. Imports nothing."""
    return source_mentions("sglang", "srt/managers/tokenizer_manager.py", "customized_info_accumulated")


def carries_scores() -> bool:
    """Return whether the installed SGLang can return a prompt's scores, without importing it."""
    streamer = "srt/managers/scheduler_components/output_streamer.py"
    return source_mentions("sglang", streamer, "def is_request_level_customized_info_key") and source_mentions(
        "sglang", "srt/layers/logprob_processor.py", "get_logits_fn: Callable"
    )


def labels_tokens() -> bool:
    """Return whether the installed SGLang reports the weight version of each token, without importing it."""
    return source_mentions("sglang", "srt/utils/weight_versions.py", "class WeightVersionSpan")


def is_in_blocks(levels: Iterable[Mapping[str, object]]) -> bool:
    """Return whether a checkpoint is in fp8 with a scale for each block of a weight.

    Args:
        levels: Fields of the model's ``config.json``, as ``config_levels`` returns them.
    """
    quantisations = [level.get("quantization_config") for level in levels]
    return any(isinstance(one, Mapping) and one.get("weight_block_size") is not None for one in quantisations)


def refuse_latent_attention(arguments: Mapping[str, object], levels: Iterable[Mapping[str, object]]) -> None:
    """Refuse a model with multi-head latent attention (MLA) for SGLang's attention in plain torch.

    It takes values to be as wide as keys, and its first forward pass would end SGLang.

    Args:
        arguments: The result of :func:`engine_arguments`.
        levels: Fields of the model's ``config.json``, as ``config_levels`` returns them.

    Raises:
        InvalidConfig: naming the model's type and the attention backend.
    """
    plain = _ON_A_CPU["attention_backend"]
    for level in levels:
        if arguments["attention_backend"] == plain and level.get("kv_lora_rank") is not None:
            raise InvalidConfig(
                f"attention_backend={plain!r}: {level.get('model_type', 'the model')} has multi-head latent attention, "
                f"kv_lora_rank={level['kv_lora_rank']}, which this backend of SGLang does not run; use a GPU, another "
                "attention_backend that your CPU has, or the transformers backend",
                field="attention_backend",
            )


def engine_arguments(
    config: EngineConfig, device: str, dtype: str, context_length: int, overrides: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return keyword arguments for ``sglang.Engine``.

    Args:
        config: The configuration.
        device: The device type.
        dtype: Dtype of the checkpoint: SGLang's "auto" may choose another.
        context_length: Most tokens of prompt and output together.
        overrides: Fields of the model's own configuration to override.

    Raises:
        InvalidConfig: ``engine_kwargs`` sets an argument that the configuration has a field for, that the backend
            relies on, or that would have no effect; or a field is for GPUs, and there is none.
    """
    if device == "cpu":
        require_fields_of_a_cpu(config, "SGLang", _ATTENTION_ON_A_CPU, "max_total_tokens")
    if config.engine_kwargs.get(HOST_MEMORY) == BUFFER_ONLY:
        # SGLang asserts that a request still has the key of its fetched prefix, and a weight update renews the key.
        raise InvalidConfig(
            f"engine_kwargs holds {HOST_MEMORY}={BUFFER_ONLY!r}: SGLang ends if the weights change while a request "
            "waits for which it has fetched a prefix; leave it out, or set 'cache'",
            field="engine_kwargs",
        )
    if config.engine_kwargs.get(REPLICATED_QUERIES, False) is not False:
        raise InvalidConfig(
            f"engine_kwargs holds {REPLICATED_QUERIES}={config.engine_kwargs[REPLICATED_QUERIES]!r}: SGLang copies "
            "weights at its start and answers from the copies after an update of the weights; leave it out",
            field="engine_kwargs",
        )
    relied_on: dict[str, object] = {
        "model_path": config.model,
        "tokenizer_path": config.tokenizer or config.model,
        "device": device,
        "dtype": dtype if config.dtype == "auto" else config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "context_length": context_length + ROOM,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "sleep_on_idle": True,
        "weight_version": config.weight_version,
        "tp_size": config.tensor_parallel_size,
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 2**31,
        # An input that is embedded while the weights change would leave prefixes of both weights in the cache.
        "disable_radix_cache": not config.enable_prefix_caching or config.task is not Task.GENERATE,
    }
    optional: dict[str, object | None] = {
        "revision": config.revision,
        "mem_fraction_static": config.gpu_memory_utilization,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "max_running_requests": config.max_num_seqs,
        "attention_backend": config.attention_backend,
    }
    relied_on |= {name: value for name, value in optional.items() if value is not None}
    if overrides:
        relied_on["json_model_override_args"] = json.dumps(overrides)
    if config.task is not Task.GENERATE:
        relied_on["is_embedding"] = True
    if config.enable_lora:
        relied_on["enable_lora"] = True
        relied_on["lora_target_modules"] = ["all"]
        relied_on["max_lora_rank"] = config.max_lora_rank or LORA_RANK
        if config.max_loras is not None:
            relied_on["max_loaded_loras"] = relied_on["max_loras_per_batch"] = config.max_loras + 1
    if spreads_experts(config):
        relied_on["ep_size"] = config.expert_parallel_size
    if config.deterministic:
        relied_on["enable_deterministic_inference"] = True
    if device != "cpu" and config.enable_sleep:
        relied_on["enable_memory_saver"] = True
        if config.sleep_keeps_weights:
            relied_on["enable_weights_cpu_backup"] = True
    if ":" in (config.device or ""):
        relied_on["base_gpu_id"] = int((config.device or "").rpartition(":")[2])
    defaults = {"log_level": "warning", **(_ON_A_CPU if device == "cpu" else {})}
    if config.engine_kwargs.get("dcp_size", 1) != 1:
        defaults[REPLICATED_QUERIES] = False  # unset, SGLang sets it for some models
    return with_engine_kwargs(config, relied_on, defaults, WITHOUT_EFFECT)


# Requests ---------------------------------------------------------------------------------------------------------


def drawn_by_sglang(request: GenerateRequest, *, deterministic: bool = False) -> bool:
    """Return whether SGLang's own sampler and logprobs do exactly what this request asks for.

    Args:
        request: The request.
        deterministic: If true, always use our sampler: one such request switches the whole batch and changes rounding.
    """
    return not deterministic and is_plain(request, LogprobsMode.TEMPERATURE)


def sampling_params(request: GenerateRequest, *, deterministic: bool = False) -> dict[str, object]:
    """Return SGLang's ``sampling_params`` of a request, for an engine with ``drivetrain_sglang.in_engine``.

    Args:
        request: The request.
        deterministic: As for :func:`drawn_by_sglang`.
    """
    params = request.params
    native: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": params.skip_special_tokens,
    }
    match params.structured_output:
        case JsonSchema(json_schema=schema):
            native["json_schema"] = schema
        case RegexGrammar(regex=expression):
            native["regex"] = expression
        case EbnfGrammar(ebnf=grammar):
            native["ebnf"] = grammar
        case None:
            pass
    if drawn_by_sglang(request, deterministic=deterministic):
        native["temperature"] = params.temperature
        native["top_p"] = params.top_p
        native["top_k"] = params.top_k or -1
        native["min_p"] = params.min_p
    else:
        native["temperature"] = 1.0
        native["custom_params"] = {KEY: encode_params(request)}
    if request.scoring is not None:
        native["custom_params"] = {**native.get("custom_params", {}), SCORING: encode_scoring(request.scoring)}
    return native


class Ending(Enum):
    """Makes a stock SGLang, which ends at its own EOS ids, end at a request's stop ids."""

    BY_ITSELF = "by itself"
    """SGLang's own EOS ids are among the request's stops."""
    NEVER = "never"
    """The request has no stop ids, so ``ignore_eos`` switches all EOS ids off."""
    WATCHED = "watched"
    """The request sets ``ignore_eos``, and the client that reads its tokens ends it at its stop ids."""


def ending(request: GenerateRequest, own_eos: frozenset[int]) -> Ending:
    """Return the way to make a request end at its stop ids on a plain SGLang.

    Args:
        request: The request.
        own_eos: Ids at which SGLang ends every request without ``ignore_eos``.
    """
    if own_eos <= set(request.stop_token_ids):
        return Ending.BY_ITSELF
    return Ending.WATCHED if request.stop_token_ids else Ending.NEVER


def plain_sampling_params(request: GenerateRequest, own_eos: frozenset[int]) -> dict[str, object]:
    """Return SGLang's ``sampling_params`` of a request, for a server without drivetrain's plugin.

    Raises:
        EngineInternalError: only ``drivetrain_sglang.in_engine`` could honour the request.
    """
    params = request.params
    # min-p after top-p keeps the same tokens as before it: the likeliest token, which it measures by, always stays.
    one_limit = params.model_copy(update={"min_p": 0.0}) if params.top_p < 1 else params
    if not drawn_by_sglang(replace(request, params=one_limit)) or params.structured_output is not None:
        raise EngineInternalError(f"request {request.request_id}: a plain SGLang cannot sample by {params!r}")
    by_itself = ending(request, own_eos) is Ending.BY_ITSELF
    return {
        "max_new_tokens": request.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "ignore_eos": not by_itself,
        "stop_token_ids": list(request.stop_token_ids) if by_itself else [],
    }


def request_fields(
    request: GenerateRequest,
    rid: str,
    cache_key: str,
    *,
    stream: bool,
    params_of: Callable[[GenerateRequest], dict[str, object]] = sampling_params,
    image_data: Sequence[Mapping[str, Any]] = (),
    audio_data: Sequence[Mapping[str, Any]] = (),
) -> dict[str, object]:
    """Return the fields of SGLang's ``GenerateReqInput``; ``params_of`` translates the sampling params.

    Raises:
        EngineInternalError: the request holds media that were not read into ``image_data`` or ``audio_data``, or the
            reverse.
    """
    if bool(request.media) != bool(image_data or audio_data):
        raise EngineInternalError(f"request {request.request_id}: its {len(request.media)} media were not read")
    params = request.params
    wants_prompt = params.prompt_logprobs is not None
    fields: dict[str, object] = {
        "rid": rid,
        "input_ids": request.prompt_token_ids,
        "sampling_params": params_of(request),
        "stream": stream,
        "priority": request.priority,
        "extra_key": cache_key,
    }
    if params.logprobs is not None or wants_prompt:
        fields["return_logprob"] = True
        fields["logprob_start_len"] = 0 if wants_prompt else -1
        fields["top_logprobs_num"] = max(params.logprobs or 0, params.prompt_logprobs or 0)
    scored = 0 if request.scoring is None else request.scoring.scored(len(request.prompt_token_ids))
    if scored and not wants_prompt:
        fields["return_logprob"] = True
        fields["logprob_start_len"] = len(request.prompt_token_ids) - scored - 1
    if params.return_hidden_states:
        fields["return_hidden_states"] = True
    if wants_experts(params):
        fields["return_routed_experts"] = True
        fields["routed_experts_start_len"] = _first_with_experts(request)
    if request.lora is not None:
        fields["lora_path"] = request.lora
    if image_data:
        fields["image_data"] = list(image_data)
    if audio_data:
        fields["audio_data"] = list(audio_data)
    return fields


def _first_with_experts(request: GenerateRequest) -> int:
    """Return the place of the first token whose experts are asked for."""
    return 0 if request.params.return_prompt_routed_experts else len(request.prompt_token_ids) - 1


# Results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Cause of a request's end without a token, passed by the in-engine plugin in the message of SGLang's abort."""

    no_token: bool
    """True if masks left none, False if logits were NaN or infinite."""
    token: int
    """Index of the output token that could not be drawn."""
    is_cached: bool
    """True if the prefix cache holds a failed part of the prompt."""

    def message(self) -> str:
        """Encode the failure for :meth:`of`."""
        return f"{_ROW_FAILED} {int(self.no_token)} {self.token} {int(self.is_cached)}"

    @classmethod
    def of(cls, output: Mapping[str, Any]) -> RowFailure | None:
        """Return the failure reported in a chunk of SGLang's output, if any."""
        reason = output["meta_info"].get("finish_reason") or {}
        message = str(reason.get("message") or "")
        if reason.get("type") != "abort" or not message.startswith(_ROW_FAILED):
            return None
        no_token, token, is_cached = map(int, message.removeprefix(_ROW_FAILED).split())
        return cls(bool(no_token), token, bool(is_cached))

    def error(self, request: GenerateRequest) -> DrivetrainError:
        """Return the error with which the request ends."""
        if self.no_token:
            return no_token_allowed(request, self.token)
        return non_finite_logits(request, self.token if request.max_new_tokens else None)


ABORTED_WORDS: Final = "Aborted by AbortReq."
"""SGLang's error for a request that is aborted while its grammar is compiled. A stream of it has a token instead, after
a prompt that SGLang made up."""
ABORTED_UNREAD: Final[Mapping[str, Any]] = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
"""Output of a request that was aborted before it was read."""


def was_aborted_unread(output: Mapping[str, Any]) -> bool:
    """Return whether a request was aborted before it was read, so that ``output`` is not of its prompt."""
    return (output["meta_info"].get("finish_reason") or {}).get("message") == ABORTED_WORDS


_ROW_FAILED: Final = "drivetrain: a row failed:"
_PER_TOKEN: Final = ("output_token_logprobs", "output_top_logprobs")
"""Entries of ``meta_info`` with one item per output token."""


class Deltas:
    """Converts cumulative chunks to chunks with only new items."""

    def __init__(self) -> None:
        self._seen = 0

    def delta(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of ``output`` that is new since the last call."""
        seen, ids = self._seen, list(output.get("output_ids") or ())
        self._seen = max(seen, len(ids))
        meta: dict[str, Any] = output["meta_info"]
        new = {name: meta[name][seen:] for name in _PER_TOKEN if meta.get(name)}
        return {"output_ids": ids[seen:], "meta_info": {**meta, **new}}


def cut_at(output: Mapping[str, Any], stops: Collection[int]) -> Mapping[str, Any]:
    """Cut a chunk after its first stop id, as if SGLang had ended there; return the chunk itself if it holds none."""
    ids = list(output.get("output_ids") or ())
    at = next((index for index, token in enumerate(ids) if token in stops), None)
    if at is None:
        return output
    meta = {**output["meta_info"], "finish_reason": {"type": "stop", "matched": ids[at]}}
    for name in _PER_TOKEN:
        if meta.get(name):
            meta[name] = meta[name][: at + 1]
    return {"output_ids": ids[: at + 1], "meta_info": meta}


class Collected(CollectedSample):
    """Outputs of SGLang for one sample, collected chunk by chunk.

    Args:
        request: The request.
        expert_shape: Number of layers, and of experts per token, in SGLang's record of experts.
        expert_layers: Numbers of the layers whose experts it records.
    """

    def __init__(
        self, request: GenerateRequest, expert_shape: tuple[int, int] = (0, 0), expert_layers: Sequence[int] = ()
    ) -> None:
        super().__init__(request)
        self._expert_shape = expert_shape
        self._expert_layers = as_slice(expert_layers)
        self._hidden: list[list[float]] = []
        self._meta: dict[str, Any] = {}

    def add(self, output: Mapping[str, Any]) -> Added:
        """Add a chunk; return its ids, their logprobs, and the top logprobs."""
        meta: dict[str, Any] = output["meta_info"]
        self._meta |= meta
        ids: list[int] = list(output.get("output_ids") or ())
        logprobs, top = None, None
        if self.params.logprobs is not None:
            logprobs = [pair[0] for pair in (meta.get("output_token_logprobs") or ())[: len(ids)]]
            if self.params.logprobs:
                top = [_top(entries, self.params.logprobs) for entries in meta.get("output_top_logprobs") or ()]
                top = top[: len(ids)]
        if self.params.return_hidden_states:
            # Every chunk has the states of all tokens so far.
            self._hidden = _hidden_states(meta.get("hidden_states") or ()) or self._hidden
        mask = joined((meta.get(MASK) or ())[: len(ids)]) if self.params.return_sampling_mask else None
        return self.extend(ids, logprobs, top, mask)

    @property
    def ended(self) -> bool:
        """True if the last chunk was added."""
        return self._meta.get("finish_reason") is not None

    def result(self, version: str) -> GenerateResult:
        """Return the complete sample.

        Args:
            version: Version of the weights that are served now.

        Raises:
            NonFiniteLogits: it ended because logits were NaN or infinite.
            NoTokenAllowed: it ended because its own fields allowed no token.
        """
        params, meta, count = self.params, self._meta, len(self.token_ids)
        failure = RowFailure.of({"meta_info": meta})
        if failure is not None:
            raise failure.error(self.request)
        reason, matched = _finish(meta.get("finish_reason"), self.request)
        if reason is not FinishReason.STOP and count and self.token_ids[-1] in self.request.stop_token_ids:
            # An abort that comes with the last token is looked at before stops, and in some releases the length is too.
            reason, matched = FinishReason.STOP, self.token_ids[-1]
        wants_prompt = params.prompt_logprobs is not None
        length, was_read = len(self.request.prompt_token_ids), bool(count) or reason is not FinishReason.ABORT
        prompt = meta.get("input_token_logprobs") if wants_prompt else None
        prompt_top = meta.get("input_top_logprobs") if params.prompt_logprobs else None
        return GenerateResult(
            token_ids=self.token_ids,
            finish_reason=reason,
            weight_versions=self.weight_versions(self._reported(), version),
            matched_stop=matched,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=[None, *(entry[0] for entry in prompt[1:])] if prompt else None,
            prompt_top_logprobs=_prompt_top(prompt_top, params.prompt_logprobs),
            cached_tokens=meta.get("cached_tokens") or 0,
            hidden_states=self._hidden[:count] if params.return_hidden_states else None,
            routed_experts=self._experts(length - 1, count) if params.return_routed_experts else None,
            prompt_routed_experts=(
                self._experts(0, length) if params.return_prompt_routed_experts and was_read else None
            ),
            sampling_mask=self.sampling_mask,
            scores=self._scores(),
        )

    def _scores(self) -> TokenScores | None:
        """Return the prompt's scores, if the request asks for them and its prompt was read."""
        packed = self._meta.get(SCORES)
        return decode_scores(packed[0]) if packed else None

    def _reported(self) -> list[tuple[str, float]] | None:
        """Return versions and the ends of their tokens, if this SGLang reports them."""
        spans = self._meta.get("weight_versions")
        return None if spans is None else [(str(span["version"]), float(span["end"])) for span in spans]

    def _experts(self, first: int, count: int) -> RoutedExperts:
        """Return the experts of tokens of the prompt and the output.

        Args:
            first: Place of the first one.
            count: Number of tokens.

        Raises:
            EngineInternalError: SGLang recorded none of a token, or of a layer.
        """
        given, start = self._meta.get("routed_experts") or b"", first - _first_with_experts(self.request)
        if not count:
            return RoutedExperts()
        # SGLang encodes what does not come as bytes.
        packed = given if isinstance(given, bytes) else base64.b64decode(given)
        rows = np.frombuffer(packed, dtype=np.int16).reshape(-1, *self._expert_shape)
        found = rows[start : start + count, self._expert_layers]
        if len(found) < count or found.min() < 0:
            raise EngineInternalError(
                f"request {self.request.request_id}: SGLang gave the experts of {len(rows)} tokens, and of some of the "
                f"{count} from token {first} on none"
            )
        return RoutedExperts.of(found)


def _top(entries: Sequence[Any] | None, count: int) -> TopLogprobs:
    # Tokens that cannot be drawn have the lowest float.
    return [(int(entry[1]), entry[0]) for entry in (entries or ())[:count] if entry[0] > -1e30]


def _prompt_top(positions: Sequence[Any] | None, count: int | None) -> list[TopLogprobs | None] | None:
    if not positions or not count:
        return None
    return [None, *(_top(entries, count) for entries in positions[1:])]


def _finish(reason: Mapping[str, Any] | None, request: GenerateRequest) -> tuple[FinishReason, int | None]:
    match (reason or {}).get("type"):
        case "stop":
            assert reason is not None
            matched = reason.get("matched")
            return FinishReason.STOP, int(matched) if matched in request.stop_token_ids else None
        case "length":
            return FinishReason.LENGTH, None
        case "abort":
            return FinishReason.ABORT, None
        case other:
            raise EngineInternalError(f"request {request.request_id}: SGLang ended it with finish_reason {other!r}")


def _hidden_states(steps: Sequence[Any]) -> list[list[float]]:
    """Return the state that each token was drawn from; of the prompt's pass, the last one."""
    return [step[-1] if step and isinstance(step[0], list | tuple) else step for step in steps]


def require_pooling(wanted: PoolingMode, applied: str | None) -> None:
    """Check that SGLang pools as the model's folder asks, which it reads for some architectures only.

    Args:
        wanted: The folder's pooling.
        applied: Name of SGLang's ``PoolingType`` for the model; None if it is not known.

    Raises:
        InvalidConfig: SGLang pools in another way.
    """
    if applied != _POOLING_TYPES[wanted]:
        raise InvalidConfig(
            f"the model's folder asks for the pooling {wanted.value}, and SGLang applies {applied or 'one of its own'} "
            "to this architecture; use another backend",
            field="model",
        )


def fitting(context_length: int, pool: float) -> int:
    """Return the context length, reduced if the KV pool does not hold as many tokens."""
    return context_length if math.isinf(pool) else min(context_length, int(pool) - ROOM)
