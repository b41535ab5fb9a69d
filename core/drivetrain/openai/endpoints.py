"""OpenAI endpoints: chat completions and completions, whole and streamed, over an engine's ``generate`` calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from drivetrain.openai.chat_answer import ChatAnswer
from drivetrain.openai.completion_answer import CompletionAnswer
from drivetrain.openai.engine_calls import Call, chat_call, check_served, completion_call
from drivetrain.openai.payloads import ChatPayload, CompletionPayload, parse
from drivetrain.openai.responses import ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion, CompletionChunk, GenerationOutput
from drivetrain.types.prompts import Prompt


class Engine(Protocol):
    """The parts of an engine that the endpoints use."""

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        ...

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, object],
        *,
        request_ids: Sequence[str] | None,
        lora: str | None,
        priority: int,
        timeout: float | None,
    ) -> GenerationOutput:
        """See :meth:`InferenceEngine.generate`."""
        ...

    def generate_stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, object],
        *,
        request_ids: Sequence[str] | None,
        lora: str | None,
        priority: int,
        timeout: float | None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """See :meth:`InferenceEngine.generate_stream`."""
        ...


async def chat_completion(engine: Engine, payload: Mapping[str, object], timeout: float | None) -> ChatCompletion:
    """See :meth:`InferenceEngine.chat_completion`."""
    asked = parse(ChatPayload, payload, stream=False)
    model = check_served(asked, engine.config.model)
    call = chat_call(asked)
    return ChatAnswer(asked, call.id, model, engine.tokenizer, engine.config.tool_call_parser).whole(
        await _generate(engine, call, timeout)
    )


async def completion(engine: Engine, payload: Mapping[str, object], timeout: float | None) -> TextCompletion:
    """See :meth:`InferenceEngine.completion`."""
    asked = parse(CompletionPayload, payload, stream=False)
    model = check_served(asked, engine.config.model)
    call = completion_call(asked)
    return CompletionAnswer(asked, call.id, model, engine.tokenizer).whole(await _generate(engine, call, timeout))


async def chat_completion_stream(
    engine: Engine, payload: Mapping[str, object], timeout: float | None
) -> AsyncGenerator[ChatCompletionChunk, None]:
    """See :meth:`InferenceEngine.chat_completion_stream`."""
    asked = parse(ChatPayload, payload, stream=True)
    model = check_served(asked, engine.config.model)
    call = chat_call(asked)
    answer = ChatAnswer(asked, call.id, model, engine.tokenizer, engine.config.tool_call_parser)
    async with aclosing(_stream(engine, call, timeout)) as chunks:
        async for chunk in chunks:
            for piece in answer.chunks(chunk):
                yield piece
    if asked.include_usage:
        yield answer.usage_chunk()


async def completion_stream(
    engine: Engine, payload: Mapping[str, object], timeout: float | None
) -> AsyncGenerator[TextCompletionChunk, None]:
    """See :meth:`InferenceEngine.completion_stream`."""
    asked = parse(CompletionPayload, payload, stream=True)
    model = check_served(asked, engine.config.model)
    call = completion_call(asked)
    answer = CompletionAnswer(asked, call.id, model, engine.tokenizer)
    async with aclosing(_stream(engine, call, timeout)) as chunks:
        async for chunk in chunks:
            for piece in answer.chunks(chunk):
                yield piece
    if asked.include_usage:
        yield answer.usage_chunk()


async def _generate(engine: Engine, call: Call, timeout: float | None) -> list[Completion]:
    with call.refusals():
        output = await engine.generate(
            call.prompts,
            call.params,
            request_ids=call.request_ids,
            lora=call.lora,
            priority=call.priority,
            timeout=timeout,
        )
    return output.completions


async def _stream(engine: Engine, call: Call, timeout: float | None) -> AsyncGenerator[CompletionChunk, None]:
    generated = engine.generate_stream(
        call.prompts,
        call.params,
        request_ids=call.request_ids,
        lora=call.lora,
        priority=call.priority,
        timeout=timeout,
    )
    with call.refusals():
        async with aclosing(generated) as chunks:
            async for chunk in chunks:
                yield chunk
