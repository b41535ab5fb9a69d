"""Types of the answers of sessions' routes; the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import JsonValue
from typing_extensions import TypedDict

from drivetrain.openai.responses import WeightSpan
from drivetrain_serving.http_layer.error_statuses import AboutError
from drivetrain_serving.other_processes import SessionFacts

# The trainer ---------------------------------------------------------------------------------------------------------


class SessionList(TypedDict):
    """Answer of ``/sessions``."""

    sessions: list[SessionFacts]


class TrajectoryBranch(TypedDict):
    """A path from a conversation's first turn to one that none extends. Lists have an entry for each token."""

    branch: int
    turns: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    """1 for sampled tokens, 0 for those of prompts."""
    logprobs: list[float | None]
    weight_versions: list[WeightSpan]
    shared_length: int
    """Number of tokens that belong to earlier branches too."""
    begins_because: str | None
    continues: int | None
    finish_reason: str


class PackedExperts(TypedDict):
    """Experts of consecutive tokens."""

    shape: list[int]
    """Number of tokens, of layers with experts, and of experts per token."""
    dtype: Literal["uint8", "uint16"]
    data: bytes
    """The ids in this order, little-endian; base64 in JSON."""


class PackedMask(TypedDict):
    """The ids that each sampled token was drawn from, as :class:`~drivetrain.SamplingMask` packs them."""

    vocab_size: int
    positions: int
    """Number of sampled tokens."""
    data: bytes
    """``SamplingMask.packed``; base64 in JSON."""


class TrajectoryTurn(TypedDict):
    """One prompt and its answer."""

    turn: int
    parent: int | None
    continues: int | None
    begins_because: str | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    logprobs_mode: str | None
    model: str
    sampling_params: dict[str, float | int | None]
    routed_experts: PackedExperts | None
    """Experts of the pass that drew each sampled token; None if not asked for."""
    prompt_routed_experts: PackedExperts | None
    """Experts of the prompt's tokens from ``prompt_routed_experts_start`` on; None if not asked for."""
    prompt_routed_experts_start: int | None
    """The last token of the turn that this one extends, which was not read before; else 0."""
    sampling_mask: PackedMask | None
    ended: float


class Trajectory(TypedDict):
    """Answer of ``/sessions/{id}/trajectory``."""

    session_id: str
    created: float
    branches: list[TrajectoryBranch]
    turns: list[TrajectoryTurn]


# Anthropic's messages ------------------------------------------------------------------------------------------------


class TextBlock(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonValue


Block = TextBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]


class MessageEnding(TypedDict):
    """The reason for which a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(MessageEnding):
    """Answer of ``…/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event."""

    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(TypedDict):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class InputDelta(TypedDict):
    """The arguments of a call."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta


class BlockStop(TypedDict):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    """The end of the message."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(TypedDict):
    """Answer of ``…/messages/count_tokens``."""

    input_tokens: int


class UnsupportedDetails(TypedDict):
    """Tells Anthropic's clients that they must send all messages."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[Literal["thread"]]


class AnthropicErrorDetails(TypedDict):
    """Details of an error."""

    type: str
    message: str
    details: NotRequired[UnsupportedDetails]


class AnthropicError(TypedDict):
    """Body of an error, and the last event of a stream that failed."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    drivetrain: NotRequired[AboutError]


# OpenAI's responses --------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Nothing = list[JsonValue]
"""A list that is always empty here."""


class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Nothing
    logprobs: Nothing


class OutputMessage(TypedDict):
    """The generated message."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(TypedDict):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | FunctionCallItem


class CachedTokens(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Details of the generated tokens."""

    reasoning_tokens: Literal[0]


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    """The reason for which a response is not complete."""

    reason: Literal["max_output_tokens"]


class OpenAIResponse(TypedDict):
    """Answer of ``…/responses``. Its last fields repeat the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    instructions: object
    max_output_tokens: object
    metadata: object
    temperature: object
    tools: object
    top_p: object
    user: object
    tool_choice: object
    text: object


class _Event(TypedDict):
    sequence_number: int


class _ItemEvent(_Event):
    output_index: int


class PlaceOfPart(_ItemEvent):
    """Position of an event's part in the response."""

    item_id: str
    content_index: Literal[0]


class ResponseEvent(_Event):
    """The response as a whole."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]
    response: OpenAIResponse


class ItemEvent(_ItemEvent):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class PartEvent(PlaceOfPart):
    """A part of a message begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(PlaceOfPart):
    """More text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: Nothing


class TextDoneEvent(PlaceOfPart):
    """All text of a part."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: Nothing


class ArgumentsDeltaEvent(_ItemEvent):
    """The arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    delta: str


class ArgumentsDoneEvent(_ItemEvent):
    """The call is complete."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    name: str
    arguments: str


class ResponseErrorEvent(_Event):
    """The last event of a stream that failed."""

    type: Literal["error"]
    code: str
    message: str
    param: None
    drivetrain: AboutError


ResponsesEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ResponseErrorEvent
)
