"""Types of the answers of vLLM's and OpenAI's routes; the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from drivetrain.openai.responses import (
    ChatDelta,
    ChatLogprobs,
    CompletionLogprobs,
    Ending,
    FinishReasonName,
    ToolCall,
    ToolCallDelta,
    WeightSpan,
)

Ids = list[int]
RoutedExperts = list[list[list[int]]]


# Parts ---------------------------------------------------------------------------------------------------------------


class PromptDetails(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: int
    created_cache_tokens: None
    multimodal_tokens: None


class DetailedUsage(TypedDict):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: None


class RankedLogprob(TypedDict):
    """A token of a prompt: its logprob, its rank from 1 on, and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None] | None
"""Per token of the prompt: token id → logprob, the prompt's own token first; null for the first."""


class Absent(TypedDict):
    """Fields of features that no engine here has: vLLM writes null, and some clients look for the key."""

    ec_transfer_params: None
    kv_transfer_params: None
    metrics: None
    service_tier: None
    system_fingerprint: None


class ChunkEnding(TypedDict, total=False):
    """Fields of a choice's last chunk."""

    weight_version: str | None
    weight_versions: list[WeightSpan]
    matched_stop: int | str | None
    logprobs_mode: str | None


# Completions ---------------------------------------------------------------------------------------------------------


class CompletionChoice(Ending):
    """One choice; ``index`` counts over all prompts and their ``n`` samples."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: Ids | None
    prompt_token_ids: Ids | None
    prompt_logprobs: PromptLogprobs
    routed_experts: None


class TextCompletion(Absent):
    """Answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: DetailedUsage


class CompletionChunkChoice(ChunkEnding):
    """New parts of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    token_ids: Ids | None
    prompt_token_ids: Ids | None


class RunningUsage(TypedDict):
    """Token counts of one choice so far, in each chunk of a stream with ``continuous_usage_stats``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: None
    completion_tokens_details: None


class CompletionUsageChunk(TypedDict):
    """Last chunk of a stream whose usage is asked for; it has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: DetailedUsage


class CompletionChunk(TypedDict):
    """One chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[RunningUsage | None]
    system_fingerprint: None


# Chat ----------------------------------------------------------------------------------------------------------------


class ChatAnswerMessage(TypedDict):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: None
    tool_calls: list[ToolCall]


class ChatChoice(Ending):
    """One generated answer."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: Ids | None
    routed_experts: None


class ChatCompletion(Absent):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: DetailedUsage
    prompt_token_ids: Ids | None
    prompt_logprobs: PromptLogprobs
    prompt_text: None


class ChatChunkChoice(ChunkEnding):
    """New parts of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    token_ids: Ids | None


class ChatUsageChunk(TypedDict):
    """Last chunk of a stream whose usage is asked for; it has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: DetailedUsage


class ChatChunk(TypedDict):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[RunningUsage | None]
    prompt_token_ids: Ids | None
    prompt_text: None
    system_fingerprint: None


# Token ids in, token ids out -----------------------------------------------------------------------------------------


class TokenIdLogprob(TypedDict):
    """A token by its id, as a number and as the string of earlier releases."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: None


class SampledIdLogprob(TokenIdLogprob):
    """A sampled token, and the most likely tokens at its position."""

    top_logprobs: list[TokenIdLogprob]


class TokenIdLogprobs(TypedDict):
    """One entry for each sampled token."""

    content: list[SampledIdLogprob]


class GenerateChoice(TypedDict):
    """One sample. In a stream, only a sample's last chunk has ``weight_versions``."""

    index: int
    token_ids: Ids
    logprobs: TokenIdLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    routed_experts: RoutedExperts | None
    sampling_mask: None
    weight_versions: NotRequired[list[WeightSpan]]


class GenerateFrame(TypedDict):
    """Fields of answers and chunks of ``/inference/v1/generate``."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens"]
    choices: list[GenerateChoice]


class GenerateChunk(GenerateFrame):
    """One chunk of a stream."""

    usage: DetailedUsage | RunningUsage | None


class GenerateAnswer(GenerateFrame):
    """Answer of ``/inference/v1/generate``."""

    usage: DetailedUsage
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: Ids | None
    mm_placeholders: None
    kv_transfer_params: None
    metrics: None
    prompt_token_id_logprobs: str | None


class PackedArray(TypedDict):
    """An array of integers."""

    data: str
    """Base64 of its bytes, little-endian, row by row."""
    shape: list[int]
    dtype: str
    """``uint8``, ``int16`` or ``int32``."""


class SkyrlGenerateChoice(TypedDict):
    """One sample."""

    token_ids: Ids
    finish_reason: FinishReasonName
    logprobs: TokenIdLogprobs | None
    routed_experts: PackedArray | None
    """Experts of all tokens but the last: (tokens, layers, experts per token). Null if the engine records none."""
    rollout_sample_support: PackedArray | None
    """Ids that were left to draw each token from, padded with -1: (tokens, top_k)."""


class SkyrlGenerateAnswer(TypedDict):
    """Answer of ``/skyrl/v1/generate``."""

    choices: list[SkyrlGenerateChoice]


class RenderedStreamOptions(TypedDict):
    """Options of a stream."""

    include_usage: bool
    continuous_usage_stats: bool


class Rendered(TypedDict):
    """A request to ``/inference/v1/generate`` that a request of OpenAI's is rendered to."""

    request_id: str
    token_ids: Ids
    token_offsets: None
    features: None
    content_parts: None
    sampling_params: dict[str, object]
    model: str | None
    reasoning_ended: None
    reasoning_parser_kwargs: None
    return_token_ids: None
    output_mode: Literal["tokens"]
    stream: bool
    stream_options: RenderedStreamOptions | None
    cache_salt: None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None


class DerenderState(TypedDict):
    """State that the client of a derendered stream sends with its next chunk. Fields that only vLLM uses are empty."""

    prev_tokens: list[str]
    prefix_offset: int
    read_offset: int
    role_sent: bool
    logprob_context_token_ids: Ids
    logprob_text_offset: int
    """Number of characters so far."""
    output_token_ids: Ids
    """Ids so far: all if calls may be among them, else the last 64."""
    output_chunk_lens: list[int]
    """Number of them in each chunk."""
    tools_streamed: bool
    last_tool_call_ids: list[str]


class DerenderedDelta(TypedDict):
    """New parts of a message."""

    role: Literal["assistant"] | None
    content: str | None
    reasoning: None
    tool_calls: NotRequired[list[ToolCallDelta]]


class DerenderedChatChoice(TypedDict):
    """New parts of one choice."""

    index: int
    delta: DerenderedDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    token_ids: Ids | None


class DerenderedChat(TypedDict):
    """A chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[DerenderedChatChoice]
    usage: RunningUsage | None
    system_fingerprint: None
    prompt_token_ids: None
    prompt_text: None
    metrics: None


class DerenderedChatChunk(TypedDict):
    """Answer of ``/v1/chat/completions/derender`` to a chunk."""

    chunk: DerenderedChat
    stream_state: DerenderState


class DerenderedCompletionChoice(TypedDict):
    """New parts of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    token_ids: None
    prompt_token_ids: None


class DerenderedCompletion(TypedDict):
    """A chunk of a completion's stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[DerenderedCompletionChoice]
    usage: RunningUsage | None
    system_fingerprint: None
    metrics: None


class DerenderedCompletionChunk(TypedDict):
    """Answer of ``/v1/completions/derender`` to a chunk."""

    chunk: DerenderedCompletion
    stream_state: DerenderState


# Tokens and embeddings -----------------------------------------------------------------------------------------------


class Tokenized(TypedDict):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: Ids
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """Answer of ``/detokenize``."""

    prompt: str


class Embedding(TypedDict):
    """A vector, as numbers or as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Token counts of an embedding."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """Answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


# Description ---------------------------------------------------------------------------------------------------------


class ModelPermission(TypedDict):
    """An entry that OpenAI's API no longer has, and vLLM writes."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: Literal[False]
    allow_sampling: Literal[True]
    allow_logprobs: Literal[True]
    allow_search_indices: Literal[False]
    allow_view: Literal[True]
    allow_fine_tuning: Literal[False]
    organization: Literal["*"]
    group: None
    is_blocking: Literal[False]


class ModelCard(TypedDict):
    """A name that requests may give as their model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["vllm", "sglang"]
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[ModelPermission]


class Models(TypedDict):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(TypedDict):
    """Answer of ``/version``."""

    version: str


class ModelConfigInfo(TypedDict):
    """The model."""

    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


class ParallelConfigInfo(TypedDict):
    """The parallel sizes."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int


class LoraConfigInfo(TypedDict):
    """Bounds of adapters."""

    max_lora_rank: int | None
    max_loras: int | None


class WeightTransferConfigInfo(TypedDict):
    """The transports by which a trainer can send weights."""

    backend: Literal["nccl"]


class VllmConfigInfo(TypedDict):
    """The parts of vLLM's configuration that trainers read."""

    model_config: ModelConfigInfo
    parallel_config: ParallelConfigInfo
    lora_config: LoraConfigInfo | None
    weight_transfer_config: WeightTransferConfigInfo | None


class EngineInfo(TypedDict):
    """The engine itself."""

    backend: str
    state: str
    weight_version: str
    versions: dict[str, str]
    capabilities: list[str]


class VllmServerInfo(TypedDict):
    """vLLM's part of ``/server_info``, and the engine's own."""

    vllm_config: VllmConfigInfo
    vllm_env: dict[str, str]
    system_env: dict[str, str]
    drivetrain: EngineInfo


class WorldSize(TypedDict):
    """Answer of ``/get_world_size``."""

    world_size: int


class ServerLoad(TypedDict):
    """Answer of ``/load``."""

    server_load: int


# Control -------------------------------------------------------------------------------------------------------------


class Paused(TypedDict):
    """Answer of ``/pause``."""

    status: Literal["paused"]


class Resumed(TypedDict):
    """Answer of ``/resume``."""

    status: Literal["resumed"]


class IsPaused(TypedDict):
    """Answer of ``/is_paused``."""

    is_paused: bool


class Aborted(TypedDict):
    """Answer of ``/abort_requests``."""

    status: Literal["aborted"]
    aborted: int


class Sleeping(TypedDict):
    """Answer of ``/sleep``."""

    status: Literal["sleeping"]
    level: int


class CacheReleased(TypedDict):
    """Answer of ``/release_kv_cache_memory``."""

    status: Literal["kv_cache_released"]


class Woken(TypedDict):
    """Answer of ``/wake_up``."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None


class IsSleeping(TypedDict):
    """Answer of ``/is_sleeping``."""

    is_sleeping: bool


class Succeeded(TypedDict):
    """Answer of ``/reset_prefix_cache``."""

    success: Literal[True]


class Said(TypedDict):
    """Answer of the routes of the weight transfer."""

    message: str


class UpdatedFromFolder(TypedDict):
    """Answer of ``/update_weights`` to a folder."""

    status: Literal["ok"]
    weight_version: str


class VersionUpdated(TypedDict):
    """Answer of ``/update_weight_version``."""

    success: Literal[True]
    new_version: str


class WeightInfo(TypedDict):
    """Answer of the routes that tell the weight version."""

    weight_version: str


class WeightChecksums(TypedDict):
    """Answer of ``/weight_checker`` to ``checksum``: by vLLM's name of the rank and the tensor's name."""

    checksums: dict[str, str]


class WeightsReset(TypedDict):
    """Answer of ``/weight_checker`` to ``reset``."""

    status: Literal["reset"]


class WeightsCompared(TypedDict):
    """Answer of ``/weight_checker`` to ``compare``, with the names of all checksums that differ."""

    match: bool
    mismatches: list[str]


class AdapterReloaded(TypedDict):
    """Answer of ``/load_lora_adapter``."""

    status: Literal["ok"]


class SkyrlAdapterReloaded(AdapterReloaded):
    """Answer of ``/skyrl/v1/load_lora_adapter``."""

    lora_name: str
    lora_int_id: None


class RpcResults(TypedDict):
    """Answer of ``/collective_rpc``: a result per worker."""

    results: list[bool | None]
