"""Routes of sessions: those of agents, and those of the trainer that reads what was recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.engine_calls import chat_call
from drivetrain.openai.token_texts import TokenTexts
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.types.prompts import ChatPrompt, TokenPrompt
from drivetrain_serving.gateway.capture import Asked, Capture
from drivetrain_serving.gateway.errors import error_answer
from drivetrain_serving.gateway.ledger import Session
from drivetrain_serving.gateway.prompts import prepare
from drivetrain_serving.gateway.sessions import Sessions
from drivetrain_serving.gateway.trajectory import trajectory_of
from drivetrain_serving.http.answers import event_stream, json_answer
from drivetrain_serving.http.bodies import read_json, unless_disconnected
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.chat_and_completion_answers import ChatResponses
from drivetrain_serving.vllm.errors import body_of
from drivetrain_serving.vllm.json_objects import Json
from drivetrain_serving.vllm.payloads import ChatRequest, read_chat

Answer = Callable[[Request], Awaitable[Response]]

AGENT_PATHS: Final = re.compile(r"/sessions/[^/]+/v1/.*")
"""Paths that the API key opens; the other paths of sessions need the control key."""
_MSGPACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


class SessionRoutes:
    """Routes under ``/sessions``.

    Args:
        served: The engine.
    """

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
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
        ]

    async def close(self) -> None:
        """End what runs, and delete what was recorded."""
        await self._capture.close()
        await self._sessions.close()

    # Agents ------------------------------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        """Answer POST ``/sessions/{id}/v1/chat/completions``."""
        body = await read_json(request, self._served.config, wants_type=True)
        try:
            return await unless_disconnected(request.receive, self._chat(request.path_params["session"], body))
        except DrivetrainError as error:
            return error_answer(error)

    async def _chat(self, session_id: str, body: Mapping[str, object]) -> Response:
        session = self._sessions.for_a_turn(session_id)
        engine = self._served.engine
        payload = read_chat(body, engine.tokenizer.chat_template(()) or "", stream=body.get("stream") is True)
        self._sessions.begin(session)
        try:
            asked = await self._asked(session, payload)
        finally:
            self._sessions.end(session)
        name = payload.model or self._served.name
        parser = engine.config.tool_call_parser
        answer_id = f"chatcmpl-{payload.request_id or uuid.uuid4().hex}"
        answer = ChatAnswer(payload, answer_id, name, engine.tokenizer, parser)
        responses = ChatResponses(payload, answer, self._texts, engine.model_info.eos_token_ids)
        if not payload.stream:
            return json_answer(await self._capture.whole(asked, responses))
        return await event_stream(self._stream(asked, responses, payload), body_of, self._served.config.send_timeout)

    async def _stream(self, asked: Asked, responses: ChatResponses, payload: ChatRequest) -> AsyncGenerator[Json, None]:
        async with aclosing(self._capture.streamed(asked, responses)) as pieces:
            async for piece in pieces:
                yield piece
        if payload.include_usage:
            yield responses.usage_chunk()

    async def _asked(self, session: Session, payload: ChatRequest) -> Asked:
        """Return the request with the prompt's ids, which extend an earlier turn's where its messages do."""
        engine = self._served.engine
        lora = await self._served.adapter_of(payload.model)
        call = chat_call(payload)
        (prompt,) = call.prompts
        assert isinstance(prompt, ChatPrompt)
        if prompt.media:
            raise InvalidRequest("messages hold images, videos or sounds; sessions record text only", field="messages")
        with call.refusals():
            prepared = await in_prompt_thread(
                lambda: prepare(engine.tokenizer, session, prompt, engine.model_info.context_length)
            )
        params = {"logprobs": 0, **call.params}
        if payload.prompt_logprobs is not None:
            params["prompt_logprobs"] = payload.prompt_logprobs
        if self._served.config.sessions.routed_experts:
            params["return_routed_experts"] = True
        call = dataclasses.replace(
            call,
            prompts=(TokenPrompt(token_ids=tuple(prepared.token_ids)),),
            params=params,
            lora=lora or call.lora,
        )
        return Asked(session, prompt, prepared, call, payload.model or self._served.name, payload.logprobs)

    # The trainer -------------------------------------------------------------------------------------------------

    async def sessions(self, request: Request) -> Response:
        """Answer GET ``/sessions``."""
        del request
        found = [
            {
                "session_id": session.id,
                "created": session.created,
                "turns": len(session.turns),
                "in_flight": session.in_flight,
            }
            for session in self._sessions.all()
        ]
        return json_answer({"sessions": found})

    async def trajectory(self, request: Request) -> Response:
        """Answer GET ``/sessions/{id}/trajectory``, as JSON or, if the client accepts it, as MessagePack."""
        packed = any(kind in request.headers.get("accept", "") for kind in _MSGPACK)
        try:
            with self._sessions.used(request.path_params["session"]) as session:
                encoded = await asyncio.to_thread(lambda: _encoded(trajectory_of(session), packed))
        except DrivetrainError as error:
            return error_answer(error)
        return Response(encoded, media_type=_MSGPACK[0] if packed else "application/json")

    async def delete(self, request: Request) -> Response:
        """Answer DELETE ``/sessions/{id}``."""
        try:
            await self._sessions.delete(request.path_params["session"])
        except DrivetrainError as error:
            return error_answer(error)
        return Response(status_code=204)


def _encoded(trajectory: Json, packed: bool) -> bytes:
    return msgspec.msgpack.encode(trajectory) if packed else msgspec.json.encode(trajectory)
