"""Requests of the OpenAI API, answered by this engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from drivetrain import openai
from drivetrain.engine.api.description import DescriptionCalls
from drivetrain.engine.api.generation import GenerationCalls
from drivetrain.openai import ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk
from drivetrain.types.arguments import checked


class OpenAICalls(DescriptionCalls, GenerationCalls):
    """Shorthands for the functions of ``drivetrain.openai``, which use only this engine's public page."""

    @checked
    async def chat_completion(self, payload: Mapping[str, object], *, timeout: float | None = None) -> ChatCompletion:
        """Answer a chat completion request of the OpenAI API, with token ids and weight versions as extra fields.

        Args:
            payload: The request, as decoded from JSON; ``docs/how-to/openai-payloads.md`` lists its fields.
            timeout: As in :meth:`generate`. Errors are those of :meth:`generate` too; they name the request's fields.
        """
        return await openai.chat_completion(self, payload, timeout)

    @checked
    def chat_completion_stream(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Answer as :meth:`chat_completion` does, in chunks."""
        return openai.chat_completion_stream(self, payload, timeout)

    @checked
    async def completion(self, payload: Mapping[str, object], *, timeout: float | None = None) -> TextCompletion:
        """Answer a completion request of the OpenAI API; see :meth:`chat_completion`."""
        return await openai.completion(self, payload, timeout)

    @checked
    def completion_stream(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> AsyncGenerator[TextCompletionChunk, None]:
        """Answer as :meth:`completion` does, in chunks."""
        return openai.completion_stream(self, payload, timeout)
