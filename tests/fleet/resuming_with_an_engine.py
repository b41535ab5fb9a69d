"""A real engine of BACKEND goes on with a request from its tokens as if it had never been interrupted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.testing import tiny_model
from drivetrain.types.sampling import LogprobsMode
from drivetrain_fleet.resuming import SoFar, not_resumable

PROMPT = list(range(5, 25))
TOKENS, BREAK = 40, 17
STOPS = tuple(range(200))
"""Most of the vocabulary, so that only ``min_new_tokens`` keeps a request from ending at once."""
CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 3},
    "seed, two limits": {"seed": 4, "top_k": 20, "top_p": 0.9},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.0},
    "presence_penalty": {"seed": 5, "presence_penalty": 1.5},
    "schedule": {
        "seed": 6,
        "logit_processors": [{"kind": "temperature_schedule", "start": 0.5, "end": 3, "steps": 30}],
    },
    "min_new_tokens": {"seed": 7, "min_new_tokens": 30},
    "sampling mask": {"seed": 8, "top_p": 0.8, "return_sampling_mask": True},
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop: asyncio.AbstractEventLoop) -> Iterator[InferenceEngine]:
    engine = create_engine(os.environ.get("BACKEND", "transformers"), model=str(tiny_model()), dtype="float32")
    loop.run_until_complete(engine.start())
    yield engine
    loop.run_until_complete(engine.teardown())


def asked(name: str) -> GenerateRequest:
    params = SamplingParams.model_validate({"logprobs": 0, **CASES[name]})
    stops = STOPS if params.min_new_tokens else ()
    return GenerateRequest(name, PROMPT, params, TOKENS, stops, LogprobsMode.PROCESSED, seed=params.seed)


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_what_the_unbroken_request_had(
    loop: asyncio.AbstractEventLoop, engine: InferenceEngine, name: str
) -> None:
    backend, request = engine.parts.backend, asked(name)
    assert backend.counts_resumed_tokens
    assert not not_resumable(request, counted=True)

    def answer(one: GenerateRequest) -> GenerateResult:
        return loop.run_until_complete(backend.generate(one))

    unbroken = answer(request)
    assert len(unbroken.token_ids) > BREAK
    assert unbroken.logprobs is not None
    so_far = SoFar(request)
    mask = unbroken.sampling_mask
    before = None if mask is None else mask[:BREAK]
    so_far.add(TokenDelta(unbroken.token_ids[:BREAK], unbroken.logprobs[:BREAK], sampling_mask=before))
    assert so_far.resume(unbroken.weight_versions[0].version, counted=True) == ""
    joined = so_far.joined(answer(so_far.request))
    assert joined.token_ids == unbroken.token_ids
    assert joined.finish_reason is unbroken.finish_reason
    assert joined.weight_versions == unbroken.weight_versions
    assert joined.sampling_mask == unbroken.sampling_mask
    assert joined.logprobs == pytest.approx(unbroken.logprobs, abs=1e-3)
    if set(CASES[name]) - {"temperature", "repetition_penalty"}:
        forgotten = answer(replace(so_far.request, resumed_tokens=0))
        assert so_far.joined(forgotten).token_ids != unbroken.token_ids, "the case would not notice a lost count"
