"""Weight updates of a real vLLM or SGLang on two ranks, struck at any step: see README.md.

``make faults BACKEND=vllm`` (or ``sglang``) runs it. pytest does not collect it: it needs the environment of ``make
environment-vllm`` (or ``-sglang``), or another one whose Python ``FAULTS_PYTHON`` names.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from hypothesis import given
from tests.faults.fault import Blow, Fault, Stage, Victim, faults
from tests.faults.play import Theatre, play
from tests.faults.settings import some

from drivetrain import EngineState, InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness.fork_server import ForkServer

pytestmark = [pytest.mark.timeout(0)]

BACKEND = os.environ.get("FAULTS_BACKEND", "vllm")
PYTHON = os.environ.get("FAULTS_PYTHON", f".venvs/{BACKEND}/bin/python")
TIMEOUTS = {"weight_update": 8.0, "control": 8.0, "close": 10.0, "heartbeat": 4.0, "event_loop": 20.0}


_ON_ANY = [Victim.RANK_0, Victim.RANK_1, Victim.HOST, Victim.SENDER]
VICTIMS = {"vllm": [*_ON_ANY, Victim.CORE], "sglang": _ON_ANY}
"""Victims by backend: SGLang's ranks are children of the host, with no core between them."""


@dataclass
class Keeper:
    """Keeps an engine, which is slow to start, from one fault to the next as long as it lives."""

    fields: dict[str, Any]
    engine: InferenceEngine | None = None

    @asynccontextmanager
    async def open(self, theatre: Theatre) -> AsyncGenerator[InferenceEngine, None]:
        if self.engine is None:
            self.engine = await self._started(theatre)
        try:
            yield self.engine
        except BaseException:
            await self.close()
            raise
        if self.engine.state is EngineState.CLOSED:
            self.engine = None

    async def _started(self, theatre: Theatre) -> InferenceEngine:
        engine = create_engine(self.fields)
        await engine.start()
        theatre.stage.clear()
        await engine.load_weights_from_disk(str(theatre.model), "initial")
        theatre.ranks = theatre.stage.pids
        assert len(theatre.ranks) == 2
        assert all(psutil.pid_exists(pid) for pid in theatre.ranks.values())
        return engine

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.teardown()


@pytest.fixture(scope="module")
def theatre(
    stage: Stage,
    runner: asyncio.Runner,
    outcomes: Counter[tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Theatre]:
    model = tiny_model("qwen2")
    fields: dict[str, Any] = {
        "backend": BACKEND,
        "model": str(model),
        "python": os.path.abspath(PYTHON),
        "tensor_parallel_size": 2,
        "timeouts": TIMEOUTS,
    }
    keeper = Keeper(fields)
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, ForkServer(BACKEND, fields["python"]):
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # the process that is forked has imported vLLM
        yield Theatre(BACKEND, model, stage, folder, keeper.open, fields, outcomes, bound=45, keeps=True)
        runner.run(keeper.close())


@some(few=6, share=1.0)
@given(
    faults(
        VICTIMS[BACKEND],
        [Blow.KILL, Blow.FREEZE, Blow.PAUSE],
        ["shared_memory", "broadcast", "disk"],
    )
)
def test_a_rank_that_is_struck(theatre: Theatre, runner: asyncio.Runner, fault: Fault) -> None:
    runner.run(play(fault, theatre))
