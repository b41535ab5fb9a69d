"""The weight versions of tokens in flight, on an engine that does not report them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from drivetrain.backend.base import GenerateRequest, ModelInfo
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.weights import ApplyUpdate, WeightReply
from drivetrain_weight_sync.receiver.request_arrivals import Arrivals
from drivetrain_weight_sync.receiver.worker_backend import WorkerBackend
from drivetrain_weight_sync.receiver.worker_requests import Sample

pytestmark = pytest.mark.asyncio


class Request:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float]] = []

    def replaced(self, version: str, tokens: float) -> None:
        self.spans.append((version, tokens))


def asked(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id, [1], SamplingParams(), 1, (), LogprobsMode.RAW)


class Unlabelled(WorkerBackend[Sample]):
    """An engine that labels no tokens, and whose update lasts until it is told to end."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(backend="unlabelled", model="none", weight_version="old"))
        self.arrivals = Arrivals()
        self.live: dict[str, int] = {}
        self.asked = asyncio.Event()
        self.may_end = asyncio.Event()
        self.sent_aborts: list[str] = []

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        raise AssertionError("nothing is started")

    def collect(self, request: GenerateRequest) -> Sample:
        raise AssertionError("nothing is generated")

    def outputs(self, request: GenerateRequest, sample: Sample, *, stream: bool) -> AsyncGenerator[object, None]:
        raise AssertionError("nothing is generated")

    async def send_abort(self, names: Sequence[str]) -> None:
        self.sent_aborts += names

    async def close(self) -> None:
        raise AssertionError("nothing was started")

    def labels_tokens(self) -> bool:
        return False

    def served_dtype(self) -> str:
        return "float32"

    async def ask(self, method: str, *arguments: object, freeze: PauseMode | None = None) -> object:
        assert method == "apply_weights_counting"
        _, names = arguments
        assert isinstance(names, list)
        self.asked.set()
        await self.may_end.wait()
        return WeightReply(), self.arrivals.tokens(names, self.live)


async def test_what_is_complete_is_told_from_what_has_not_arrived() -> None:
    backend = Unlabelled()
    running, complete, on_its_way = Request(), Request(), Request()
    async with AsyncExitStack() as admitted:
        requests = enumerate((running, complete, on_its_way))
        names = [
            await admitted.enter_async_context(backend.admitted(asked(str(number)), one)) for number, one in requests
        ]
        await update_after_two_arrived(backend, names)
    assert running.spans == [("old", 5)]
    assert complete.spans == [("old", math.inf)]
    assert on_its_way.spans == [("old", 0)]
    assert backend.version == "new"


async def update_after_two_arrived(backend: Unlabelled, names: list[str]) -> None:
    """Update the weights when two requests have arrived, of which the first is still running."""
    for name in names[:2]:
        backend.arrivals.note(name)
    backend.live = {names[0]: 5}
    backend.may_end.set()
    await backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))


async def test_a_request_that_comes_meanwhile_waits_and_is_all_of_the_new_weights() -> None:
    backend = Unlabelled()
    update = asyncio.ensure_future(
        backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))
    )
    await backend.asked.wait()
    late = Request()
    admission = backend.admitted(asked("late"), late)
    admitting = asyncio.ensure_future(admission.__aenter__())
    await asyncio.sleep(0.01)
    assert not backend.in_flight
    backend.may_end.set()
    await update
    await admitting
    assert list(backend.in_flight.values()) == [late]
    assert late.spans == []
    await admission.__aexit__(None, None, None)
    assert not backend.in_flight


async def test_an_update_that_is_given_up_lets_requests_come() -> None:
    backend = Unlabelled()
    update = asyncio.ensure_future(
        backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))
    )
    await backend.asked.wait()
    update.cancel()
    await asyncio.wait([update])
    async with asyncio.timeout(60), backend.admitted(asked("next"), Request()):
        pass
    assert backend.version == "old"


async def test_an_abort_is_repeated_until_the_request_has_ended() -> None:
    backend = Unlabelled()
    async with backend.admitted(asked("one"), Request()) as name, backend.admitted(asked("other"), Request()):
        await backend.abort(["one", "unknown"])
        assert backend.sent_aborts == [name]
        await until(lambda: len(backend.sent_aborts) > 2)
    assert set(backend.sent_aborts) == {name}
    await asyncio.sleep(0.15)
    before = len(backend.sent_aborts)
    await asyncio.sleep(0.25)
    assert len(backend.sent_aborts) == before, "an abort was repeated for a request that has ended"


async def test_an_abort_reaches_a_request_that_waits_for_its_admission() -> None:
    backend = Unlabelled()
    with backend.nobody_admitted():
        admission = backend.admitted(asked("one"), Request())
        admitting = asyncio.ensure_future(admission.__aenter__())
        await asyncio.sleep(0.01)
        await backend.abort(["one"])
    name = await admitting
    await until(lambda: backend.sent_aborts.count(name) > 1)
    await admission.__aexit__(None, None, None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
