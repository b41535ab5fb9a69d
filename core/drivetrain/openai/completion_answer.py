"""Responses to completion requests, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from drivetrain.openai.choices import FINISH_REASON, completion_logprobs, ending, usage
from drivetrain.openai.payloads import CompletionPayload
from drivetrain.openai.responses import (
    CompletionChoice,
    CompletionChunkChoice,
    CompletionLogprobs,
    TextCompletion,
    TextCompletionChunk,
    Usage,
)
from drivetrain.openai.token_texts import TextOffsets, TokenTexts
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.outputs import Completion, CompletionChunk, TopLogprobs


class CompletionAnswer:
    """Builds the response to one request.

    Args:
        asked: The request.
        id: The response's id.
        model: Name of the model.
        tokenizer: The engine's tokenizer.
        echoes_text: With ``echo``: put the prompt's text before each choice's.
    """

    def __init__(
        self, asked: CompletionPayload, id: str, model: str, tokenizer: Tokenizer, *, echoes_text: bool = True
    ) -> None:
        self._asked = asked
        self._echoes_text = echoes_text
        self._id = id
        self._model = model
        self._tokenizer = tokenizer
        self._skip = asked.skip_special_tokens is not False
        self._texts = TokenTexts(tokenizer)
        self._created = int(time.time())
        self._offsets: dict[int, TextOffsets] = {}
        self._opened: set[int] = set()
        self._ended: list[Completion] = []

    def whole(self, completions: Sequence[Completion]) -> TextCompletion:
        """Return the whole response."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(completion) for completion in completions],
            "usage": usage(completions),
        }

    def _choice(self, completion: Completion) -> CompletionChoice:
        return {
            "index": self._index(completion),
            "text": self._before(completion.prompt_token_ids) + completion.text,
            "logprobs": self._echoed(completion) if self._asked.echo else self._logprobs(completion),
            "finish_reason": FINISH_REASON[completion.finish_reason],
            "token_ids": completion.token_ids,
            **ending(completion),
            "prompt_token_ids": completion.prompt_token_ids,
        }

    def _index(self, piece: Completion | CompletionChunk) -> int:
        return piece.prompt_index * (self._asked.n or 1) + piece.sample_index

    def _logprobs(self, piece: Completion | CompletionChunk) -> CompletionLogprobs | None:
        if piece.logprobs is None:
            return None
        offsets = self._offsets.setdefault(self._index(piece), self._text_offsets(0)).push(piece.token_ids)
        return completion_logprobs(self._texts, piece.token_ids, piece.logprobs, piece.top_logprobs, offsets)

    def _text_offsets(self, start: int) -> TextOffsets:
        return TextOffsets(self._tokenizer, skip_special_tokens=self._skip, start=start)

    # With the prompt ---------------------------------------------------------------------------------------------

    def _text(self, prompt_ids: Sequence[int]) -> str:
        return self._tokenizer(prompt_ids, skip_special_tokens=self._skip)

    def _before(self, prompt_ids: Sequence[int]) -> str:
        """Return the text before that of a choice."""
        return self._text(prompt_ids) if self._asked.echo and self._echoes_text else ""

    def _echoed(self, completion: Completion) -> CompletionLogprobs | None:
        if completion.logprobs is None or completion.prompt_logprobs is None:
            return None
        prompt_ids = completion.prompt_token_ids
        shown = self._text(prompt_ids)
        offsets = self._text_offsets(0).push(prompt_ids) + self._text_offsets(len(shown)).push(completion.token_ids)
        top: list[TopLogprobs | None] | None = None
        if completion.top_logprobs is not None:
            top = [*(completion.prompt_top_logprobs or [None] * len(prompt_ids)), *completion.top_logprobs]
        return completion_logprobs(
            self._texts,
            [*prompt_ids, *completion.token_ids],
            [*completion.prompt_logprobs, *completion.logprobs],
            top,
            offsets,
        )

    # In chunks ---------------------------------------------------------------------------------------------------

    def chunks(self, chunk: CompletionChunk) -> Iterator[TextCompletionChunk]:
        """Yield a choice's new chunks: its text, then its finish reason."""
        choice = self._echoing(chunk) if self._asked.echo else self._part(chunk)
        if choice is not None:
            yield self._chunk([choice], None)
        if (completion := chunk.completion) is not None:
            self._ended.append(completion)
            last: CompletionChunkChoice = {
                "index": self._index(chunk),
                "text": "",
                "logprobs": None,
                "finish_reason": FINISH_REASON[completion.finish_reason],
                "token_ids": [],
                **ending(completion),
                "prompt_token_ids": completion.prompt_token_ids,
            }
            yield self._chunk([last], None)

    def _part(self, chunk: CompletionChunk) -> CompletionChunkChoice | None:
        if not chunk.token_ids and not chunk.text:
            return None
        return {
            "index": self._index(chunk),
            "text": chunk.text,
            "logprobs": self._logprobs(chunk),
            "finish_reason": None,
            "token_ids": chunk.token_ids,
        }

    def _echoing(self, chunk: CompletionChunk) -> CompletionChunkChoice | None:
        """Return a choice's new part; its first one begins with the prompt.

        Engines tell a prompt's logprobs at the end of a completion: if they are asked for, the choice is one part.
        """
        index, prompt = self._index(chunk), list(chunk.prompt_token_ids)
        if self._asked.logprobs is not None:
            if (completion := chunk.completion) is None:
                return None
            return {
                "index": index,
                "text": self._before(prompt) + completion.text,
                "logprobs": self._echoed(completion),
                "finish_reason": None,
                "token_ids": completion.token_ids,
                "prompt_token_ids": prompt,
            }
        if index in self._opened:
            return self._part(chunk)
        self._opened.add(index)
        return {
            "index": index,
            "text": self._before(prompt) + chunk.text,
            "logprobs": None,
            "finish_reason": None,
            "token_ids": chunk.token_ids,
            "prompt_token_ids": prompt,
        }

    def usage_chunk(self) -> TextCompletionChunk:
        """Return the final chunk, which has the usage and no choices."""
        return self._chunk([], usage(self._ended))

    def _chunk(self, choices: list[CompletionChunkChoice], used: Usage | None) -> TextCompletionChunk:
        chunk: TextCompletionChunk = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._asked.include_usage:
            chunk["usage"] = used
        return chunk
