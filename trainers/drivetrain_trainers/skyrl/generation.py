"""Generation, sessions, and OpenAI's requests, as SkyRL calls them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.openai import ChatCompletion, TextCompletion
from drivetrain.types.capability import Capability
from drivetrain.types.modes import TurnMode
from drivetrain_trainers.skyrl.batch_calls import batch_call
from drivetrain_trainers.skyrl.batches import InferenceEngineInput, InferenceEngineOutput, StreamingChunk
from drivetrain_trainers.skyrl.outputs import ErrorResponse, StreamedCompletion, error_response, output_of
from drivetrain_trainers.skyrl.page import Page
from drivetrain_trainers.skyrl.sampling import payload_of


class GenerationCalls(Page):
    """SkyRL's calls that generate."""

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Generate ``n`` completions of each prompt.

        ``sampling_params`` may also hold ``lora_name``, ``priority`` (lower is sooner), ``action_mask`` and
        ``disallowed_tokens`` (lists of token ids), as SkyRL writes them.

        Raises:
            InvalidRequest: A field is wrong or cannot be honoured; it is named.
            DrivetrainError: as ``InferenceEngine.generate``.
        """
        call = batch_call(input_batch)
        sampling = call.sampling
        output = await self.engine.generate(
            call.prompts, sampling.params, lora=sampling.lora, priority=sampling.priority
        )
        return output_of(output.completions, sampling.n)

    async def generate_stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk, None]:
        """Generate as :meth:`generate` does, yielding each token as it comes. Closing the generator early aborts.

        Raises:
            InvalidRequest: Hidden states are asked for, which chunks do not hold.
        """
        call = batch_call(input_batch)
        sampling = call.sampling
        if sampling.params.get("return_hidden_states"):
            raise InvalidRequest(
                "return_hidden_states=True: chunks of a stream hold none; call generate()", field="return_hidden_states"
            )
        streamed: dict[int, StreamedCompletion] = {}
        chunks = self.engine.generate_stream(
            call.prompts, sampling.params, lora=sampling.lora, priority=sampling.priority
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                index = chunk.prompt_index * sampling.n + chunk.sample_index
                for piece in streamed.setdefault(index, StreamedCompletion(index)).chunks(chunk):
                    yield piece

    def supports_streaming(self) -> bool:
        """Return whether :meth:`generate_stream` works."""
        return self.engine.supports(Capability.STREAMING)

    # Sessions ----------------------------------------------------------------------------------------------------

    async def open_session(self, capacity_of_str_len: int = 8192, session_id: str | None = None) -> str:
        """Open a session and return its id.

        Args:
            capacity_of_str_len: Most tokens of a turn together with the turns that it builds on.
            session_id: The id to use; made up if not given.

        Raises:
            InvalidRequest: A session of this id is open.
        """
        return await self.engine.open_session(capacity_of_str_len, session_id=session_id)

    async def close_session(self, session_id: str) -> None:
        """Close a session.

        Raises:
            InvalidRequest: It is not open.
        """
        await self.engine.close_session(session_id)

    async def generate_with_session(
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None = None,
        offset: int | None = None,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> InferenceEngineOutput:
        """Generate one turn of a session.

        Args:
            session_id: As :meth:`open_session` returned it.
            input_batch: The new part of the turn.
            rid: One of the ``request_ids`` of an earlier turn, which this one continues; None begins anew.
            offset: Only None and -1: the turn begins where the earlier one ended.
            replace: Discard the turns that followed the earlier one.
            drop_previous_output: Only False: the earlier turn's answer is part of the conversation.

        Raises:
            InvalidRequest: The session is not open, or has no such turn.
            UnsupportedCapability: ``offset``, ``drop_previous_output``, or an adapter or priority for a turn.
        """
        if offset not in (None, -1):
            raise UnsupportedCapability(f"offset={shown(offset)}: a turn begins where the earlier one ended; give -1")
        if drop_previous_output:
            raise UnsupportedCapability(
                "drop_previous_output=True: turns build on earlier answers; begin anew with the ids that you want"
            )
        call = batch_call(input_batch)
        sampling = call.sampling
        if sampling.lora is not None or sampling.priority:
            raise UnsupportedCapability("turns of a session take no lora_name and no priority; call generate()")
        output = await self.engine.generate_with_session(
            session_id,
            call.prompts,
            sampling.params,
            parent_request_id=rid,
            turn=TurnMode.REPLACE if replace else TurnMode.CONTINUE,
        )
        return output_of(output.completions, sampling.n)

    def supports_sessions(self) -> bool:
        """Return whether sessions can be opened."""
        return self.engine.supports(Capability.SESSIONS)

    # OpenAI ------------------------------------------------------------------------------------------------------

    async def chat_completion(self, request_payload: Mapping[str, object]) -> ChatCompletion | ErrorResponse:
        """Answer a chat completion request of the OpenAI API.

        Args:
            request_payload: ``{"json": body, "headers": headers}``; the headers have no effect.

        Returns:
            The answer, or the error as a dictionary: errors are not raised.
        """
        try:
            return await self.engine.chat_completion(payload_of(_body(request_payload)))
        except DrivetrainError as error:
            return error_response(error)

    async def completion(self, request_payload: Mapping[str, object]) -> TextCompletion | ErrorResponse:
        """Answer a completion request; see :meth:`chat_completion`."""
        try:
            return await self.engine.completion(payload_of(_body(request_payload)))
        except DrivetrainError as error:
            return error_response(error)


def _body(request_payload: Mapping[str, object]) -> Mapping[str, object]:
    body = request_payload.get("json") if isinstance(request_payload, Mapping) else None
    if not isinstance(body, Mapping):
        raise InvalidRequest(f'{shown(request_payload)}: expected {{"json": body, "headers": headers}}', field="json")
    unknown = request_payload.keys() - {"json", "headers"}
    if unknown:
        raise InvalidRequest(f"{', '.join(sorted(unknown))}: fields of the request belong into json", field="json")
    return cast(Mapping[str, object], body)
