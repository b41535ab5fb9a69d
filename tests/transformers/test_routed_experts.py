"""Experts that the transformers backend returns, beside those of one pass over all ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, JetMoeConfig, JetMoeForCausalLM

from drivetrain import Capability, Completion, PauseMode, SamplingParams, UnsupportedCapability, create_engine
from drivetrain.testing import tiny_model

ASKED = SamplingParams(
    max_new_tokens=12, ignore_eos=True, return_routed_experts=True, return_prompt_routed_experts=True, seed=1
)


def check(model: Path, completion: Completion) -> None:
    """Compare all experts with the largest router logits of one pass."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids[:-1]])
    with torch.no_grad():
        logits = policy(input_ids=ids, output_router_logits=True).router_logits
    assert completion.routed_experts is not None
    assert completion.prompt_routed_experts is not None
    found = (completion.prompt_routed_experts[:-1] + completion.routed_experts).to_numpy()
    best = torch.stack([layer.topk(found.shape[-1]).indices for layer in logits], dim=1)
    assert (np.sort(found) == np.sort(best.numpy())).all()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
async def test_experts_outlast_batches_retractions_and_cached_prefixes(architecture: str) -> None:
    model = tiny_model(architecture)
    async with create_engine("transformers", model=str(model), isolation="inline", max_num_seqs=3) as engine:
        prompts = [[5, 6, 7], list(range(20, 90)), [8, 9, 10, 11], list(range(20, 100))]
        stream = engine.generate_stream(prompts[1], ASKED.model_copy(update={"max_new_tokens": 40}))
        chunks = [await anext(stream)]
        batch = await engine.generate(prompts, ASKED)
        await engine.pause_generation(PauseMode.RETRACT)
        await engine.continue_generation()
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].completion is not None
        for completion in (*batch.completions, chunks[-1].completion):
            check(model, completion)


async def test_a_dense_model_does_not_claim_them(model: Path) -> None:
    engine = create_engine("transformers", model=str(model))
    assert not engine.capabilities & {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}


@pytest.fixture
def unseen(model: Path, tmp_path: Path) -> Path:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    config = JetMoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=32,
        num_local_experts=4,
    )
    JetMoeForCausalLM(config).save_pretrained(tmp_path)
    for file in model.glob("*token*"):
        shutil.copy(file, tmp_path)
    return tmp_path


async def test_layers_that_do_not_show_their_choice_are_refused(unseen: Path) -> None:
    async with create_engine("transformers", model=str(unseen), isolation="inline") as engine:
        with pytest.raises(UnsupportedCapability, match="do not show which experts"):
            await engine.generate([5, 6], ASKED)
        assert (await engine.generate([5, 6], {"max_new_tokens": 2})).completions
