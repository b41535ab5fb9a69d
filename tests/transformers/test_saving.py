"""Saves of a running engine: of the served weights, in their own dtype, within the deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drivetrain import DeadlineExceeded, EngineStateError, InferenceEngine, InvalidRequest, MemoryTag, SamplingParams
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_save_that_takes_too_long_leaves_nothing_and_the_next_one_is_whole(
    engine: InferenceEngine, tmp_path: Path
) -> None:
    with pytest.raises(DeadlineExceeded, match="to be saved to"):
        # Shorter than the clock can tell: the deadline comes first, also where the event loop gets no turn for a while.
        await engine.save_sharded_model(tmp_path / "saved", timeout=1e-9)
    await engine.save_sharded_model(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert names(tmp_path) == ["saved"]


async def test_a_save_needs_the_weights_and_not_the_cache(engine: InferenceEngine, tmp_path: Path, model: Path) -> None:
    await engine.sleep([MemoryTag.KV_CACHE])
    await engine.save_sharded_model(tmp_path / "of a sleeping cache")
    await engine.sleep([MemoryTag.WEIGHTS])
    for state in ("asleep", "dirty"):
        for save in (engine.save_sharded_model(str(tmp_path / "x")), engine.save_remote_model(f"file://{tmp_path}/x")):
            with pytest.raises(EngineStateError, match=r"save_.*_model.. is refused") as caught:
                await save
            assert caught.value.state == state
        await engine.wake_up()
    await engine.load_weights_from_disk(str(tmp_path / "of a sleeping cache"), "initial")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("seconds", [0, -1, "long"])
async def test_a_timeout_is_a_number_of_seconds(engine: InferenceEngine, tmp_path: Path, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        await engine.save_sharded_model(tmp_path / "saved", timeout=seconds)
    assert names(tmp_path) == []


async def test_it_is_saved_in_the_dtype_in_which_it_is_served(
    open_engine: OpenEngine, tmp_path: Path, model: Path
) -> None:
    async with open_engine(dtype="bfloat16") as engine:
        await engine.save_sharded_model(tmp_path / "saved")
        answer = (await engine.generate("a prompt", GREEDY)).completions[0].token_ids
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    async with open_engine(model=str(tmp_path / "saved")) as engine:
        assert engine.model_info.dtype == "bfloat16"
        assert (await engine.generate("a prompt", GREEDY)).completions[0].token_ids == answer


async def test_an_engine_that_is_closed_meanwhile_leaves_nothing(open_engine: OpenEngine, tmp_path: Path) -> None:
    async with open_engine() as engine:
        saving = asyncio.create_task(engine.save_sharded_model(tmp_path / "saved"))
        await asyncio.sleep(0)
    await asyncio.wait([saving], timeout=20)
    assert saving.done()
    assert names(tmp_path) == ([] if saving.exception() else ["saved"])
