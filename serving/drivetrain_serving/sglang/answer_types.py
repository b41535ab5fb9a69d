"""Types of the answers of SGLang's routes; the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from drivetrain.openai.responses import WeightSpan
from drivetrain_serving.http_layer.error_statuses import AboutError

TokenEntry = tuple[float | None, int, str | None]
"""Logprob, token id, and text where it is asked for."""


# /generate -----------------------------------------------------------------------------------------------------------


class EndedByStop(TypedDict):
    """A stop string, regex or token matched; null for EOS of engines that do not tell it."""

    type: Literal["stop"]
    matched: int | str | None


class EndedByLength(TypedDict):
    """The maximum length was reached."""

    type: Literal["length"]
    length: int


class EndedByAbort(TypedDict):
    """The request was aborted."""

    type: Literal["abort"]
    message: str
    status_code: None
    err_type: None


FinishReason = EndedByStop | EndedByLength | EndedByAbort


class MetaInfo(TypedDict):
    """Everything of a sample but its text and ids. Logprobs are there where they are asked for."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    weight_version: str
    completion_tokens: int
    weight_versions: NotRequired[list[WeightSpan]]
    cached_tokens: NotRequired[int]
    e2e_latency: NotRequired[float]
    input_token_logprobs: NotRequired[list[TokenEntry]]
    input_top_logprobs: NotRequired[list[list[TokenEntry] | None]]
    output_token_logprobs: NotRequired[list[TokenEntry]]
    output_token_logprobs_length: NotRequired[int]
    output_top_logprobs: NotRequired[list[list[TokenEntry]]]
    top_p_token_ids: NotRequired[str]
    top_p_token_offsets: NotRequired[str]
    routed_experts: NotRequired[str]


class Generated(TypedDict):
    """One sample; of a stream, up to now."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]


# Tokens --------------------------------------------------------------------------------------------------------------


class TextTokens(TypedDict):
    """Token ids of one text."""

    tokens: list[int]
    count: int
    max_model_len: int


class TextsTokens(TypedDict):
    """Token ids of several texts."""

    tokens: list[list[int]]
    count: list[int]
    max_model_len: int


class Texts(TypedDict):
    """One text, or several."""

    text: str | list[str]


# Control -------------------------------------------------------------------------------------------------------------


class Done(TypedDict):
    """Answer of ``/pause_generation`` and ``/continue_generation``."""

    message: str
    status: Literal["ok"]


class WeightsChanged(TypedDict):
    """Answer of the routes by which a trainer sends weights."""

    success: Literal[True]
    message: str


class UpdatedFromDisk(WeightsChanged):
    """Answer of ``/update_weights_from_disk``."""

    num_paused_requests: int


class VersionRenamed(WeightsChanged):
    """Answer of ``/update_weight_version`` in SGLang's dialect."""

    new_version: str


class Placement(TypedDict):
    """An engine's place among those of a fleet. One rank stands for all of an engine: its tensors are whole."""

    role: Literal["target"]
    tp_rank: Literal[0]
    tp_size: Literal[1]
    dp_rank: int
    dp_size: int
    pp_rank: Literal[0]
    pp_size: Literal[1]
    rank: int
    size: int


class EngineChecksums(TypedDict):
    """Checksums of an engine's tensors by name, and one of all."""

    checksums: dict[str, str]
    per_gpu_checksum: str
    parallelism_info: Placement


class WeightsChecked(WeightsChanged):
    """Answer of ``/weights_checker``; checksums of each engine are there if they were asked for."""

    ranks: NotRequired[list[EngineChecksums]]
    per_engine_checksum: NotRequired[str]


class AdaptersChanged(TypedDict):
    """Answer of the routes that load and unload adapters."""

    success: Literal[True]
    error_message: None
    loaded_adapters: dict[str, str]


class AdaptersUnchanged(TypedDict):
    """Answer of these routes if they fail."""

    success: Literal[False]
    error_message: str
    loaded_adapters: None
    drivetrain: AboutError


# Description ---------------------------------------------------------------------------------------------------------


class SGLangModelInfo(TypedDict):
    """Answer of ``/model_info``."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str
    load_format: Literal["auto"]
    reasoning_parser: None
    tool_call_parser: str | None
    disaggregation_mode: Literal["null"]
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: None
    architectures: list[str]


class InternalState(TypedDict):
    """The state of one scheduler."""

    weight_version: str


class SGLangServerInfo(TypedDict):
    """SGLang's part of ``/server_info``."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    dtype: str
    context_length: int
    tp_size: Literal[1]
    pp_size: Literal[1]
    dp_size: Literal[1]
    ep_size: Literal[1]
    moe_dp_size: Literal[1]
    num_gpus: Literal[1]
    disaggregation_mode: Literal["null"]
    encoder_only: Literal[False]
    enable_memory_saver: Literal[False]
    enable_return_routed_experts: Literal[False]
    enable_lora: bool
    max_lora_rank: int | None
    max_loras_per_batch: int | None
    max_running_requests: int | None
    weight_version: str
    internal_states: list[InternalState]
    version: str


class Load(TypedDict):
    """The requests in one engine."""

    dp_rank: Literal[0]
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    max_running_requests: int | None


class Loads(TypedDict):
    """Answer of ``/v1/loads``."""

    timestamp: str
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[Load]
