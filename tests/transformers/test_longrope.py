"""Longrope: each row of a batch uses the factors for its own length, whatever is beside it, as rows grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain import Completion, InferenceEngine, PauseMode, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from drivetrain.testing.tiny_model import ConfigValue
from engines import until_running

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = 64
"""Longest sequence, in tokens, for the model's short factors."""
PARAMS = SamplingParams(max_new_tokens=40, temperature=0, logprobs=0, ignore_eos=True)
LONG = [(index * 7) % 250 for index in range(150)]


@pytest.fixture(scope="module")
def folder() -> Path:
    rope: ConfigValue = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 32,
        "long_factor": [8.0] * 32,
        "original_max_position_embeddings": SHORT,
    }
    return tiny_model("phi3", max_position_embeddings=512, original_max_position_embeddings=SHORT, rope_parameters=rope)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine("transformers", model=str(folder), isolation="inline", device="cpu") as engine:
        yield engine


@torch.no_grad()
def check(model: PreTrainedModel, completion: Completion) -> None:
    """Check that each token is the likeliest of a plain forward pass over its prefix, and has its logprob there."""
    assert completion.logprobs is not None
    ids = completion.prompt_token_ids + completion.token_ids
    for at, logprob in enumerate(completion.logprobs, len(completion.prompt_token_ids)):
        row = model(torch.tensor([ids[:at]])).logits[0, -1].log_softmax(-1)
        assert abs(row[ids[at]].item() - logprob) < 1e-3, f"token {at}"
        assert row.max().item() - logprob < 1e-3, f"token {at}"


async def test_rows_of_either_length_in_one_batch(engine: InferenceEngine, plain: PreTrainedModel) -> None:
    prompts = [LONG[:5], LONG, LONG[20:28], LONG[: SHORT - 1], LONG[:SHORT], LONG[: SHORT + 1]]
    for completion in (await engine.generate(prompts, PARAMS)).completions:
        check(plain, completion)


async def test_a_row_that_grows_long_while_others_do_not(engine: InferenceEngine, plain: PreTrainedModel) -> None:
    output = await engine.generate([LONG[3 : SHORT - 11], LONG[7:9], LONG[9 : SHORT - 5]], PARAMS)
    for completion in output.completions:
        check(plain, completion)


async def test_a_cached_prefix_serves_rows_of_its_own_factors_only(
    engine: InferenceEngine, plain: PreTrainedModel
) -> None:
    await engine.reset_prefix_cache()
    one = SamplingParams(max_new_tokens=1, temperature=0, logprobs=0, ignore_eos=True)
    for length in (SHORT - 4, SHORT + 30, SHORT - 4, SHORT + 30, SHORT - 6, SHORT + 20):
        (completion,) = (await engine.generate(LONG[:length], one)).completions
        check(plain, completion)
    assert completion.cached_tokens > 0


async def test_a_row_that_was_retracted_and_grows_long(engine: InferenceEngine, plain: PreTrainedModel) -> None:
    running = asyncio.create_task(engine.generate(LONG[2 : SHORT - 10], PARAMS))
    await until_running(engine, 1)
    await engine.pause_generation(PauseMode.RETRACT)
    await engine.continue_generation()
    check(plain, (await running).completions[0])


async def test_scores_are_those_of_one_pass_of_the_whole_sequence(
    engine: InferenceEngine, plain: PreTrainedModel
) -> None:
    sequences = [LONG[:9], LONG, LONG[: SHORT + 1]]
    for sequence, scored in zip(sequences, (await engine.compute_logprobs(sequences)).completions, strict=True):
        with torch.no_grad():
            rows = plain(torch.tensor([sequence])).logits[0].log_softmax(-1)
        wanted = [rows[at, token].item() for at, token in enumerate(sequence[1:])]
        assert scored.prompt_logprobs is not None
        torch.testing.assert_close(torch.tensor(scored.prompt_logprobs[1:]), torch.tensor(wanted), rtol=0, atol=1e-3)


async def test_a_context_of_the_short_length_is_served_as_any(folder: Path, plain: PreTrainedModel) -> None:
    async with create_engine("transformers", model=str(folder), device="cpu", context_length=SHORT) as engine:
        for completion in (await engine.generate([LONG[:5], LONG[:24]], PARAMS)).completions:
            check(plain, completion)
