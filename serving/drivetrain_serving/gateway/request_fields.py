"""Fields, for the OpenAPI document, of requests that the gateway turns into chat completions.

Fields that are not listed here are those of chat completions.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field, JsonValue

from drivetrain_serving.http_layer.route_docs import Fields
from drivetrain_serving.vllm.payloads import ChatRequest

_OBJECTS: Final[dict[str, JsonValue]] = {"type": ["array", "null"], "items": {"type": "object"}}
_TEXTS: Final[dict[str, JsonValue]] = {"type": ["string", "array", "null"], "items": {"type": "object"}}
_COUNT: Final[dict[str, JsonValue]] = {"type": ["integer", "null"]}
_NUMBER: Final[dict[str, JsonValue]] = {"type": ["number", "null"]}
_FLAG: Final[dict[str, JsonValue]] = {"type": ["boolean", "null"]}
_OBJECT: Final[dict[str, JsonValue]] = {"type": ["object", "null"]}


class _Recorded(Fields):
    return_routed_experts: object = Field(
        default=None,
        description="Record the experts of the sampled tokens; null: as the server is set.",
        json_schema_extra=_FLAG,
    )
    return_prompt_routed_experts: object = Field(
        default=None, description="Record the experts of the prompt's new tokens.", json_schema_extra=_FLAG
    )
    return_sampling_mask: object = Field(
        default=None,
        description="Record the ids that each sampled token was drawn from; null: as the server is set.",
        json_schema_extra=_FLAG,
    )


class SessionChatRequest(ChatRequest, _Recorded):
    """A request to ``/v1/chat/completions`` of a session."""

    model_config = ChatRequest.model_config


class _AgentFields(_Recorded):
    model: object = Field(
        default=None, description="Name of the model or an adapter.", json_schema_extra={"type": ["string", "null"]}
    )
    tools: object = Field(default=None, description="Functions that the model may call.", json_schema_extra=_OBJECTS)
    temperature: object = Field(
        default=None, description="Divides the logits; 1 if not given; 0 is greedy.", json_schema_extra=_NUMBER
    )
    top_p: object = Field(default=None, description="Nucleus probability.", json_schema_extra=_NUMBER)
    top_k: object = Field(default=None, description="Number of candidate tokens.", json_schema_extra=_COUNT)
    stream: object = Field(default=None, description="Send the answer as events.", json_schema_extra=_FLAG)


class MessagesRequest(_AgentFields):
    """A request to ``/v1/messages``, in Anthropic's form."""

    messages: object = Field(
        description="The conversation so far.",
        json_schema_extra={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {"type": ["string", "array"], "items": {"type": "object"}},
                },
                "required": ["role", "content"],
            },
        },
    )
    system: object = Field(default=None, description="A text, or blocks of text.", json_schema_extra=_TEXTS)
    max_tokens: object = Field(default=None, description="Maximum tokens to generate.", json_schema_extra=_COUNT)
    stop_sequences: object = Field(
        default=None,
        description="Strings that end generation.",
        json_schema_extra={"type": ["array", "null"], "items": {"type": "string"}},
    )
    tool_choice: object = Field(default=None, description="Of type auto, any, tool or none.", json_schema_extra=_OBJECT)
    thinking: object = Field(
        default=None, description="Sets enable_thinking where the chat template reads it.", json_schema_extra=_OBJECT
    )
    output_format: object = Field(
        default=None, description="A JSON schema of the text, of type json_schema.", json_schema_extra=_OBJECT
    )


class ResponsesRequest(_AgentFields):
    """A request to ``/v1/responses``, in OpenAI's form."""

    input: object = Field(
        description="A text, or messages, function calls and their outputs.",
        json_schema_extra={"type": ["string", "array"], "items": {"type": "object"}},
    )
    instructions: object = Field(
        default=None, description="A system message.", json_schema_extra={"type": ["string", "null"]}
    )
    max_output_tokens: object = Field(default=None, description="Maximum tokens to generate.", json_schema_extra=_COUNT)
    text: object = Field(default=None, description="The output format.", json_schema_extra=_OBJECT)
    reasoning: object = Field(
        default=None, description="Sets reasoning_effort where the chat template reads it.", json_schema_extra=_OBJECT
    )
    parallel_tool_calls: object = Field(default=None, description="False: at most one call.", json_schema_extra=_FLAG)
