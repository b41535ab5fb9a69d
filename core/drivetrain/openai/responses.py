"""What comes back, as the OpenAI API shapes it. Fields that the API does not have are marked as extras."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from drivetrain.tool_calls.functions import FunctionCall

FinishReasonName = Literal["stop", "length", "tool_calls", "abort"]
"""``abort`` is not OpenAI's: it is what SGLang and vLLM call it. Such a choice holds what was generated so far."""


class PromptTokensDetails(TypedDict):
    """Of the prompt tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a whole call. A prompt counts once, whatever ``n``; stop tokens were generated and count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class WeightSpan(TypedDict):
    """Tokens ``start`` to ``end`` (exclusive) of a choice were sampled under ``version``."""

    version: str
    start: int
    end: int


class Ending(TypedDict):
    """Extras of a choice that has ended."""

    weight_version: str | None
    weight_versions: list[WeightSpan]
    matched_stop: int | str | None
    logprobs_mode: str | None


# Logprobs ------------------------------------------------------------------------------------------------------------


class TokenLogprob(TypedDict):
    r"""A token, and how likely it was. A token that is a part of a character is written as ``bytes:\xe2\x82``."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledLogprob(TokenLogprob):
    """A sampled token, and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each of the choice's ``token_ids``, a stop token included."""

    content: list[SampledLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Lists as long as the choice's ``token_ids`` (with ``echo``, the prompt's before them)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    """Always with the token itself. Two tokens that read alike: the second is called ``token_id:…``."""
    text_offset: list[int]
    """Where in the choice's text each token begins."""


# Chat ----------------------------------------------------------------------------------------------------------------


class ToolCall(TypedDict):
    """One call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(ToolCall):
    """One call of a stream, whole."""

    index: int


class ChatMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Ending):
    """One answer; ``token_ids``, ``matched_stop`` and what concerns weights and the logprobs' mode are extras."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int]


class ChatCompletion(TypedDict):
    """The answer to a chat completion request; ``prompt_token_ids`` is an extra."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int]


class ChatDelta(TypedDict, total=False):
    """What is new in a message."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChunkEnding(TypedDict, total=False):
    """Extras of a choice's last chunk."""

    weight_version: str | None
    weight_versions: list[WeightSpan]
    matched_stop: int | str | None
    logprobs_mode: str | None
    prompt_token_ids: list[int]


class ChatChunkChoice(ChunkEnding):
    """What is new in one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int]


class ChatCompletionChunk(TypedDict):
    """One chunk. ``usage`` is there if it was asked for: None but in the last one, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


# Completions ---------------------------------------------------------------------------------------------------------


class CompletionChoice(Ending):
    """One choice; ``index`` counts over prompts and, within one, over its ``n``. Extras as in :class:`ChatChoice`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int]
    prompt_token_ids: list[int]


class TextCompletion(TypedDict):
    """The answer to a completion request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ChunkEnding):
    """What is new in one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int]


class TextCompletionChunk(TypedDict):
    """One chunk; see :class:`ChatCompletionChunk`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


# Errors --------------------------------------------------------------------------------------------------------------


class ErrorDetails(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of an answer that is an error."""

    error: ErrorDetails
