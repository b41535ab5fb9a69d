"""The OpenAI API's requests and answers, on any engine: see :meth:`InferenceEngine.chat_completion`."""

from __future__ import annotations

from drivetrain.openai_api.calls import chat_completion, chat_completion_stream, completion, completion_stream
from drivetrain.openai_api.error_body import error_body
from drivetrain.openai_api.payloads import ChatPayload, CompletionPayload
from drivetrain.openai_api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    TextCompletion,
    TextCompletionChunk,
    ToolCall,
    Usage,
)
from drivetrain.openai_api.tool_calls import ParsedText, parse_tool_calls

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatPayload",
    "CompletionPayload",
    "ErrorBody",
    "ParsedText",
    "TextCompletion",
    "TextCompletionChunk",
    "ToolCall",
    "Usage",
    "chat_completion",
    "chat_completion_stream",
    "completion",
    "completion_stream",
    "error_body",
    "parse_tool_calls",
]
