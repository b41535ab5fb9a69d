"""A real engine of BACKEND takes stacked experts, and answers as one that loaded their files; ``make test-experts``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightSync

BACKEND = os.environ.get("BACKEND", "sglang")
PARAMS = SamplingParams(max_new_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(20, 40))]
TOLERANCE = 1e-5
"""Nats by which logprobs of two runs may differ: an engine rounds otherwise when it batches otherwise."""
Answers = list[tuple[list[int], Any]]

SOURCES: Mapping[str, Callable[[Any], Any]] = {
    "module": lambda policy: policy,
    "state dict": lambda policy: policy.state_dict(),
    "named tensors": lambda policy: lambda: policy.state_dict().items(),
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def answers(engine: InferenceEngine) -> Answers:
    found = [(await engine.generate([prompt], PARAMS)).completions[0] for prompt in PROMPTS]
    return [(completion.token_ids, pytest.approx(completion.logprobs, abs=TOLERANCE)) for completion in found]


def plain(found: Answers) -> Answers:
    return [(token_ids, logprobs.expected) for token_ids, logprobs in found]


def engine_of(folder: str) -> InferenceEngine:
    return create_engine(BACKEND, model=folder, dtype="float32")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_stacked_experts_answer_as_a_fresh_load_of_their_files(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, architecture: str
) -> None:
    policy: Any = AutoModelForCausalLM.from_pretrained(tiny_model(architecture), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    assert any(parameter.ndim == 3 for parameter in policy.parameters()), "this transformers stacks no experts"
    saved = tiny_model(architecture, directory=tmp_path / "saved")
    policy.save_pretrained(saved)

    async def fresh() -> Answers:
        async with engine_of(str(saved)) as engine:
            return await answers(engine)

    async def pushed() -> dict[str, Answers]:
        found = {}
        async with engine_of(str(tiny_model(architecture))) as engine:
            found["before"] = await answers(engine)
            for name, source in SOURCES.items():
                async with WeightSync.connect(source(policy), engine) as sync:
                    await sync.push(version=name)
                found[name] = await answers(engine)
                with torch.no_grad():
                    policy.lm_head.weight.mul_(-1)
                async with WeightSync.connect(policy, engine) as sync:
                    await sync.push(version="another")
                assert plain(await answers(engine)) != found[name]
                with torch.no_grad():
                    policy.lm_head.weight.mul_(-1)
        return found

    found = loop.run_until_complete(pushed())
    wanted = loop.run_until_complete(fresh())
    assert plain(found.pop("before")) != wanted
    for name, answer in found.items():
        assert plain(answer) == wanted, name
