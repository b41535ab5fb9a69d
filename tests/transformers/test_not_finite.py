"""A diverged model: its requests end in a typed error, and later requests are unaffected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import oracle
from drivetrain import NonFiniteLogits, SamplingParams
from drivetrain_weight_sync import WeightSync
from engines import OpenEngine

PROMPTS = [[(i * k + 5) % 250 for i in range(5 + k)] for k in range(1, 9)]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0, logprobs=0, ignore_eos=True)


async def test_requests_of_diverged_weights_end_in_a_typed_error_and_later_ones_are_right(
    open_engine: OpenEngine, model: Path
) -> None:
    good = AutoModelForCausalLM.from_pretrained(model).eval()
    bad = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        bad.model.layers[0].mlp.down_proj.weight.mul_(1e25)
        bad.model.layers[0].mlp.up_proj.weight.mul_(1e25)
    async with open_engine() as engine:
        async with WeightSync.connect(bad, engine) as sync:
            await sync.push(version="diverged")
        for fields in ({"temperature": 0}, {"seed": 1}, {"logprobs": None}, {"prompt_logprobs": 0}, {"top_p": 0.9}):
            params = SamplingParams.model_validate({"max_new_tokens": 4, "logprobs": 0, "ignore_eos": True, **fields})
            with pytest.raises(NonFiniteLogits, match="diverged-request"):
                await engine.generate(PROMPTS[0], params, request_ids=["diverged-request"])
        results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in PROMPTS), return_exceptions=True)
        assert [type(result) for result in results] == [NonFiniteLogits] * len(PROMPTS)
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        async with WeightSync.connect(good, engine) as sync:
            await sync.push(version="good")
        for completion in (await engine.generate(PROMPTS, GREEDY)).completions:
            expected = oracle.logprobs_of(oracle.load(model), completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
