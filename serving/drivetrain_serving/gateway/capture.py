"""Generation whose turns are recorded, also if the client goes before the end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.openai.engine_calls import Call
from drivetrain.openai.forced_calls import add_parts
from drivetrain.openai.messages import to_template
from drivetrain.openai.responses import ChatDelta
from drivetrain.types.outputs import Completion, CompletionChunk
from drivetrain.types.prompts import ChatPrompt, Message
from drivetrain.types.sampling import SamplingParams
from drivetrain_serving.gateway.conversation_digests import Conversation
from drivetrain_serving.gateway.records import Record, packed_ids, packed_logprobs
from drivetrain_serving.gateway.session_turns import Session, Turn
from drivetrain_serving.gateway.sessions import Sessions
from drivetrain_serving.gateway.turn_prompts import PreparedPrompt
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.answer_types import ChatChunk, ChatCompletion
from drivetrain_serving.vllm.chat_and_completion_answers import ChatResponses
from drivetrain_serving.vllm.json_objects import Json

_T = TypeVar("_T")

DISCONNECT: Final = "disconnect"
"""Finish reason of a turn whose client went before its end."""
_RECORDED: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "seed"),
)
"""Fields of SamplingParams by which a trainer computes the logprobs of a turn anew."""
_ABORT_AGAIN_S: Final = 0.05
"""Seconds after which an abort is repeated: the first may come before the request has reached the engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request that is ready for the engine."""

    session: Session
    prompt: ChatPrompt
    prepared: PreparedPrompt
    call: Call
    """Its id is the engine's own."""
    request_id: str
    """Id of the request."""
    model: str
    shows_logprobs: bool
    """True if the client asked for logprobs; they are recorded in any case."""
    turns: int
    """Turns that the request makes."""

    @property
    def answer_id(self) -> str:
        """The id of the chat completion."""
        return f"chatcmpl-{self.request_id}"


class Capture:
    """Generates for sessions, and records the sampled tokens.

    Generation runs in a task of its own. If the client goes, its requests are aborted in the engine, and the tokens
    sampled until then are recorded.

    Args:
        served: The engine.
        sessions: The sessions.
    """

    def __init__(self, served: ServedEngine, sessions: Sessions) -> None:
        self._served = served
        self._engine = served.engine
        self._sessions = sessions
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole(self, asked: Asked, responses: ChatResponses) -> ChatCompletion:
        """Generate, record, and return the response."""
        gone = asyncio.Event()
        return await self._watched(self._whole(asked, responses, gone), asked, gone)

    async def _whole(self, asked: Asked, responses: ChatResponses, gone: asyncio.Event) -> ChatCompletion:
        with asked.call.refusals(), self._served.known_as(asked.answer_id, asked.call, asked.request_id):
            output = await self._served.generate(asked.call)
        response = responses.whole([_as_asked(one, asked) for one in output.completions])
        for completion, choice in zip(output.completions, response["choices"], strict=True):
            self._record(asked, completion, choice["message"], choice["finish_reason"], gone=gone.is_set())
        await self._sessions.records.spill()
        return response

    async def streamed(self, asked: Asked, responses: ChatResponses) -> AsyncGenerator[ChatChunk, None]:
        """Generate, record, and yield the chunks of the response. A turn is recorded before its last chunk."""
        pieces: asyncio.Queue[ChatChunk | None] = asyncio.Queue()
        gone = asyncio.Event()
        generating = self._begin(self._stream(asked, responses, pieces, gone), asked)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await generating
        finally:
            if not generating.done():
                gone.set()
                self._keep(asyncio.ensure_future(self._aborted(asked, generating)))

    async def _stream(
        self, asked: Asked, responses: ChatResponses, pieces: asyncio.Queue[ChatChunk | None], gone: asyncio.Event
    ) -> None:
        messages: dict[int, Json] = {}
        try:
            with asked.call.refusals(), self._served.known_as(asked.answer_id, asked.call, asked.request_id):
                async with aclosing(self._served.generate_stream(asked.call)) as chunks:
                    async for chunk in chunks:
                        made = list(responses.chunks(_as_asked(chunk, asked)))
                        message = messages.setdefault(chunk.sample_index, {"role": "assistant", "content": ""})
                        reason = ""
                        for piece in made:
                            (choice,) = piece["choices"]
                            _add(message, choice["delta"])
                            reason = choice["finish_reason"] or reason
                        if chunk.completion is not None:
                            self._record(asked, chunk.completion, message, reason, gone=gone.is_set())
                        for piece in made:
                            pieces.put_nowait(piece)
            await self._sessions.records.spill()
        finally:
            pieces.put_nowait(None)

    # Tasks -------------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, _T], asked: Asked) -> asyncio.Task[_T]:
        """Start generating; the session is in use until it has ended."""
        self._sessions.begin(asked.session, asked.turns)
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._sessions.end(asked.session, asked.turns))
        self._keep(task)
        return task

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Coroutine[Any, Any, _T], asked: Asked, gone: asyncio.Event) -> _T:
        generating = self._begin(work, asked)
        try:
            return await asyncio.shield(generating)
        finally:
            if not generating.done():
                gone.set()
                self._keep(asyncio.ensure_future(self._aborted(asked, generating)))

    async def _aborted(self, asked: Asked, generating: asyncio.Task[Any]) -> None:
        """Abort a request until its task has ended."""
        while not generating.done():
            try:
                for request_id in asked.call.request_ids:
                    await self._engine.abort(request_id)
            except DrivetrainError:  # the engine cannot abort, or is lost: its request ends as the task does
                generating.cancel()
            await asyncio.wait([generating], timeout=_ABORT_AGAIN_S)
        with suppress(asyncio.CancelledError, DrivetrainError):
            generating.result()

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Records -----------------------------------------------------------------------------------------------------

    def _record(
        self, asked: Asked, completion: Completion, message: Mapping[str, object], reason: str, *, gone: bool
    ) -> None:
        session, prepared = asked.session, asked.prepared
        if gone and reason == "abort":
            reason = DISCONNECT
            if not completion.token_ids:
                return
        of_prompt, mask = completion.prompt_routed_experts, completion.sampling_mask
        record = Record(
            packed_ids(prepared.new_ids),
            packed_ids(completion.token_ids),
            packed_logprobs(completion.logprobs or ()),
            completion.routed_experts,
            None if of_prompt is None else of_prompt[prepared.first_read :],
            None if mask is None else mask.packed,
            0 if mask is None else mask.vocab_size,
        )
        params = SamplingParams.model_validate(asked.call.params)
        self._sessions.records.touch([turn.record for turn in prepared.path])
        turn = Turn(
            number=len(session.turns),
            parent=prepared.parent.number if prepared.parent else None,
            continues=prepared.continues,
            begins_because=prepared.begins_because,
            prompt_length=len(prepared.token_ids),
            sampled_length=len(completion.token_ids),
            rendered=prepared.rendered,
            message_count=len(asked.prompt.messages) + 1,
            finish_reason=reason,
            weight_versions=completion.weight_versions,
            logprobs_mode=completion.logprobs_mode.value if completion.logprobs_mode else None,
            model=asked.model,
            first_read=prepared.first_read,
            sampling_params={name: getattr(params, name) for name in _RECORDED},
            ended=time.time(),
            record=self._sessions.records.put(record, session.file),
        )
        session.add(turn, None if reason == DISCONNECT else _conversation(asked, message))


def _conversation(asked: Asked, answer: Mapping[str, object]) -> Conversation | None:
    """Return a conversation with its answer; None if no request can continue it."""
    before = asked.prepared.conversation
    if before is None:
        return None
    try:
        (message,), _ = to_template((Message.model_validate(answer),))
    except (InvalidRequest, ValidationError):
        return None
    return before.and_then(message)


_Piece = TypeVar("_Piece", Completion, CompletionChunk)


def _as_asked(piece: _Piece, asked: Asked) -> _Piece:
    """Leave out logprobs that only the record needs."""
    if asked.shows_logprobs:
        return piece
    return dataclasses.replace(piece, logprobs=None, top_logprobs=None)


def _add(message: Json, delta: ChatDelta) -> None:
    """Add a chunk's delta to the message."""
    message["content"] += delta.get("content") or ""
    if parts := delta.get("tool_calls"):
        add_parts(message.setdefault("tool_calls", []), parts)
