"""Logprobs of every architecture, in batches that requests join and leave, beside an independent forward pass."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import torch

import oracle
from drivetrain import Completion, SamplingParams, create_engine
from drivetrain.testing import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARCHITECTURES = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt",
                 "bloom", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "granitemoehybrid", "falcon_h1",
                 "nemotron_h", "lfm2", "mamba2"]  # fmt: skip

ONE_OF_EACH_KIND = {"qwen2", "gemma3_text", "gpt2", "bloom", "qwen3_moe", "gpt_oss", "qwen3_next", "mamba2"}

TOLERANCES = {"nemotron_h": 5e-3, "qwen3_next": 1e-3}
"""Nats. In float32, transformers' own single steps differ from its pass over all tokens by up to 1.8e-3 and 3e-4."""


def assert_logprobs(completion: Completion, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "architecture",
    [one if one in ONE_OF_EACH_KIND else pytest.param(one, marks=pytest.mark.slow) for one in ARCHITECTURES],
)
async def test_requests_that_join_and_leave_a_running_batch_get_the_models_own_logprobs(architecture: str) -> None:
    folder = tiny_model(architecture)
    draw = random.Random(0)
    prompts = [[draw.randrange(250) for _ in range(draw.choice([1, 3, 17, 40, 64]))] for _ in range(10)]
    prompts += [prompts[3], prompts[3], prompts[4] + [5, 6, 7]]
    async with create_engine("transformers", model=str(folder), max_num_seqs=6) as engine:

        async def ask(prompt: list[int], seed: int) -> list[Completion]:
            # The tokens are always the same: with random ones two experts might be equally likely within rounding.
            own = random.Random(seed)
            await asyncio.sleep(own.random() * 0.05)
            params = SamplingParams(
                max_new_tokens=own.choice([3, 10, 40]),
                n=own.choice([1, 2]),
                logprobs=0,
                temperature=0.7,
                seed=seed,
                ignore_eos=True,
            )
            return (await engine.generate([prompt], params)).completions

        seeds = itertools.count()
        first = await asyncio.gather(*map(ask, prompts, seeds))
        turns = [[*prompt, *group[0].token_ids, 7] for prompt, group in zip(prompts, first, strict=True)]
        rounds = [first, await asyncio.gather(*map(ask, prompts[:4] + turns, seeds))]
    reference = oracle.load(folder)
    completions = [completion for answers in rounds for group in answers for completion in group]
    assert sum(completion.cached_tokens for completion in completions) > 0, "the turns should reuse prefixes"
    for completion in completions:
        expected = oracle.logprobs_of(reference, completion, 0.7)
        assert_logprobs(completion, expected, TOLERANCES.get(architecture, 1e-4))
