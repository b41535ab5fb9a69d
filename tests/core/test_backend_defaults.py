"""A backend that implements only ``stream`` can generate whole samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from drivetrain.backend import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.errors import EngineInternalError
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.sampling import LogprobsMode, SamplingParams


class Streaming(Backend):
    """Streams two tokens."""

    name = "streaming"
    engine_distribution = "pluggy"

    def __init__(self) -> None:
        super().__init__(EngineConfig(backend=self.name, model="organisation/name"))
        self.log: list[str] = []
        self.may_end = asyncio.Event()

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        raise AssertionError("never started")

    async def close(self) -> None:
        raise AssertionError("never started")

    async def stats(self) -> EngineStats:
        raise AssertionError("never started")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        try:
            yield TokenDelta([5])
            await self.may_end.wait()
            yield TokenDelta([6], result=GenerateResult([5, 6], FinishReason.LENGTH, [VersionSpan("0", 0, 2)]))
            self.log.append("read to its end")
        finally:
            self.log.append("closed")


class Broken(Streaming):
    """Ends its stream without a result."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])


def request() -> GenerateRequest:
    return GenerateRequest("one", [1], SamplingParams(), 2, (), LogprobsMode.RAW)


async def test_generate_reads_the_stream_to_its_end() -> None:
    backend = Streaming()
    backend.may_end.set()
    assert (await backend.generate(request())).token_ids == [5, 6]
    assert backend.log == ["read to its end", "closed"]


async def test_cancelling_generate_closes_the_stream() -> None:
    backend = Streaming()
    generating = asyncio.create_task(backend.generate(request()))
    await asyncio.sleep(0.01)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert backend.log == ["closed"]


async def test_a_stream_without_a_result_is_an_error() -> None:
    with pytest.raises(EngineInternalError, match="request one: the stream of the streaming backend ended"):
        await Broken().generate(request())
