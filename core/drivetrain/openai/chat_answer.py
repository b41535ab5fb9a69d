"""Responses to chat completion requests, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from drivetrain.openai.choices import FINISH_REASON, chat_logprobs, ending, usage
from drivetrain.openai.forced_calls import CallReader, calls_in, reader_of
from drivetrain.openai.payloads import ChatPayload
from drivetrain.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReasonName,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.openai.tool_calls_in_answer import read_calls
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason


class ChatAnswer:
    """Builds the response to one request."""

    def __init__(
        self, asked: ChatPayload, id: str, model: str, tokenizer: Tokenizer, tool_call_parser: str | None = None
    ) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._parser = tool_call_parser
        self._id = id
        self._model = model
        self._texts = TokenTexts(tokenizer)
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._readers: dict[int, CallReader] = {}
        self._ended: list[Completion] = []

    def whole(self, completions: Sequence[Completion]) -> ChatCompletion:
        """Return the whole response."""
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(completion) for completion in completions],
            "usage": usage(completions),
            "prompt_token_ids": completions[0].prompt_token_ids,
        }

    def _choice(self, completion: Completion) -> ChatChoice:
        content, calls, reason = self._read(completion)
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": completion.sample_index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": reason,
            "token_ids": completion.token_ids,
            **ending(completion),
        }

    def _read(self, completion: Completion) -> tuple[str | None, list[ToolCall], FinishReasonName]:
        """Return the content, the tool calls and the finish reason."""
        reason = FINISH_REASON[completion.finish_reason]
        if not self._asked.shows_tools:
            return completion.text, [], reason
        if (reader := reader_of(self._asked)) is not None:
            forced = calls_in(completion.text, reader)
            # As in the OpenAI API and vLLM, the call of a named function ends with "stop".
            if forced and reason == "stop" and self._asked.tool_choice == "required":
                reason = "tool_calls"
            return "", forced, reason
        parsed = read_calls(completion, self._asked, self._tokenizer, self._parser)
        calls: list[ToolCall] = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call} for call in parsed.calls
        ]
        if self._asked.parallel_tool_calls is False:
            del calls[1:]
        if calls and completion.finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        return parsed.content if calls else completion.text, calls, reason

    def _logprobs(self, piece: Completion | CompletionChunk) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        return chat_logprobs(self._texts, piece.token_ids, piece.logprobs, piece.top_logprobs)

    # In chunks ---------------------------------------------------------------------------------------------------

    def chunks(self, chunk: CompletionChunk) -> Iterator[ChatCompletionChunk]:
        """Yield a choice's new chunks: first its role, then its content, then its finish reason."""
        index = chunk.sample_index
        if index not in self._opened:
            self._opened.add(index)
            yield self._piece(index, {"role": "assistant", "content": ""})
        if chunk.token_ids or chunk.text:
            yield self._piece(index, self._delta(chunk), logprobs=self._logprobs(chunk), token_ids=chunk.token_ids)
        if chunk.completion is not None:
            self._ended.append(chunk.completion)
            yield from self._ending(chunk.completion)

    def _delta(self, chunk: CompletionChunk) -> ChatDelta:
        if not self._asked.shows_tools:
            return {"content": chunk.text}
        # A tool call must not be sent as content. Unless all text is calls, it is held back to the end.
        if not self._asked.must_call:
            return {}
        if (reader := self._readers.get(chunk.sample_index)) is None:
            reader = reader_of(self._asked)
            assert reader is not None
            self._readers[chunk.sample_index] = reader
        parts = reader.push(chunk.text)
        return {"tool_calls": parts} if parts else {}

    def _ending(self, completion: Completion) -> Iterator[ChatCompletionChunk]:
        index = completion.sample_index
        content, calls, reason = self._read(completion)
        if self._asked.shows_tools and content:
            yield self._piece(index, {"content": content})
        for position, call in enumerate(() if self._asked.must_call else calls):
            function: FunctionDelta = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            part: ToolCallDelta = {"index": position, "id": call["id"], "type": "function", "function": function}
            yield self._piece(index, {"tool_calls": [part]})
        last: ChatChunkChoice = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "token_ids": [],
            **ending(completion),
            "prompt_token_ids": completion.prompt_token_ids,
        }
        yield self._chunk([last], None)

    def usage_chunk(self) -> ChatCompletionChunk:
        """Return the final chunk, which has the usage and no choices."""
        return self._chunk([], usage(self._ended))

    def _piece(
        self, index: int, delta: ChatDelta, *, logprobs: ChatLogprobs | None = None, token_ids: Sequence[int] = ()
    ) -> ChatCompletionChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": list(token_ids),
        }
        return self._chunk([choice], None)

    def _chunk(self, choices: list[ChatChunkChoice], used: Usage | None) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._asked.include_usage:
            chunk["usage"] = used
        return chunk
