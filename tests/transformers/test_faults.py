"""Faults inside a step of the real scheduler: out of memory, and errors that nobody expected."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

import oracle
from drivetrain import EngineInternalError, EngineOutOfMemory, EngineState, InferenceEngine, SamplingParams
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.model import LoadedModel
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


def model_of(engine: InferenceEngine) -> LoadedModel:
    backend = cast(TransformersBackend, engine._backend)
    return backend._running.model


def limit_rows(model: LoadedModel, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every forward pass of more than ``most`` rows run out of memory; return the sizes that were tried."""
    tried: list[int] = []
    inner = model._forward

    def forward(tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        tried.append(tokens.shape[0])
        if tokens.shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return inner(tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "_forward", forward)
    return tried


async def test_out_of_memory_runs_fewer_at_once_and_loses_nothing(
    open_engine: OpenEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=20, seed=4, logprobs=0, ignore_eos=True)
    prompts = [f"prompt number {number}" for number in range(12)]
    async with open_engine() as engine:
        whole = await engine.generate(prompts, params)
    async with open_engine() as engine:
        tried = limit_rows(model_of(engine), 3, monkeypatch)
        output = await engine.generate(prompts, params)
        assert max(tried) > 3
        again = len(tried)
        assert (await engine.generate("alone", params)).completions[0].token_ids
        assert max(tried[again:]) == 1
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in whole.completions]
    for completion in output.completions:
        expected = oracle.logprobs_of(oracle.load(model), completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


async def test_a_request_that_never_fits_is_a_typed_error_and_the_engine_serves_on(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.flights.OUT_OF_MEMORY_DELAYS", (0.01, 0.02, 0.03))
    async with open_engine() as engine:
        with monkeypatch.context() as patch:
            tried = limit_rows(model_of(engine), 0, patch)
            with pytest.raises(EngineOutOfMemory, match="also after 3 retries") as caught:
                await engine.generate("too much", SamplingParams(max_new_tokens=4))
            assert caught.value.batch_size >= 1
            assert len(tried) >= 4
        assert engine.state is EngineState.READY
        assert (await engine.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True))).completions[0].token_ids


async def test_an_unexpected_error_ends_the_requests_in_flight_by_name_and_the_engine_serves_on(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("a kernel that nobody expected to fail")

    async with open_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(model_of(engine), "_forward", broken)
            with pytest.raises(EngineInternalError, match="RuntimeError: a kernel that nobody expected"):
                await engine.generate(["a", "b"], SamplingParams(max_new_tokens=4))
            with pytest.raises(EngineInternalError, match="nobody expected"):
                await anext(engine.generate_stream("streamed", SamplingParams(max_new_tokens=4)))
        assert engine.state is EngineState.READY
        assert (await engine.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True))).completions[0].token_ids
