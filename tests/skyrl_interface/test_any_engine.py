"""The same interface over an engine of a host process, a fleet, and an engine that another owner shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drivetrain import InferenceEngine, attach, create_engine
from drivetrain_fleet import InferenceEngineClient
from drivetrain_trainers.skyrl import SkyRLInferenceEngine
from engines import HANGING, until_running
from trainer_groups import fresh

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


@asynccontextmanager
async def opened(kind: str, model: Path) -> AsyncIterator[InferenceEngine]:
    def inline() -> InferenceEngine:
        return create_engine("transformers", model=str(model), isolation="inline")

    match kind:
        case "process":
            async with create_engine("transformers", model=str(model), isolation="process") as engine:
                yield engine
        case "fleet":
            async with InferenceEngineClient([inline(), inline()]) as fleet:
                yield fleet
        case _:
            async with inline() as owner:
                holder = await attach(await owner.handle())
                yield holder
                await holder.teardown()


@pytest.mark.parametrize("kind", ["process", "fleet", "attached"])
async def test_a_training_step_over_any_engine(kind: str, model: Path, other_model: Path) -> None:
    async with opened(kind, model) as engine:
        skyrl = SkyRLInferenceEngine(engine)
        long = {"max_tokens": 900, "ignore_eos": True}
        task = asyncio.create_task(skyrl.generate({"prompt_token_ids": [[5]] * 4, "sampling_params": long}))
        await until_running(engine, 4)
        await skyrl.sleep(["kv_cache"])
        async with asyncio.timeout(HANGING):
            assert (await task)["stop_reasons"] == ["abort"] * 4
        await skyrl.wake_up(["kv_cache"])
        await skyrl.load_weights_from_disk(str(other_model))
        output = await skyrl.generate({"prompt_token_ids": [[5, 6, 7]] * 3, "sampling_params": {**GREEDY, "n": 2}})
        assert output["response_ids"] == [(await fresh(other_model))[0]] * 6
        assert output["weight_version"] == await skyrl.get_weight_version() == "1"
        await skyrl.abort_generation()
        assert engine.is_paused
        await skyrl.continue_generation()
        session = await skyrl.open_session()
        turn = await skyrl.generate_with_session(session, {"prompt_token_ids": [[5]], "sampling_params": GREEDY})
        assert turn["stop_reasons"] == ["length"]
