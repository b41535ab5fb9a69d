"""Hidden states: of any architecture, over joins, pauses and updates, compared with an independent forward pass."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
import torch

import oracle
from drivetrain import ActionMask, Completion, InferenceEngine, PauseMode, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from engines import HANGING, OpenEngine, until_running
from tiny_adapters import save_adapters

pytestmark = pytest.mark.asyncio(loop_scope="session")

STATES = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, return_hidden_states=True)


def assert_states(completion: Completion, model: torch.nn.Module, sampled: slice = slice(None)) -> None:
    prompt, drawn = completion.prompt_token_ids, completion.token_ids
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *drawn]])
        states = model.base_model(input_ids=ids, use_cache=False)[0][0]  # type: ignore[operator]
    assert completion.hidden_states is not None
    assert len(completion.hidden_states) == len(drawn)
    expected = states[len(prompt) - 1 : -1][sampled].float()
    given = torch.tensor(completion.hidden_states)[sampled]
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2", "opt", "bloom", "qwen3_moe"])
async def test_states_are_the_input_of_the_head(architecture: str) -> None:
    folder = tiny_model(architecture)
    prompts = [[5], [9, 8, 7, 6], [70, 71, 72], [9, 8, 7, 6], list(range(40))]
    plain = STATES.model_copy(update={"return_hidden_states": False})
    async with create_engine("transformers", model=str(folder), isolation="inline", max_num_seqs=3) as engine:
        both = [engine.generate(prompts, STATES), engine.generate(prompts, plain), engine.generate(prompts, STATES)]
        first, without, again = await asyncio.gather(*both)
    reference = oracle.load(folder)
    for completion in (*first.completions, *again.completions):
        assert_states(completion, reference)
    assert [completion.hidden_states for completion in without.completions] == [None] * len(prompts)


async def test_states_end_where_the_sample_is_cut(engine: InferenceEngine, model: Path) -> None:
    letters = ActionMask(allowed_token_ids=tuple(range(ord("a"), ord("z"))))
    params = STATES.model_copy(update={"temperature": 1.0, "seed": 3, "logit_processors": (letters,)})
    (whole,) = (await engine.generate("x", params)).completions
    (cut,) = (await engine.generate("x", params.model_copy(update={"stop": (whole.text[5:7],)}))).completions
    assert 0 < len(cut.token_ids) < len(whole.token_ids)
    assert_states(cut, oracle.load(model))


async def test_no_token_has_no_state(engine: InferenceEngine) -> None:
    params = STATES.model_copy(update={"max_new_tokens": 0, "ignore_eos": False})
    (completion,) = (await engine.generate("x", params)).completions
    assert completion.hidden_states == []


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_states_are_of_the_weights_that_drew_the_token(open_engine: OpenEngine, mode: PauseMode) -> None:
    other = tiny_model("qwen2", seed=1)
    long = STATES.model_copy(update={"max_new_tokens": 300})
    async with open_engine() as engine:
        task = asyncio.create_task(engine.generate("x", long))
        await until_running(engine, 1)
        await engine.load_weights_from_disk(str(other), "other", mode=mode)
        (completion,) = (await asyncio.wait_for(task, HANGING)).completions
    first = completion.weight_versions[0]
    assert first.version == "initial"
    assert_states(completion, oracle.load(tiny_model("qwen2")), slice(0, first.end))
    assert completion.hidden_states is not None
    assert len(completion.hidden_states) == 300
    if mode is PauseMode.RETRACT:  # its cache was recomputed, so all of the rest is of the new weights
        assert_states(completion, oracle.load(other), slice(first.end, None))


async def test_states_are_of_the_requests_adapter(open_engine: OpenEngine, model: Path, tmp_path: Path) -> None:
    adapter = save_adapters(model, tmp_path) / "one"
    async with open_engine(enable_lora=True) as engine:
        await engine.load_lora_adapter("a", str(adapter))
        with_it, without = await asyncio.gather(
            engine.generate([[5, 6, 7]], STATES, lora="a"), engine.generate([[5, 6, 7]], STATES)
        )
    assert_states(without.completions[0], oracle.load(model))
    from peft import PeftModel

    base = copy.deepcopy(oracle.load(model))  # which others use too
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    assert_states(with_it.completions[0], merged)
