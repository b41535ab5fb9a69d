"""Routes that turn answers of ``/inference/v1/generate`` to those of OpenAI's routes: text, tool calls and logprobs.

They hold nothing between requests: the client of a stream carries its state from chunk to chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from drivetrain.backend.base import ModelInfo
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import check_prompt_ids, check_prompt_length
from drivetrain.errors import InvalidRequest
from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.completion_answer import CompletionAnswer
from drivetrain.openai.responses import ToolCallDelta
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.text.tokenizer import IncrementalDecoder
from drivetrain.types.outputs import Completion, CompletionChunk, FinishReason
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_json, unless_disconnected
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.chat_and_completion_answers import ChatResponses, CompletionResponses
from drivetrain_serving.vllm.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GivenAnswer,
    GivenChoice,
    GivenState,
    read_derender,
)
from drivetrain_serving.vllm.json_objects import with_details
from drivetrain_serving.vllm.payloads import ChatRequest, CompletionRequest, read_chat, read_completion

_KEPT: Final = 64
"""Number of ids of a text without calls that the state keeps: enough to decode the next ones."""
_NOT_OF_ANSWERS: Final = ("stream_options", "prompt_logprobs", "echo", "request_id")
"""Fields of the rendered request that change no answer here."""
_C = TypeVar("_C", types.ChatChunk, types.CompletionChunk)


class DerenderRoutes:
    """Routes that decode and do not generate.

    Args:
        served: The engine.
    """

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
        self._tokenizer = served.engine.tokenizer
        self._texts = TokenTexts(served.engine.tokenizer)
        self._eos = served.engine.model_info.eos_token_ids

    @documented(body=DerenderChatRequest, statuses=(404,), answer=types.ChatCompletion | types.DerenderedChatChunk)
    async def chat_completions(self, request: Request) -> Response:
        """Answer POST ``/v1/chat/completions/derender``."""
        body = await read_json(request, self._served.config, wants_type=True)
        return await unless_disconnected(request.receive, self._chat(read_derender(DerenderChatRequest, body)))

    @documented(
        body=DerenderCompletionRequest, statuses=(404,), answer=types.TextCompletion | types.DerenderedCompletionChunk
    )
    async def completions(self, request: Request) -> Response:
        """Answer POST ``/v1/completions/derender``."""
        body = await read_json(request, self._served.config, wants_type=True)
        asked = read_derender(DerenderCompletionRequest, body)
        return await unless_disconnected(request.receive, self._completions(asked))

    # Chats -------------------------------------------------------------------------------------------------------

    async def _chat(self, body: DerenderChatRequest) -> Response:
        await self._served.adapter_of(body.model)
        given = _required(body.generate_chunk if body.stream else body.generate_response, stream=body.stream)
        chat = _plain(body.chat_request) or {"messages": [{"role": "user", "content": ""}]}
        asked = read_chat(chat, self._tokenizer.chat_template(()) or "", stream=False)
        prompt = list(body.prompt_token_ids or given.prompt_token_ids or ())
        name = body.model or self._served.name
        answer = ChatAnswer(asked, given.request_id, name, self._tokenizer, self._served.engine.config.tool_call_parser)
        responses = ChatResponses(asked, answer, self._texts, self._eos)
        if body.stream:
            part = _Part(given, prompt, body.stream_state or GivenState(), asked, keeps_all=asked.shows_tools)
            pieces, state = await in_prompt_thread(lambda: self._next(part, responses.chunks))
            state["role_sent"] = part.state.role_sent or bool(given.choices)
            chunk = _chat_chunk(part, name, pieces, body.prompt_tokens)
            return json_answer(types.DerenderedChatChunk(chunk=chunk, stream_state=state))
        completions = [self._completion(choice, prompt, asked, given) for choice in _some(given)]
        made = await in_prompt_thread(lambda: responses.whole(completions))
        made["usage"] = _usage(body.prompt_tokens or 0, completions)
        made["prompt_logprobs"] = given.prompt_logprobs  # type: ignore[typeddict-item]  # as the client has it
        made["prompt_token_ids"] = None
        return json_answer(made)

    # Completions -------------------------------------------------------------------------------------------------

    async def _completions(self, body: DerenderCompletionRequest) -> Response:
        await self._served.adapter_of(body.model)
        asked = read_completion({**(_plain(body.completion_request) or {}), "prompt": [0], "n": 1}, stream=False)
        name = body.model or self._served.name
        if body.stream:
            given = _required(body.generate_chunk, stream=True)
            prompt = _ids_of_one(body.prompt_token_ids) or list(given.prompt_token_ids or ())
            responses = self._completion_responses(asked, given, name)
            part = _Part(given, prompt, body.stream_state or GivenState(), asked, keeps_all=False)
            pieces, state = await in_prompt_thread(lambda: self._next(part, responses.chunks))
            count = body.prompt_tokens if isinstance(body.prompt_tokens, int) else None
            chunk = _completion_chunk(part, name, pieces, count)
            return json_answer(types.DerenderedCompletionChunk(chunk=chunk, stream_state=state))
        answers = body.generate_responses
        if not answers:
            raise InvalidRequest("generate_responses must not be empty", field="generate_responses")
        counts = _one_each(body.prompt_tokens, len(answers), "prompt_tokens")
        prompts = _one_each(body.prompt_token_ids, len(answers), "prompt_token_ids")
        completions = [
            self._completion(choice, _ids_of_one(ids) or list(given.prompt_token_ids or ()), asked, given)
            for given, ids in zip(answers, prompts, strict=True)
            for choice in _some(given)
        ]
        completions = [replace(one, prompt_index=index, sample_index=0) for index, one in enumerate(completions)]
        responses = self._completion_responses(asked, answers[0], name)
        made = await in_prompt_thread(lambda: responses.whole(completions))
        for choice in made["choices"]:
            choice |= {"token_ids": None, "prompt_token_ids": None}
        made["usage"] = _usage(sum(count for count in counts if isinstance(count, int)), completions)
        return json_answer(made)

    def _completion_responses(self, asked: CompletionRequest, given: GivenAnswer, name: str) -> CompletionResponses:
        answer = CompletionAnswer(asked, given.request_id, name, self._tokenizer)
        return CompletionResponses(asked, answer, self._texts, self._eos)

    # Tokens ------------------------------------------------------------------------------------------------------

    def _completion(
        self,
        choice: GivenChoice,
        prompt: list[int],
        asked: ChatRequest | CompletionRequest,
        given: GivenAnswer,
    ) -> Completion:
        """Return a choice as the engine's completion, whose text is decoded from its ids."""
        model, ids = self._served.engine.model_info, list(choice.token_ids or ())
        if not ids:
            raise InvalidRequest(
                f"choice {choice.index} in response {given.request_id} has empty or null token_ids", field="token_ids"
            )
        check_prompt_ids(ids, "token_ids", model)
        if prompt:
            check_prompt_ids(prompt, "prompt_token_ids", model)
        logprobs, top = _logprobs(choice, model)
        stop = self._stop(choice, ids)
        spoken = ids[:-1] if isinstance(stop, int) else ids
        return Completion(
            request_id=given.request_id,
            prompt_index=0,
            sample_index=choice.index,
            prompt_token_ids=prompt,
            token_ids=ids,
            text=self._tokenizer(spoken, skip_special_tokens=asked.skip_special_tokens is not False),
            finish_reason=FinishReason[(choice.finish_reason or "stop").upper()],
            matched_stop=stop,
            logprobs=logprobs,
            top_logprobs=top,
        )

    def _stop(self, choice: GivenChoice, ids: Sequence[int]) -> int | str | None:
        """Return what ended a choice; of EOS, ``/inference/v1/generate`` tells no reason."""
        if choice.finish_reason != "stop":
            return None
        if choice.stop_reason is None:
            return ids[-1] if ids and ids[-1] in self._eos else None
        return choice.stop_reason

    # Streams -----------------------------------------------------------------------------------------------------

    def _next(
        self, part: _Part, chunks: Callable[[CompletionChunk], Iterable[_C]]
    ) -> tuple[list[_C], types.DerenderState]:
        """Return the pieces of the next chunk, and the state after it. Call it in a thread.

        The earlier ids are decoded and read again, because neither a decoder nor a reader of calls can be sent.
        """
        model = self._served.engine.model_info
        state: GivenState = part.state
        if not part.given.choices:
            return [], _state(state, state.output_token_ids, state.output_chunk_lens, "")
        choice, *others = part.given.choices
        if others:
            raise InvalidRequest(
                f"at most one choice per chunk is derendered (got {len(part.given.choices)}); keep a state for each",
                field="generate_chunk.choices",
            )
        before: list[int] = list(state.output_token_ids)
        new: list[int] = list(choice.token_ids or ())
        if sum(state.output_chunk_lens) != len(before) or any(length < 1 for length in state.output_chunk_lens):
            raise InvalidRequest(
                "output_chunk_lens must be positive and sum to the number of output_token_ids", field="stream_state"
            )
        if before or new:
            check_prompt_ids(before + new, "token_ids", model)
        if part.prompt:
            check_prompt_ids(part.prompt, "prompt_token_ids", model)
        length = len(part.prompt) + len(before) + len(new)
        check_prompt_length(length, "the prompt with its tokens", model.context_length)
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=part.asked.skip_special_tokens is not False)
        at = 0
        for length in state.output_chunk_lens:
            ids = before[at : at + length]
            at += length
            list(chunks(_chunk(part, choice.index, ids, "".join(map(decoder.push, ids)))))
        stop = self._stop(choice, new)
        spoken = new[:-1] if isinstance(stop, int) else new
        text = "".join(map(decoder.push, spoken))
        logprobs, top = _logprobs(choice, model)
        chunk = _chunk(part, choice.index, new, text, logprobs, top)
        if choice.finish_reason is not None:
            text += decoder.finish()
            completion = Completion(
                request_id=part.given.request_id,
                prompt_index=0,
                sample_index=choice.index,
                prompt_token_ids=part.prompt,
                token_ids=before + new,
                text=decoder.text,
                finish_reason=FinishReason[choice.finish_reason.upper()],
                matched_stop=stop,
            )
            chunk = replace(chunk, text=text, completion=completion)
        pieces = list(chunks(chunk))
        kept, lengths = before + new, [*state.output_chunk_lens, *([len(new)] if new else [])]
        if not part.keeps_all:
            kept = kept[-_KEPT:]
            lengths = [len(kept)] if kept else []
        return pieces, _state(state, kept, lengths, text)


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk of a stream, and what comes with it."""

    given: GivenAnswer
    prompt: list[int]
    state: GivenState
    asked: ChatRequest | CompletionRequest
    keeps_all: bool
    """True if calls may be among the ids, which are read from the beginning."""


def _plain(rendered: Mapping[str, object] | None) -> dict[str, object] | None:
    """Return the fields of a rendered request that its answer depends on."""
    if rendered is None:
        return None
    return {name: one for name, one in rendered.items() if name not in _NOT_OF_ANSWERS} | {"stream": False}


def _required(given: GivenAnswer | None, *, stream: bool) -> GivenAnswer:
    if given is None:
        name = "generate_chunk" if stream else "generate_response"
        raise InvalidRequest(f"{name} is missing, which stream={stream} wants", field=name)
    return given


def _some(given: GivenAnswer) -> tuple[GivenChoice, ...]:
    if not given.choices:
        raise InvalidRequest(f"response {given.request_id} has no choices", field="choices")
    return given.choices


def _one_each(given: object, count: int, field: str) -> Sequence[object]:
    """Return an entry for each answer; None for each if they are not given."""
    if given is None:
        return [None] * count
    if not isinstance(given, tuple) or len(given) != count:
        found = f"length ({len(given)})" if isinstance(given, tuple) else f"{shown(given)}"
        raise InvalidRequest(f"{field} {found} must equal generate_responses length ({count})", field=field)
    return given


def _ids_of_one(given: object) -> list[int]:
    """Return the ids of one prompt; none if they are not given."""
    if given is None:
        return []
    if not isinstance(given, tuple) or not all(isinstance(one, int) for one in given):
        raise InvalidRequest(
            f"prompt_token_ids={shown(given)}: expected the ids of one prompt with stream, else a list for each "
            "response",
            field="prompt_token_ids",
        )
    return list(given)


def _logprobs(choice: GivenChoice, model: ModelInfo) -> tuple[list[float] | None, list[list[tuple[int, float]]] | None]:
    if choice.logprobs is None or choice.logprobs.content is None:
        return None, None
    content, ids = choice.logprobs.content, choice.token_ids or ()
    if [one.token_id for one in content] != list(ids):
        raise InvalidRequest(
            f"choice {choice.index}: logprobs.content has {len(content)} entries, which are not those of its "
            f"{len(ids)} token_ids",
            field="logprobs",
        )
    top = [[(other.token_id, float(other.logprob)) for other in one.top_logprobs or ()] for one in content]
    if likely := [token_id for tokens in top for token_id, _ in tokens]:
        check_prompt_ids([max(likely)], "top_logprobs", model)
    return [float(one.logprob) for one in content], top


def _chunk(
    part: _Part,
    index: int,
    ids: list[int],
    text: str,
    logprobs: list[float] | None = None,
    top: list[list[tuple[int, float]]] | None = None,
) -> CompletionChunk:
    return CompletionChunk(
        request_id=part.given.request_id,
        prompt_index=0,
        sample_index=index,
        token_ids=ids,
        text=text,
        logprobs=logprobs,
        top_logprobs=top,
        prompt_token_ids=part.prompt,
    )


def _state(before: GivenState, ids: Sequence[int], lengths: Sequence[int], text: str) -> types.DerenderState:
    return {
        "prev_tokens": [],
        "prefix_offset": 0,
        "read_offset": 0,
        "role_sent": before.role_sent,
        "logprob_context_token_ids": [],
        "logprob_text_offset": before.logprob_text_offset + len(text),
        "output_token_ids": list(ids),
        "output_chunk_lens": list(lengths),
        "tools_streamed": False,
        "last_tool_call_ids": [],
    }


def _usage(prompt_tokens: int, completions: Sequence[Completion]) -> types.DetailedUsage:
    sampled = sum(len(one.token_ids) for one in completions)
    return with_details(
        {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    )


def _counts(prompt_tokens: int, sampled: int) -> types.RunningUsage:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _usage_of_chunk(given: GivenAnswer, prompt_tokens: int | None) -> types.RunningUsage | None:
    if given.usage is None:
        return None
    prompt = given.usage.prompt_tokens or 0 if prompt_tokens is None else prompt_tokens
    return _counts(prompt, given.usage.completion_tokens or 0)


def _chat_chunk(
    part: _Part, name: str, pieces: Sequence[types.ChatChunk], prompt_tokens: int | None
) -> types.DerenderedChat:
    """Put the pieces of a chunk into one, as vLLM sends it."""
    made = [choice for piece in pieces for choice in piece["choices"]]
    choices: list[types.DerenderedChatChoice] = []
    for given in part.given.choices:
        calls: list[ToolCallDelta] = [call for one in made for call in one["delta"].get("tool_calls", [])]
        delta: types.DerenderedDelta = {
            "role": None if part.state.role_sent else "assistant",
            "content": "".join(one["delta"].get("content") or "" for one in made) or None,
            "reasoning": None,
        }
        if calls:
            delta["tool_calls"] = calls
        choices.append(
            {
                "index": given.index,
                "delta": delta,
                "logprobs": next((one["logprobs"] for one in made if one["logprobs"] is not None), None),
                "finish_reason": made[-1]["finish_reason"] if made else None,
                "stop_reason": made[-1]["stop_reason"] if made else None,
                "token_ids": list(given.token_ids or ()) if part.asked.return_token_ids else None,
            }
        )
    return {
        "id": part.given.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": _usage_of_chunk(part.given, prompt_tokens),
        "system_fingerprint": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "metrics": None,
    }


def _completion_chunk(
    part: _Part, name: str, pieces: Sequence[types.CompletionChunk], prompt_tokens: int | None
) -> types.DerenderedCompletion:
    """Put the pieces of a chunk into one, as vLLM sends it."""
    made = [choice for piece in pieces for choice in piece["choices"]]
    choices: list[types.DerenderedCompletionChoice] = []
    for given in part.given.choices:
        logprobs = next((one["logprobs"] for one in made if one["logprobs"] is not None), None)
        if logprobs is not None:
            offsets = [offset + part.state.logprob_text_offset for offset in logprobs["text_offset"]]
            logprobs["text_offset"] = offsets
        choices.append(
            {
                "index": given.index,
                "text": "".join(one["text"] for one in made),
                "logprobs": logprobs,
                "finish_reason": made[-1]["finish_reason"] if made else None,
                "stop_reason": made[-1]["stop_reason"] if made else None,
                "token_ids": None,
                "prompt_token_ids": None,
            }
        )
    return {
        "id": part.given.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": _usage_of_chunk(part.given, prompt_tokens),
        "system_fingerprint": None,
        "metrics": None,
    }
