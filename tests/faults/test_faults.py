"""Weight updates of the real transformers backend, struck at any step: see README.md."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from tests.faults.fault import Blow, Fault, Stage, Victim, faults
from tests.faults.play import Theatre, play
from tests.faults.settings import some

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

TIMEOUTS = {"weight_update": 5.0, "control": 5.0, "close": 5.0, "heartbeat": 3.0, "event_loop": 10.0}
BLOWS = [Blow.KILL, Blow.FREEZE, Blow.PAUSE, Blow.RETURN]
TRANSPORTS = ["shared_memory", "broadcast", "disk", "delta"]


@pytest.fixture(scope="module")
def theatre(
    stage: Stage, outcomes: Counter[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theatre]:
    model = tiny_model("qwen2")
    fields = {"backend": "transformers", "model": str(model), "isolation": "process", "timeouts": TIMEOUTS}

    @asynccontextmanager
    async def opened(theatre: Theatre) -> AsyncGenerator[InferenceEngine, None]:
        async with create_engine(fields) as engine:
            yield engine

    with ForkServer("transformers"):
        yield Theatre("transformers", model, stage, tmp_path_factory.mktemp("faults"), opened, fields, outcomes)


@some(few=14, share=0.7)
@given(faults([Victim.SENDER, Victim.HOST], BLOWS, TRANSPORTS))
def test_a_sender_or_a_host_that_is_struck(theatre: Theatre, runner: asyncio.Runner, fault: Fault) -> None:
    runner.run(play(fault, theatre))


@some(few=3, share=0.2)
@given(faults([Victim.TRAINER], BLOWS, TRANSPORTS))
def test_a_trainer_that_is_struck(theatre: Theatre, runner: asyncio.Runner, fault: Fault) -> None:
    runner.run(play(fault, theatre))


@some(few=3, share=0.1)
@given(faults([Victim.TRAINER], [Blow.RAISE], ["in_process", *TRANSPORTS]))
def test_a_step_of_an_engine_in_the_trainers_process_that_fails(
    theatre: Theatre, runner: asyncio.Runner, fault: Fault
) -> None:
    runner.run(play(fault, theatre.inline))
