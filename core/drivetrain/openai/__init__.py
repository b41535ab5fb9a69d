"""Requests and responses of the OpenAI API, for any engine: see :meth:`InferenceEngine.chat_completion`."""

from __future__ import annotations

from drivetrain.openai.endpoints import chat_completion, chat_completion_stream, completion, completion_stream
from drivetrain.openai.error_body import error_body
from drivetrain.openai.payloads import ChatPayload, CompletionPayload
from drivetrain.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    TextCompletion,
    TextCompletionChunk,
    ToolCall,
    Usage,
)
from drivetrain.tool_calls import ParsedText, parse_tool_calls

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
