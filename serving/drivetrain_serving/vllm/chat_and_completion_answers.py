"""Responses to completions and chat completions as vLLM writes them: core's, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.choices import json_logprob
from drivetrain.openai.completion_answer import CompletionAnswer
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, CompletionChunk, TopLogprobs
from drivetrain_serving.vllm.json_objects import ABSENT, Json, prompt_logprobs, stop_reason, usage_of, with_details
from drivetrain_serving.vllm.payloads import ChatRequest, CompletionRequest

_Asked = TypeVar("_Asked", bound=CompletionRequest | ChatRequest)
_Answer = TypeVar("_Answer", bound=CompletionAnswer | ChatAnswer)


class _Responses(Generic[_Asked, _Answer]):
    """The response to one request.

    Args:
        asked: The request.
        answer: Builds the response without vLLM's own fields.
        texts: Texts of tokens.
        eos_token_ids: The model's EOS ids.
    """

    def __init__(self, asked: _Asked, answer: _Answer, texts: TokenTexts, eos_token_ids: Sequence[int]) -> None:
        self._asked = asked
        self._answer = answer
        self._texts = texts
        self._eos = eos_token_ids
        self._opened: set[int] = set()

    def usage_chunk(self) -> Json:
        """Return the final chunk, which has the usage and no choices."""
        chunk: Json = dict(self._answer.usage_chunk())
        return chunk | {"usage": with_details(chunk["usage"])}


class CompletionResponses(_Responses[CompletionRequest, CompletionAnswer]):
    """Builds the response to one request to ``/v1/completions``."""

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the whole response."""
        response: Json = dict(self._answer.whole(completions))
        for choice, completion in zip(response["choices"], completions, strict=True):
            self._finish(choice, completion)
            choice["routed_experts"] = None
            choice["prompt_logprobs"] = prompt_logprobs(completion, self._texts)
            self._write_logprobs(choice, completion.token_ids, completion.logprobs, completion.top_logprobs)
        return response | dict.fromkeys(ABSENT) | {"usage": usage_of(completions)}

    def chunks(self, chunk: CompletionChunk, prompt_token_ids: Sequence[int] | None) -> Iterator[Json]:
        """Yield the chunks of a stream; a choice's first one carries the prompt's ids, where they are asked for."""
        for made in self._answer.chunks(chunk):
            piece: Json = dict(made)
            (choice,) = piece["choices"]
            last = choice["finish_reason"] is not None
            if last and chunk.completion is not None:
                self._finish(choice, chunk.completion)
            else:
                choice["stop_reason"] = None
                self._write_logprobs(choice, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            choice["prompt_token_ids"] = None
            piece["system_fingerprint"] = None
            if not self._asked.return_token_ids:
                choice["token_ids"] = None
            elif choice["index"] not in self._opened:
                choice["prompt_token_ids"] = prompt_token_ids
            self._opened.add(choice["index"])
            yield piece

    def _finish(self, choice: Json, completion: Completion) -> None:
        choice["stop_reason"] = stop_reason(completion, self._eos)
        if not self._asked.return_token_ids:
            choice["token_ids"] = choice["prompt_token_ids"] = None

    def _write_logprobs(
        self,
        choice: Json,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        top: Sequence[TopLogprobs] | None,
    ) -> None:
        """Write logprobs as vLLM does: one-entry dictionaries where none but the sampled token's is asked for."""
        found = choice["logprobs"]
        if found is None or logprobs is None:
            return
        skipped = len(found["tokens"]) - len(token_ids)  # the prompt's, with echo
        if found["top_logprobs"] is None:
            found["top_logprobs"] = [
                None if value is None else {token: value}
                for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)
            ]
        if self._asked.return_tokens_as_token_ids:
            found["tokens"][skipped:] = [f"token_id:{token_id}" for token_id in token_ids]
            found["top_logprobs"][skipped:] = [
                {f"token_id:{other}": json_logprob(value) for other, value in dict([(token_id, own), *others]).items()}
                for token_id, own, others in zip(token_ids, logprobs, top or [[]] * len(token_ids), strict=True)
            ]


class ChatResponses(_Responses[ChatRequest, ChatAnswer]):
    """Builds the response to one request to ``/v1/chat/completions``."""

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the whole response."""
        response: Json = dict(self._answer.whole(completions))
        for choice, completion in zip(response["choices"], completions, strict=True):
            choice["stop_reason"] = stop_reason(completion, self._eos)
            choice["message"].setdefault("tool_calls", [])
            choice["message"]["reasoning"] = None
            choice["routed_experts"] = None
            if not self._asked.return_token_ids:
                choice["token_ids"] = None
            self._write_ids(choice, completion.token_ids, completion.top_logprobs)
        if not self._asked.return_token_ids:
            response["prompt_token_ids"] = None
        response["prompt_logprobs"] = prompt_logprobs(completions[0], self._texts)
        response["prompt_text"] = None
        return response | dict.fromkeys(ABSENT) | {"usage": usage_of(completions)}

    def chunks(self, chunk: CompletionChunk, prompt_token_ids: Sequence[int] | None) -> Iterator[Json]:
        """Yield the chunks of a stream; the first one carries the prompt's ids, where they are asked for."""
        for made in self._answer.chunks(chunk):
            piece: Json = dict(made)
            (choice,) = piece["choices"]
            choice.pop("prompt_token_ids", None)
            piece |= {"prompt_token_ids": None, "prompt_text": None, "system_fingerprint": None}
            choice["stop_reason"] = None
            if choice["finish_reason"] is not None and chunk.completion is not None:
                choice["stop_reason"] = stop_reason(chunk.completion, self._eos)
            elif choice["logprobs"] is not None:
                self._write_ids(choice, chunk.token_ids, chunk.top_logprobs)
            if not self._asked.return_token_ids:
                choice["token_ids"] = None
            elif not self._opened:
                piece["prompt_token_ids"] = prompt_token_ids
            self._opened.add(choice["index"])
            yield piece

    def _write_ids(self, choice: Json, token_ids: Sequence[int], top: Sequence[TopLogprobs] | None) -> None:
        if choice["logprobs"] is None or not self._asked.return_tokens_as_token_ids:
            return
        for entry, token_id, others in zip(
            choice["logprobs"]["content"], token_ids, top or [[]] * len(token_ids), strict=True
        ):
            entry["token"] = f"token_id:{token_id}"
            for written, (other, _) in zip(entry["top_logprobs"], others, strict=True):
                written["token"] = f"token_id:{other}"
