"""Routes of sessions: for agents, and for the trainer that reads the records."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.engine_calls import Call, chat_call
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.types.prompts import ChatPrompt, TokenPrompt
from drivetrain_serving.gateway import answer_types as types
from drivetrain_serving.gateway import anthropic, openai_responses
from drivetrain_serving.gateway.capture import Asked, Capture
from drivetrain_serving.gateway.errors import error_answer
from drivetrain_serving.gateway.recorded_extras import split_extras
from drivetrain_serving.gateway.request_fields import MessagesRequest, ResponsesRequest, SessionChatRequest
from drivetrain_serving.gateway.session_turns import Session
from drivetrain_serving.gateway.sessions import Sessions
from drivetrain_serving.gateway.trajectory import trajectory_of
from drivetrain_serving.gateway.turn_prompts import prepare
from drivetrain_serving.http_layer.accepted_types import prefers
from drivetrain_serving.http_layer.answers import NamedEventStream, event_stream, json_answer
from drivetrain_serving.http_layer.bodies import identify_by_header, read_json, unless_disconnected
from drivetrain_serving.http_layer.route_docs import JSON, OF_ENGINES, STREAM, documented
from drivetrain_serving.other_processes import SessionFacts
from drivetrain_serving.served_engine import ServedEngine, with_own_id
from drivetrain_serving.vllm.answer_types import ChatChunk, ChatCompletion, ChatUsageChunk
from drivetrain_serving.vllm.chat_and_completion_answers import ChatResponses
from drivetrain_serving.vllm.errors import ErrorBody, body_of
from drivetrain_serving.vllm.json_objects import Json
from drivetrain_serving.vllm.payloads import ChatRequest, read_chat

_Piece = ChatChunk | ChatUsageChunk
Answer = Callable[[Request], Awaitable[Response]]

AGENT_PATHS: Final = re.compile(r"/sessions/[^/]+/v1/.*")
"""Paths that the API key opens; the other paths of sessions need the control key."""
_STATUSES: Final = (404, 409, *OF_ENGINES)
_MSGPACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


class SessionRoutes:
    """Routes under ``/sessions``.

    Args:
        served: The engine.
        translated: Puts requests into vLLM's words.
        header_ids: True if the header ``X-Request-Id`` gives a request its id, as in vLLM.
    """

    def __init__(
        self,
        served: ServedEngine,
        translated: Callable[[Mapping[str, object], ServedEngine], Mapping[str, object]] = lambda body, served: body,
        *,
        header_ids: bool = True,
    ) -> None:
        self._served = served
        self._header_ids = header_ids
        self._translated = translated
        self._sessions = Sessions(served.config.sessions)
        self._capture = Capture(served, self._sessions)
        self._texts = TokenTexts(served.engine.tokenizer)

    def routes(self, models: Answer) -> list[Route]:
        """Return the routes.

        Args:
            models: Answers ``/v1/models``, which some agents ask first.
        """
        return [
            Route("/sessions", self.sessions, methods=["GET"]),
            Route("/sessions/{session}", self.delete, methods=["DELETE"]),
            Route("/sessions/{session}/trajectory", self.trajectory, methods=["GET"]),
            Route("/sessions/{session}/v1/models", models, methods=["GET"]),
            Route("/sessions/{session}/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/sessions/{session}/v1/responses", self.responses, methods=["POST"]),
            Route("/sessions/{session}/v1/messages", self.messages, methods=["POST"]),
            Route("/sessions/{session}/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def close(self) -> None:
        """End running requests and delete the recorded sessions."""
        await self._capture.close()
        await self._sessions.close()

    # Agents ------------------------------------------------------------------------------------------------------

    @documented(
        body=SessionChatRequest,
        statuses=_STATUSES,
        media=(JSON, STREAM),
        answer=ChatCompletion,
        event=ChatChunk | ChatUsageChunk,
        errors=(ErrorBody,),
    )
    async def chat_completions(self, request: Request) -> Response:
        """Answer POST ``/sessions/{id}/v1/chat/completions``."""
        body = await read_json(request, self._served.config, wants_type=True)
        self._identify(body, request)
        try:
            return await unless_disconnected(request.receive, self._chat(request.path_params["session"], body))
        except DrivetrainError as error:
            return error_answer(error)

    async def _chat(self, session_id: str, body: Mapping[str, object]) -> Response:
        payload, asked, responses = await self._prepared(session_id, body)
        if not payload.stream:
            return json_answer(await self._capture.whole(asked, responses))
        pieces = self._pieces(payload, asked, responses)
        return await event_stream(pieces, body_of)

    @documented(
        body=MessagesRequest,
        statuses=_STATUSES,
        media=(JSON, STREAM),
        answer=types.AnthropicMessage,
        event=types.MessageEvent,
        errors=(types.AnthropicError,),
    )
    async def messages(self, request: Request) -> Response:
        """Answer POST ``/sessions/{id}/v1/messages``, in Anthropic's form."""
        return await self._answered_in_anthropics_form(request, self._message)

    @documented(body=MessagesRequest, statuses=_STATUSES, answer=types.TokenCount, errors=(types.AnthropicError,))
    async def count_tokens(self, request: Request) -> Response:
        """Answer POST ``/sessions/{id}/v1/messages/count_tokens``, in Anthropic's form."""
        return await self._answered_in_anthropics_form(request, self._count)

    async def _answered_in_anthropics_form(
        self, request: Request, answer: Callable[[str, Json], Coroutine[object, object, Response]]
    ) -> Response:
        try:
            body = await read_json(request, self._served.config, wants_type=True)
            chat = anthropic.to_chat(body, self._template)
            self._identify(chat, request)
            return await unless_disconnected(request.receive, answer(request.path_params["session"], chat))
        except DrivetrainError as error:
            return json_answer(*anthropic.error_of(error))
        except HTTPException as error:
            return json_answer(anthropic.http_error(error.status_code, error.detail), error.status_code)

    async def _message(self, session_id: str, chat: Json) -> Response:
        payload, asked, responses = await self._prepared(session_id, chat)
        if not payload.stream:
            return json_answer(anthropic.from_chat(await self._capture.whole(asked, responses)))
        events = anthropic.MessageEvents(asked.model, len(asked.prepared.token_ids))
        pieces = self._message_events(events, self._pieces(payload, asked, responses))
        return await event_stream(pieces, lambda error: anthropic.error_of(error)[0], NamedEventStream)

    async def _message_events(
        self, events: anthropic.MessageEvents, chunks: AsyncGenerator[_Piece, None]
    ) -> AsyncGenerator[types.MessageEvent, None]:
        async with aclosing(chunks):
            started = False
            async for chunk in chunks:
                if not started:
                    yield events.start()
                    started = True
                for event in events.events(chunk):
                    yield event

    async def _count(self, session_id: str, chat: Json) -> Response:
        chat = {name: value for name, value in chat.items() if name not in ("stream", "stream_options")}
        payload, call = await self._read(chat)
        asked = await self._asked(self._sessions.for_turns(session_id, 0), payload, call)
        return json_answer(types.TokenCount(input_tokens=len(asked.prepared.token_ids)))

    @documented(
        body=ResponsesRequest,
        statuses=_STATUSES,
        media=(JSON, STREAM),
        answer=types.OpenAIResponse,
        event=types.ResponsesEvent,
        errors=(ErrorBody,),
    )
    async def responses(self, request: Request) -> Response:
        """Answer POST ``/sessions/{id}/v1/responses``."""
        body = await read_json(request, self._served.config, wants_type=True)
        try:
            chat = openai_responses.to_chat(body)
            self._identify(chat, request)
            answer = self._response(request.path_params["session"], body, chat)
            return await unless_disconnected(request.receive, answer)
        except DrivetrainError as error:
            return error_answer(error)

    async def _response(self, session_id: str, body: Mapping[str, object], chat: Json) -> Response:
        payload, asked, responses = await self._prepared(session_id, chat)
        writer = openai_responses.ResponseWriter(body, asked.model)
        if not payload.stream:
            return json_answer(writer.whole(await self._capture.whole(asked, responses)))
        pieces = self._response_events(writer, self._pieces(payload, asked, responses))
        return await event_stream(pieces, writer.error, NamedEventStream)

    async def _response_events(
        self, writer: openai_responses.ResponseWriter, chunks: AsyncGenerator[_Piece, None]
    ) -> AsyncGenerator[types.ResponsesEvent, None]:
        async with aclosing(chunks):
            started = False
            async for chunk in chunks:
                for event in () if started else writer.start():
                    yield event
                started = True
                for event in writer.events(chunk):
                    yield event

    # Parts of the answers ----------------------------------------------------------------------------------------

    def _identify(self, body: dict[str, object], request: Request) -> None:
        if self._header_ids:
            identify_by_header(body, request)

    @property
    def _template(self) -> str:
        return self._served.engine.tokenizer.chat_template(()) or ""

    async def _prepared(self, session_id: str, body: Mapping[str, object]) -> tuple[ChatRequest, Asked, ChatResponses]:
        """Read a chat completion request, and find its place in the session."""
        engine = self._served.engine
        payload, call = await self._read(body)
        session = self._sessions.for_turns(session_id, payload.n or 1)
        self._sessions.begin(session, payload.n or 1)
        try:
            asked = await self._asked(session, payload, call)
        finally:
            self._sessions.end(session, payload.n or 1)
        asked = dataclasses.replace(asked, session=self._sessions.keep(session))
        answer = ChatAnswer(payload, asked.answer_id, asked.model, engine.tokenizer, engine.config.tool_call_parser)
        return payload, asked, ChatResponses(payload, answer, self._texts, engine.model_info.eos_token_ids)

    async def _pieces(
        self, payload: ChatRequest, asked: Asked, responses: ChatResponses
    ) -> AsyncGenerator[_Piece, None]:
        async with aclosing(self._capture.streamed(asked, responses)) as pieces:
            async for piece in pieces:
                yield piece
        if payload.include_usage:
            yield responses.usage_chunk()

    async def _read(self, body: Mapping[str, object]) -> tuple[ChatRequest, Call]:
        """Read a chat completion request, and translate it to a call of the engine."""
        extras, body = split_extras(body, self._served.config.sessions)
        body = self._translated(body, self._served)
        payload = read_chat(body, self._template, stream=body.get("stream") is True)
        call = chat_call(payload)
        lora = await self._served.adapter_of(payload.model) or call.lora
        return payload, dataclasses.replace(call, lora=lora, params={**call.params, **extras})

    async def _asked(self, session: Session, payload: ChatRequest, call: Call) -> Asked:
        """Return the request with the prompt's ids, which extend an earlier turn's where its messages do."""
        engine = self._served.engine
        (prompt,) = call.prompts
        assert isinstance(prompt, ChatPrompt)
        if prompt.media:
            raise InvalidRequest("messages hold images, videos or sounds; sessions record text only", field="messages")
        with call.refusals():
            keep = self._served.config.sessions.keep_answers
            length = engine.model_info.context_length
            prepared = await in_prompt_thread(
                lambda: prepare(engine.tokenizer, session, prompt, length, adapter=call.lora, keep_answers=keep)
            )
        params = self._served.with_logprobs({"logprobs": 0, **call.params}, payload.prompt_logprobs)
        ids = TokenPrompt.model_construct(token_ids=tuple(prepared.token_ids), media=())
        ready = dataclasses.replace(with_own_id(call), prompts=(ids,), params=params)
        name = call.lora or payload.model or self._served.name
        return Asked(session, prompt, prepared, ready, call.id, name, payload.logprobs, payload.n or 1)

    # The trainer -------------------------------------------------------------------------------------------------

    @documented(statuses=(), answer=types.SessionList)
    async def sessions(self, request: Request) -> Response:
        """Answer GET ``/sessions``."""
        del request
        return json_answer(types.SessionList(sessions=[*self.facts(), *await self._served.others.sessions()]))

    def facts(self) -> list[SessionFacts]:
        """Return the sessions of this process, the oldest first."""
        return [
            {
                "session_id": session.id,
                "created": session.created,
                "turns": len(session.turns),
                "in_flight": session.in_flight,
            }
            for session in self._sessions.all()
        ]

    @documented(statuses=(400, 404, 503), media=(JSON, _MSGPACK[0]), answer=types.Trajectory, errors=(ErrorBody,))
    async def trajectory(self, request: Request) -> Response:
        """Answer GET ``/sessions/{id}/trajectory``, as JSON or, if the client accepts it, as MessagePack."""
        packed = prefers(",".join(request.headers.getlist("accept")), _MSGPACK, JSON)
        try:
            with self._sessions.used(request.path_params["session"]) as session:
                encoded = await asyncio.to_thread(lambda: _encoded(trajectory_of(session), packed))
        except DrivetrainError as error:
            return error_answer(error)
        return Response(encoded, media_type=_MSGPACK[0] if packed else "application/json")

    @documented(success=204, statuses=(400, 404, 409), media=(), errors=(ErrorBody,))
    async def delete(self, request: Request) -> Response:
        """Answer DELETE ``/sessions/{id}``."""
        try:
            await self._sessions.delete(request.path_params["session"])
        except DrivetrainError as error:
            return error_answer(error)
        return Response(status_code=204)


def _encoded(trajectory: types.Trajectory, packed: bool) -> bytes:
    return msgspec.msgpack.encode(trajectory) if packed else msgspec.json.encode(trajectory)
