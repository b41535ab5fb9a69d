"""Requests to SGLang: their results, and their aborts when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from drivetrain.backend.base import GenerateRequest
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sglang.engine import SGLangBackend

REQUEST = GenerateRequest("one", [1, 2], SamplingParams(logprobs=0), 2, (), LogprobsMode.TEMPERATURE)


class Manager:
    """Stands for SGLang's tokenizer manager: yields one token, then another when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []

    async def generate_request(self, wanted: SimpleNamespace) -> AsyncIterator[dict[str, object]]:
        self.requests.append(vars(wanted))
        yield {"output_ids": [5], "meta_info": {"output_token_logprobs": [(-0.5, 5)]}}
        await self.may_end.wait()
        ended = {"finish_reason": {"type": "length"}, "output_token_logprobs": [(-0.25, 6)]}
        yield {"output_ids": [6], "meta_info": ended}

    def _dispatch_to_scheduler(self, message: SimpleNamespace) -> None:
        self.aborted.append(message.rid)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    names = ["sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct"]
    modules = {name: ModuleType(name) for name in names}
    for request in ("GenerateReqInput", "AbortReq"):
        setattr(modules[names[-1]], request, SimpleNamespace)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return Manager()


@pytest.fixture
def backend(manager: Manager) -> SGLangBackend:
    made = SGLangBackend(EngineConfig(backend="sglang", model="none", device="cpu", weight_version="first"))
    made.engine = SimpleNamespace(tokenizer_manager=manager)
    return made


async def test_a_sample_and_its_stream_are_the_same(backend: SGLangBackend, manager: Manager) -> None:
    manager.may_end.set()
    result = await backend.generate(REQUEST)
    assert (result.token_ids, result.logprobs, result.finish_reason) == ([5, 6], [-0.5, -0.25], FinishReason.LENGTH)
    assert result.weight_versions == [VersionSpan("first", 0, 2)]
    deltas = [delta async for delta in backend.stream(REQUEST)]
    assert [(delta.token_ids, delta.logprobs) for delta in deltas] == [([5], [-0.5]), ([6], [-0.25])]
    assert [delta.result for delta in deltas] == [None, result]
    assert [request["stream"] for request in manager.requests] == [False, True]
    assert len({request["rid"] for request in manager.requests}) == 2
    assert not backend.in_flight
    assert not manager.aborted


async def test_a_stream_that_nobody_reads_is_aborted(backend: SGLangBackend, manager: Manager) -> None:
    async with aclosing(backend.stream(REQUEST)) as deltas:
        await anext(deltas)
        (name,) = backend.in_flight
    assert manager.aborted == [name]
    assert not backend.in_flight


async def test_a_cancelled_request_is_aborted(backend: SGLangBackend, manager: Manager) -> None:
    generating = asyncio.create_task(backend.generate(REQUEST))
    await asyncio.sleep(0.01)
    (name,) = backend.in_flight
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert manager.aborted == [name]
    assert not backend.in_flight


async def test_an_abort_is_sent_by_the_engines_id(backend: SGLangBackend, manager: Manager) -> None:
    generating = asyncio.create_task(backend.generate(REQUEST))
    await asyncio.sleep(0.01)
    (name,) = backend.in_flight
    await backend.abort([REQUEST.request_id, "unknown"])
    assert manager.aborted == [name]
    manager.may_end.set()
    await generating
    await backend.abort([REQUEST.request_id])
    await asyncio.sleep(0.15)
    assert manager.aborted == [name], "a request that has ended was aborted"
