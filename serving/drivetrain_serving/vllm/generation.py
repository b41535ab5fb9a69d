"""Routes that generate: ``/v1/completions``, ``/v1/chat/completions`` and ``/inference/v1/generate``."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import Response

from drivetrain.errors import DrivetrainError
from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.completion_answer import CompletionAnswer
from drivetrain.openai.engine_calls import Call, chat_call, completion_call
from drivetrain.openai.payloads import Payload
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.types.outputs import Completion, CompletionChunk
from drivetrain_serving.http_layer.answers import event_stream, json_answer
from drivetrain_serving.http_layer.bodies import read_json, unless_disconnected
from drivetrain_serving.http_layer.route_docs import JSON, OF_ENGINES, STREAM, documented
from drivetrain_serving.routed_experts import PackedExperts
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.chat_and_completion_answers import ChatResponses, CompletionResponses
from drivetrain_serving.vllm.errors import body_of
from drivetrain_serving.vllm.generate_answers import GenerateResponses
from drivetrain_serving.vllm.payloads import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    read_chat,
    read_completion,
    read_generate,
)
from drivetrain_serving.vllm.prompt_scores import PromptScores
from drivetrain_serving.vllm.skyrl_generate import SideChannels, SkyrlGenerateRequest

STATUSES: Final = (404, 409, *OF_ENGINES)
"""Statuses of requests to generate that are refused or fail: 409 is of a weight version that is gone."""
WHOLE_OR_STREAM: Final = (JSON, STREAM)


class Responses(Protocol):
    """Builds the response to one request, whole or in chunks."""

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, object]:
        """Return the whole response."""
        ...

    def chunks(self, chunk: CompletionChunk) -> Iterable[Mapping[str, object]]:
        """Yield the chunks of a stream."""
        ...

    def usage_chunk(self) -> Mapping[str, object]:
        """Return the final chunk of a stream, which has the usage and no choices."""
        ...


class GenerationRoutes:
    """Routes that generate with the served engine.

    Args:
        served: The engine.
        error_body: Makes the last event of a stream of OpenAI's routes that failed.
        translated: Puts the requests of OpenAI's routes into vLLM's words.
        header_ids: True if the header ``X-Request-Id`` gives a request its id, as in vLLM.
    """

    def __init__(
        self,
        served: ServedEngine,
        error_body: Callable[[DrivetrainError], Mapping[str, object]] = body_of,
        translated: Callable[[Mapping[str, object], ServedEngine], Mapping[str, object]] = lambda body, served: body,
        *,
        header_ids: bool = True,
    ) -> None:
        self._served = served
        self._header_ids = header_ids
        self._error_body = error_body
        self._translated = translated
        self._texts = TokenTexts(served.engine.tokenizer)
        self._experts = PackedExperts(served.engine.config)

    @documented(
        body=CompletionRequest,
        statuses=STATUSES,
        media=WHOLE_OR_STREAM,
        answer=types.TextCompletion,
        event=types.CompletionChunk | types.CompletionUsageChunk,
    )
    async def completions(self, request: Request) -> Response:
        """Answer POST ``/v1/completions``."""
        return await self._answered(request, self._completions)

    @documented(
        body=ChatRequest,
        statuses=STATUSES,
        media=WHOLE_OR_STREAM,
        answer=types.ChatCompletion,
        event=types.ChatChunk | types.ChatUsageChunk,
    )
    async def chat_completions(self, request: Request) -> Response:
        """Answer POST ``/v1/chat/completions``."""
        return await self._answered(request, self._chat_completions)

    @documented(
        body=GenerateRequest,
        statuses=STATUSES,
        media=WHOLE_OR_STREAM,
        answer=types.GenerateAnswer,
        event=types.GenerateChunk,
    )
    async def generate(self, request: Request) -> Response:
        """Answer POST ``/inference/v1/generate``."""
        return await self._answered(request, self._generate)

    @documented(body=SkyrlGenerateRequest, statuses=STATUSES, answer=types.SkyrlGenerateAnswer)
    async def skyrl_generate(self, request: Request) -> Response:
        """Answer POST ``/skyrl/v1/generate``."""
        return await self._answered(request, self._skyrl_generate)

    async def _answered(
        self, request: Request, answer: Callable[[Mapping[str, object]], Coroutine[object, object, Response]]
    ) -> Response:
        body = await read_json(request, self._served.config, wants_type=True, header_ids=self._header_ids)
        return await unless_disconnected(request.receive, answer(body))

    async def _completions(self, body: Mapping[str, object]) -> Response:
        body = self._translated(body, self._served)
        asked = read_completion(body, stream=body.get("stream") is True)
        call = await self._routed(completion_call(asked), asked)
        answer_id = f"cmpl-{asked.request_id}"
        # As in vLLM, the prompt's ids take the place of its text.
        echoes_text = not asked.return_token_ids
        tokenizer = self._served.engine.tokenizer
        answer = CompletionAnswer(asked, answer_id, self._name(asked), tokenizer, echoes_text=echoes_text)
        responses = CompletionResponses(asked, answer, self._texts, self._served.engine.model_info.eos_token_ids)
        return await self._response(call, responses, asked, answer_id)

    async def _chat_completions(self, body: Mapping[str, object]) -> Response:
        body = self._translated(body, self._served)
        engine = self._served.engine
        asked = read_chat(body, engine.tokenizer.chat_template(()) or "", stream=body.get("stream") is True)
        call = await self._routed(chat_call(asked), asked)
        parser = engine.config.tool_call_parser
        answer_id = f"chatcmpl-{asked.request_id}"
        answer = ChatAnswer(asked, answer_id, self._name(asked), engine.tokenizer, parser)
        responses = ChatResponses(asked, answer, self._texts, engine.model_info.eos_token_ids)
        return await self._response(call, responses, asked, answer_id)

    async def _generate(self, body: Mapping[str, object]) -> Response:
        asked, call = read_generate(body)
        params = self._served.with_logprobs(call.params, call.params.get("prompt_logprobs"))
        call = dataclasses.replace(call, params=params, lora=await self._served.adapter_of(asked.model))
        responses = GenerateResponses(asked, self._served, self._texts)
        answer_id = f"generate-tokens-{asked.request_id}"
        wanted = PromptScores.asked_for(asked, self._served.engine.model_info.vocab_size)
        if asked.stream:
            return await self._streamed(call, responses, answer_id, asked.include_usage, body_of)
        if wanted is None:
            return json_answer(responses.whole(await self._completed(call, answer_id)))
        with self._served.known_as(answer_id, call) as call:
            completions = await self._scored(call, asked, wanted)
        scores = completions[0].scores  # None if the request was aborted before its prompt was read
        encoded = None if scores is None else wanted.encoded(scores)
        return json_answer({**responses.whole(completions), "prompt_token_id_logprobs": encoded})

    async def _skyrl_generate(self, body: Mapping[str, object]) -> Response:
        channels = SideChannels(body, self._served, self._experts)
        asked, call = read_generate(channels.body)
        params = channels.params(self._served.with_logprobs(call.params))
        call = dataclasses.replace(call, params=params, lora=await self._served.adapter_of(asked.model))
        return json_answer(channels.answer(await self._completed(call, f"generate-tokens-{asked.request_id}")))

    # Parts of the answers ----------------------------------------------------------------------------------------

    def _name(self, asked: Payload) -> str:
        return asked.model or self._served.name

    async def _routed(self, call: Call, asked: CompletionRequest | ChatRequest) -> Call:
        params = self._served.with_logprobs(call.params, asked.prompt_logprobs)
        lora = await self._served.adapter_of(asked.model)
        return dataclasses.replace(call, params=params, lora=lora or call.lora)

    async def _response(
        self, call: Call, responses: Responses, asked: CompletionRequest | ChatRequest, answer_id: str
    ) -> Response:
        if asked.stream:
            return await self._streamed(call, responses, answer_id, asked.include_usage, self._error_body)
        return json_answer(responses.whole(await self._completed(call, answer_id)))

    async def _completed(self, call: Call, answer_id: str) -> list[Completion]:
        with call.refusals(), self._served.known_as(answer_id, call) as call:
            output = await self._served.generate(call)
        return output.completions

    async def _scored(self, call: Call, asked: GenerateRequest, wanted: PromptScores) -> list[Completion]:
        """Generate, and score the prompt in the same request of the engine; the first completion holds the scores."""
        with call.refusals():
            output = await self._served.score_and_generate(asked.token_ids, wanted.at, call)
        return output.completions

    # Streams -----------------------------------------------------------------------------------------------------

    async def _streamed(
        self,
        call: Call,
        responses: Responses,
        answer_id: str,
        include_usage: bool,
        error_body: Callable[[DrivetrainError], Mapping[str, object]],
    ) -> Response:
        return await event_stream(self._pieces(call, responses, answer_id, include_usage), error_body)

    async def _pieces(
        self,
        call: Call,
        responses: Responses,
        answer_id: str,
        include_usage: bool,
    ) -> AsyncGenerator[Mapping[str, object], None]:
        with call.refusals(), self._served.known_as(answer_id, call) as call:
            async with aclosing(self._served.generate_stream(call)) as chunks:
                async for chunk in chunks:
                    for piece in responses.chunks(chunk):
                        yield piece
        if include_usage:
            yield responses.usage_chunk()
