"""Responses to completions and chat completions as vLLM writes them: core's, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.openai import responses as openai
from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.choices import ending, json_logprob
from drivetrain.openai.completion_answer import CompletionAnswer
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, CompletionChunk, TopLogprobs
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.json_objects import (
    ABSENT,
    RunningUsages,
    prompt_logprobs,
    stop_reason,
    usage_of,
    with_details,
)
from drivetrain_serving.vllm.payloads import ChatRequest, CompletionRequest


class CompletionResponses:
    """Builds the response to one request to ``/v1/completions``.

    Args:
        asked: The request.
        answer: Builds the response without vLLM's own fields.
        texts: Texts of tokens.
        eos_token_ids: The model's EOS ids.
    """

    def __init__(
        self, asked: CompletionRequest, answer: CompletionAnswer, texts: TokenTexts, eos_token_ids: Sequence[int]
    ) -> None:
        self._asked = asked
        self._answer = answer
        self._texts = texts
        self._eos = eos_token_ids
        self._opened: set[int] = set()
        self._usages = RunningUsages(asked.continuous_usage)

    def whole(self, completions: Sequence[Completion]) -> types.TextCompletion:
        """Return the whole response."""
        response = self._answer.whole(completions)
        choices = [
            self._choice(choice, completion)
            for choice, completion in zip(response["choices"], completions, strict=True)
        ]
        return {**response, **ABSENT, "choices": choices, "usage": usage_of(completions)}

    def _choice(self, choice: openai.CompletionChoice, completion: Completion) -> types.CompletionChoice:
        with_ids = self._asked.return_token_ids
        return {
            **choice,
            "logprobs": self._logprobs(choice["logprobs"], completion),
            "stop_reason": stop_reason(completion, self._eos),
            "token_ids": choice["token_ids"] if with_ids else None,
            "prompt_token_ids": choice["prompt_token_ids"] if with_ids else None,
            "prompt_logprobs": prompt_logprobs(completion, self._texts),
            "routed_experts": None,
        }

    def chunks(self, chunk: CompletionChunk) -> Iterator[types.CompletionChunk]:
        """Yield the chunks of a stream; a choice's first one carries the prompt's ids, where they are asked for."""
        for made in self._answer.chunks(chunk):
            (choice,) = made["choices"]
            piece: types.CompletionChunk = {
                "id": made["id"],
                "object": made["object"],
                "created": made["created"],
                "model": made["model"],
                "choices": [self._chunk_choice(choice, chunk)],
                "system_fingerprint": None,
            }
            if "usage" in made:
                piece["usage"] = self._usages.after(choice["index"], choice["token_ids"], chunk.prompt_token_ids)
            yield piece

    def _chunk_choice(
        self, choice: openai.CompletionChunkChoice, chunk: CompletionChunk
    ) -> types.CompletionChunkChoice:
        ended = choice["finish_reason"] is not None
        first = choice["index"] not in self._opened
        self._opened.add(choice["index"])
        with_ids = self._asked.return_token_ids
        tells_prompt = (with_ids or self._asked.echo) and first
        whole = chunk.completion if self._asked.echo else None  # with logprobs, they come in one piece
        return {
            **choice,
            "logprobs": self._logprobs(choice["logprobs"], whole or chunk),
            "stop_reason": stop_reason(chunk.completion, self._eos) if ended and chunk.completion else None,
            "token_ids": choice["token_ids"] if with_ids else None,
            "prompt_token_ids": list(chunk.prompt_token_ids) if tells_prompt else None,
        }

    def usage_chunk(self) -> types.CompletionUsageChunk:
        """Return the final chunk, which has the usage and no choices."""
        made = self._answer.usage_chunk()
        counts = made.get("usage")
        assert counts is not None
        return {
            "id": made["id"],
            "object": made["object"],
            "created": made["created"],
            "model": made["model"],
            "choices": [],
            "usage": with_details(counts),
        }

    def _logprobs(
        self, found: openai.CompletionLogprobs | None, piece: Completion | CompletionChunk
    ) -> openai.CompletionLogprobs | None:
        """Return logprobs as vLLM writes them: one-entry dictionaries where only the sampled token's is asked for."""
        if found is None:
            return None
        tokens, tops = found["tokens"], found["top_logprobs"]
        if self._asked.return_tokens_as_token_ids:
            ids = piece.token_ids
            most_likely: Sequence[TopLogprobs | None] | None = piece.top_logprobs
            if self._asked.echo and isinstance(piece, Completion):
                ids = [*piece.prompt_token_ids, *ids]
                if most_likely is not None:
                    most_likely = [*(piece.prompt_top_logprobs or ()), *most_likely]
            tokens = [f"token_id:{token_id}" for token_id in ids]
            if most_likely is not None:
                tops = [
                    None
                    if own is None or others is None
                    else {
                        f"token_id:{other}": json_logprob(value)
                        for other, value in dict([(token_id, own), *others]).items()
                    }
                    for token_id, own, others in zip(ids, found["token_logprobs"], most_likely, strict=True)
                ]
        if tops is None:
            tops = [
                None if value is None else {token: value}
                for token, value in zip(tokens, found["token_logprobs"], strict=True)
            ]
        return {**found, "tokens": tokens, "top_logprobs": tops}


class ChatResponses:
    """Builds the response to one request to ``/v1/chat/completions``.

    Args:
        asked: The request.
        answer: Builds the response without vLLM's own fields.
        texts: Texts of tokens.
        eos_token_ids: The model's EOS ids.
    """

    def __init__(self, asked: ChatRequest, answer: ChatAnswer, texts: TokenTexts, eos_token_ids: Sequence[int]) -> None:
        self._asked = asked
        self._answer = answer
        self._texts = texts
        self._eos = eos_token_ids
        self._opened = False
        self._usages = RunningUsages(asked.continuous_usage)

    def whole(self, completions: Sequence[Completion]) -> types.ChatCompletion:
        """Return the whole response."""
        response = self._answer.whole(completions)
        choices = [
            self._choice(choice, completion)
            for choice, completion in zip(response["choices"], completions, strict=True)
        ]
        return {
            **response,
            **ABSENT,
            "choices": choices,
            "usage": usage_of(completions),
            "prompt_token_ids": response["prompt_token_ids"] if self._asked.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(completions[0], self._texts),
            "prompt_text": None,
        }

    def _choice(self, choice: openai.ChatChoice, completion: Completion) -> types.ChatChoice:
        said = choice["message"]
        message: types.ChatAnswerMessage = {
            "role": said["role"],
            "content": said["content"],
            "refusal": said["refusal"],
            "tool_calls": said.get("tool_calls", []),
            "reasoning": None,
        }
        self._write_ids(choice["logprobs"], completion.token_ids, completion.top_logprobs)
        return {
            **choice,
            "message": message,
            "stop_reason": stop_reason(completion, self._eos),
            "token_ids": choice["token_ids"] if self._asked.return_token_ids else None,
            "routed_experts": None,
        }

    def chunks(self, chunk: CompletionChunk) -> Iterator[types.ChatChunk]:
        """Yield the chunks of a stream; the first one carries the prompt's ids, where they are asked for."""
        for made in self._answer.chunks(chunk):
            (choice,) = made["choices"]
            tells_prompt = self._asked.return_token_ids and not self._opened
            self._opened = True
            piece: types.ChatChunk = {
                "id": made["id"],
                "object": made["object"],
                "created": made["created"],
                "model": made["model"],
                "choices": [self._chunk_choice(choice, chunk)],
                "prompt_token_ids": list(chunk.prompt_token_ids) if tells_prompt else None,
                "prompt_text": None,
                "system_fingerprint": None,
            }
            if "usage" in made:
                piece["usage"] = self._usages.after(choice["index"], choice["token_ids"], chunk.prompt_token_ids)
            yield piece

    def _chunk_choice(self, choice: openai.ChatChunkChoice, chunk: CompletionChunk) -> types.ChatChunkChoice:
        written: types.ChatChunkChoice = {
            "index": choice["index"],
            "delta": choice["delta"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": None,
            "token_ids": choice["token_ids"] if self._asked.return_token_ids else None,
        }
        if choice["finish_reason"] is None or chunk.completion is None:
            self._write_ids(choice["logprobs"], chunk.token_ids, chunk.top_logprobs)
            return written
        return {**written, **ending(chunk.completion), "stop_reason": stop_reason(chunk.completion, self._eos)}

    def usage_chunk(self) -> types.ChatUsageChunk:
        """Return the final chunk, which has the usage and no choices."""
        made = self._answer.usage_chunk()
        counts = made.get("usage")
        assert counts is not None
        return {
            "id": made["id"],
            "object": made["object"],
            "created": made["created"],
            "model": made["model"],
            "choices": [],
            "usage": with_details(counts),
        }

    def _write_ids(
        self, logprobs: openai.ChatLogprobs | None, token_ids: Sequence[int], top: Sequence[TopLogprobs] | None
    ) -> None:
        if logprobs is None or not self._asked.return_tokens_as_token_ids:
            return
        for entry, token_id, others in zip(logprobs["content"], token_ids, top or [[]] * len(token_ids), strict=True):
            entry["token"] = f"token_id:{token_id}"
            for written, (other, _) in zip(entry["top_logprobs"], others, strict=True):
                written["token"] = f"token_id:{other}"
