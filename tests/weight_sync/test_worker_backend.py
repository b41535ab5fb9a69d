"""The weight versions of tokens in flight, on an engine that does not report them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from drivetrain.backend.base import GenerateRequest, GenerateResult, ModelInfo
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import ApplyUpdate, WeightReply
from drivetrain_weight_sync.receiver.request_arrivals import Arrivals
from drivetrain_weight_sync.receiver.worker_backend import WorkerBackend

pytestmark = pytest.mark.asyncio


class Request:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float]] = []

    def replaced(self, version: str, tokens: float) -> None:
        self.spans.append((version, tokens))


class Unlabelled(WorkerBackend):
    """An engine that labels no tokens, and whose update lasts until it is told to end."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(backend="unlabelled", model="none", weight_version="old"))
        self.arrivals = Arrivals()
        self.live: dict[str, int] = {}
        self.asked = asyncio.Event()
        self.may_end = asyncio.Event()

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        raise AssertionError("nothing is started")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        raise AssertionError("nothing is generated")

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
    names = [backend.new_id() for _ in range(3)]
    for name, request in zip(names, (running, complete, on_its_way), strict=True):
        await backend.admit(name, request)
    for name in names[:2]:
        backend.arrivals.note(name)
    backend.live = {names[0]: 5}
    backend.may_end.set()
    await backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))
    assert running.spans == [("old", 5)]
    assert complete.spans == [("old", math.inf)]
    assert on_its_way.spans == [("old", 0)]
    assert backend.version == "new"


async def test_a_request_that_comes_meanwhile_waits_and_is_all_of_the_new_weights() -> None:
    backend = Unlabelled()
    update = asyncio.ensure_future(
        backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))
    )
    await backend.asked.wait()
    late = Request()
    admitting = asyncio.ensure_future(backend.admit(backend.new_id(), late))
    await asyncio.sleep(0.01)
    assert not backend.in_flight
    backend.may_end.set()
    await update
    await admitting
    assert list(backend.in_flight.values()) == [late]
    assert late.spans == []


async def test_an_update_that_is_given_up_lets_requests_come() -> None:
    backend = Unlabelled()
    update = asyncio.ensure_future(
        backend.apply_weights(ApplyUpdate("new", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT))
    )
    await backend.asked.wait()
    update.cancel()
    await asyncio.wait([update])
    await asyncio.wait_for(backend.admit(backend.new_id(), Request()), 1)
    assert backend.version == "old"
