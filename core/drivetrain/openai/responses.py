"""Types of OpenAI API responses. Fields that the API does not have are marked as extras."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic makes schemas of no other before Python 3.12

from drivetrain.tool_calls.functions import FunctionCall

FinishReasonName = Literal["stop", "length", "tool_calls", "abort"]
"""``abort`` is not OpenAI's; SGLang and vLLM use it too. An aborted choice holds the tokens generated so far."""


class PromptTokensDetails(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of a whole call. A prompt counts once for all ``n`` choices; stop tokens count as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class WeightSpan(TypedDict):
    """Range of a choice's tokens, ``start`` to ``end`` (exclusive), that were sampled under ``version``."""

    version: str
    start: int
    end: int


class Ending(TypedDict):
    """Extra fields of a finished choice."""

    weight_version: str | None
    weight_versions: list[WeightSpan]
    matched_stop: int | str | None
    logprobs_mode: str | None


# Logprobs ------------------------------------------------------------------------------------------------------------


class TokenLogprob(TypedDict):
    r"""A token with its logprob. A token that is part of a character is written as ``bytes:\xe2\x82``."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledLogprob(TokenLogprob):
    """A sampled token, and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each of the choice's ``token_ids``, a stop token included."""

    content: list[SampledLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Parallel lists with one entry per id of ``token_ids``; with ``echo``, the prompt's tokens come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    """Includes the sampled token. If two tokens have the same text, the less likely one is keyed ``token_id:…``."""
    text_offset: list[int]
    """Character offset of each token in the choice's text."""


# Chat ----------------------------------------------------------------------------------------------------------------


class ToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    """New arguments of a call in a stream; the name comes with the first of them."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """New part of a tool call in a stream. The first part has the call's id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Ending):
    """One generated answer. Extras: ``token_ids`` and all fields of :class:`Ending`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int]


class ChatCompletion(TypedDict):
    """Response to a chat completion request; ``prompt_token_ids`` is an extra."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int]


class ChatDelta(TypedDict, total=False):
    """New parts of a message."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChunkEnding(TypedDict, total=False):
    """Extra fields of a choice's last chunk."""

    weight_version: str | None
    weight_versions: list[WeightSpan]
    matched_stop: int | str | None
    logprobs_mode: str | None
    prompt_token_ids: list[int]


class ChatChunkChoice(ChunkEnding):
    """New parts of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int]


class ChatCompletionChunk(TypedDict):
    """One chunk of a stream.

    ``usage`` exists only on request; it is None except in the last chunk, which has no choices.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


# Completions ---------------------------------------------------------------------------------------------------------


class CompletionChoice(Ending):
    """One choice; ``index`` counts over all prompts and their ``n`` samples. Extras as in :class:`ChatChoice`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int]
    prompt_token_ids: list[int]


class TextCompletion(TypedDict):
    """Response to a completion request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ChunkEnding):
    """New parts of one choice."""

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
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of an error response."""

    error: ErrorDetails
