"""Faults inside a step of the real scheduler: out of memory, and unexpected errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

import oracle
from drivetrain import (
    Completion,
    EngineDied,
    EngineInternalError,
    EngineOutOfMemory,
    EngineState,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    SamplingParams,
    TokenDelta,
)
from drivetrain.testing import tiny_model
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_sampling import Drawn, Row, Sampler
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.model import Computed, LoadedModel
from drivetrain_transformers.weights import Weights
from engines import HANGING, OpenEngine, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")


def model_of(engine: InferenceEngine) -> LoadedModel:
    backend = cast(TransformersBackend, engine.parts.backend)
    return backend.runner.model


def limit_rows(model: LoadedModel, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every forward pass of more than ``most`` rows run out of memory; return the sizes that were tried."""
    tried: list[int] = []
    inner = model.module.forward

    def forward(input_ids: torch.Tensor, **arguments: object) -> object:
        tried.append(len(input_ids))
        if len(input_ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return inner(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model.module, "forward", forward)
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


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_next"], ids=["attention", "recurrent"])
async def test_out_of_memory_in_the_middle_of_a_pass_loses_nothing(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """The first layers have written the cache when the last one runs out of memory, in a prefill or a decode step."""
    kinds: list[dict[str, object]] = [{"temperature": 0}, {"seed": 4}, {"frequency_penalty": 1.0, "temperature": 0}]
    params = [SamplingParams.model_validate({"max_new_tokens": 12, "ignore_eos": True, **kind}) for kind in kinds]
    prompts, folder = [f"prompt number {number}" for number in range(len(params))], tiny_model(architecture)
    async with open_engine(model=str(folder), enable_prefix_caching=False) as engine:
        whole = await engine.generate(prompts, params)
        last = model_of(engine).module.model.layers[-1].mlp
        inner, passes = last.forward, itertools.count()

        def forward(*arguments: object, **named: object) -> object:
            if next(passes) in (0, 3, 8):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return inner(*arguments, **named)

        monkeypatch.setattr(last, "forward", forward)
        output = await engine.generate(prompts, params)
        assert next(passes) > 8
        assert engine.state is EngineState.READY
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in whole.completions]


@pytest.mark.parametrize("task", ["embed", "reward"])
async def test_inputs_that_do_not_fit_together_are_embedded_and_scored_in_parts(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    inputs, models = [list(range(5, 8 + number)) for number in range(9)], Models()
    async with open_engine(model=str(models.path(ModelKind.REWARD)), task=task) as engine:

        async def numbers() -> torch.Tensor:
            return torch.tensor(await (engine.encode(inputs) if task == "embed" else engine.score(inputs, inputs)))

        whole = await numbers()
        base = model_of(engine).module.base_model
        inner, tried = base.forward, list[int]()

        def forward(input_ids: torch.Tensor, **arguments: object) -> object:
            tried.append(len(input_ids))
            if len(input_ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return inner(input_ids=input_ids, **arguments)

        with monkeypatch.context() as patch:
            patch.setattr(base, "forward", forward)
            most = 2
            torch.testing.assert_close(await numbers(), whole, rtol=0, atol=1e-4)
            assert max(tried) == len(inputs)
            most = 0
            with pytest.raises(EngineOutOfMemory, match=r"one input of \d+ tokens; give shorter ones") as caught:
                await numbers()
            assert caught.value.batch_size == 1
        torch.testing.assert_close(await numbers(), whole, rtol=0, atol=1e-4)
    models.close()


async def test_out_of_memory_beside_a_step_is_a_typed_error_and_the_call_can_be_repeated(
    open_engine: OpenEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0)
    async with open_engine() as engine:
        whole = await engine.generate("x", params)
        await engine.sleep(["weights"])
        with monkeypatch.context() as patch:

            def full(weights: Weights) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

            patch.setattr(Weights, "wake_up", full)
            with pytest.raises(EngineOutOfMemory, match="Tried to allocate"):
                await engine.wake_up()
        assert engine.state is EngineState.ASLEEP
        await engine.wake_up()
        await engine.load_weights_from_disk(str(model), "again")
        assert (await engine.generate("x", params)).completions[0].token_ids == whole.completions[0].token_ids


async def test_a_request_that_never_fits_is_a_typed_error_and_the_engine_serves_on(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.engine.requests_in_flight.OUT_OF_MEMORY_DELAYS", (0.01, 0.02, 0.03))
    async with open_engine() as engine:
        with monkeypatch.context() as patch:
            tried = limit_rows(model_of(engine), 0, patch)
            with pytest.raises(EngineOutOfMemory, match="also after 3 retries") as caught:
                await engine.generate("too much", SamplingParams(max_new_tokens=4))
            assert caught.value.batch_size >= 1
            assert len(tried) >= 4
        assert engine.state is EngineState.READY
        assert (await engine.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True))).completions[0].token_ids


async def test_a_stream_out_of_memory_is_tried_again_until_a_chunk_was_shown(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.engine.requests_in_flight.OUT_OF_MEMORY_DELAYS", (0.01, 0.02, 0.03))
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    async with open_engine() as engine:
        whole = (await engine.generate("streamed", params)).completions[0]
        module, fits = model_of(engine).module, iter([False, False, True, True, *[False] * 50])
        inner = module.forward

        def forward(**arguments: object) -> object:
            if not next(fits, True):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return inner(**arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, "forward", forward)
            shown: list[int] = []

            async def read() -> None:
                async for chunk in engine.generate_stream("streamed", params):
                    shown.extend(chunk.token_ids)

            with pytest.raises(EngineOutOfMemory, match="a stream, which cannot be generated twice"):
                await read()
            assert shown
            assert shown == whole.token_ids[: len(shown)]
            fits = iter([False, False, False])
            chunks = [chunk async for chunk in engine.generate_stream("streamed", params)]
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == whole.token_ids


async def test_an_unexpected_error_ends_the_requests_in_flight_by_name_and_the_engine_serves_on(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> Computed:
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


@pytest.mark.parametrize("steps", [0, 5], ids=["at its first token", "after some tokens"])
async def test_a_row_whose_step_fails_ends_alone_and_changes_no_other(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    odd = 666

    class Failing(Sampler):
        def draw(self, logits: torch.Tensor, raw: torch.Tensor | None = None) -> Drawn:
            if any(row.seed == odd and len(row.generated) >= steps for row in self._rows):
                raise RuntimeError("a row that cannot be drawn from")
            return super().draw(logits, raw)

    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"n": 2, "top_k": 5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"stop": "e", "temperature": 1.5},
        {"logit_bias": {65: 2.0}, "min_p": 0.01},
        {"structured_output": {"kind": "regex", "regex": "[a-p]{30}"}},
    ]
    params = [SamplingParams.model_validate({"max_new_tokens": 24, "seed": 4, "logprobs": 2, **kind}) for kind in kinds]
    prompts = [f"prompt number {number}" for number in range(len(params))]

    async def answers(engine: InferenceEngine) -> list[Completion]:
        """Return the answers to a call and a stream in one batch."""
        call = asyncio.create_task(engine.generate(prompts, params))
        chunks = [chunk async for chunk in engine.generate_stream(prompts[0], params[0])]
        (streamed,) = [chunk.completion for chunk in chunks if chunk.completion is not None]
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == streamed.token_ids
        return [*(await call).completions, streamed]

    async with open_engine(enable_prefix_caching=False) as engine:
        alone = await answers(engine)
        monkeypatch.setattr("drivetrain_transformers.scheduler.Sampler", Failing)
        failing = asyncio.create_task(engine.generate("odd", {"seed": odd, "max_new_tokens": 24, "ignore_eos": True}))
        beside = await answers(engine)
        with pytest.raises(EngineInternalError, match="RuntimeError: a row that cannot be drawn from"):
            await failing
        assert engine.state is EngineState.READY
        after = await answers(engine)
    for again in (beside, after):
        for one, other in zip(again, alone, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("token_id", [10**12, -5, 260])
async def test_ids_outside_the_vocabulary_reach_nobody(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, token_id: int
) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    async with open_engine() as engine:
        backend = engine.parts.backend
        generate, stream = backend.generate, backend.stream

        async def answer(request: GenerateRequest) -> GenerateResult:
            result = await generate(request)
            return replace(result, token_ids=[*result.token_ids[:-1], token_id])

        async def deltas(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async for delta in stream(request):
                yield replace(delta, token_ids=[token_id])

        with monkeypatch.context() as patch:
            patch.setattr(backend, "generate", answer)
            patch.setattr(backend, "stream", deltas)
            with pytest.raises(
                EngineInternalError, match=f"token id {token_id}, which is outside the vocabulary of 260"
            ):
                await engine.generate("x", params)
            with pytest.raises(EngineInternalError, match=f"token id {token_id}, which is outside"):
                await engine.generate("x", {"max_new_tokens": 4, "stop": "zzz"})  # its text is checked for stops
            with pytest.raises(EngineInternalError, match=f"token id {token_id}, which is outside"):
                await anext(engine.generate_stream("x", params))
        assert engine.state is EngineState.READY
        assert (await engine.generate("x", params)).completions[0].token_ids


async def test_a_thread_that_fails_ends_the_engine_at_once(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request_ids: object) -> None:
        raise RuntimeError("a command that nobody expected to fail")

    async with open_engine() as engine:
        backend = cast(TransformersBackend, engine.parts.backend)
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        waiting = asyncio.create_task(engine.generate("x", params, request_ids=["r"]))
        await until_running(engine, 1)
        monkeypatch.setattr(backend.runner.scheduler, "abort", broken)
        await engine.abort("r")
        with pytest.raises(EngineDied, match="thread of the transformers engine failed: RuntimeError: a command that"):
            async with asyncio.timeout(HANGING):
                await waiting
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineDied, match="a command that nobody expected"):  # the thread no longer exists
            await backend.stats()


async def test_what_is_asked_while_the_engine_closes_does_not_wait(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        runner = cast(TransformersBackend, engine.parts.backend).runner
    async with asyncio.timeout(HANGING):
        with pytest.raises(EngineInternalError, match="the engine was closed meanwhile"):
            await runner.call(lambda: None)


async def test_a_step_that_fails_before_its_forward_pass_ends_its_requests(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a part that nobody expected to fail")

    async with open_engine() as engine:
        whole = await engine.generate(["a", "b"], SamplingParams(max_new_tokens=4, temperature=0))
        with monkeypatch.context() as patch:
            running = asyncio.create_task(
                engine.generate("running", SamplingParams(max_new_tokens=900, ignore_eos=True), request_ids=["r"])
            )
            await until_running(engine, 1)
            patch.setattr("drivetrain_transformers.prefill.Budget", fail)
            async with asyncio.timeout(HANGING):
                with pytest.raises(EngineInternalError, match="RuntimeError: a part that nobody expected"):
                    await engine.generate(["a", "b"], SamplingParams(max_new_tokens=4))
                await engine.abort("r")
                await asyncio.wait([running])
            assert running.exception() is None or isinstance(running.exception(), EngineInternalError)
        again = await engine.generate(["a", "b"], SamplingParams(max_new_tokens=4, temperature=0))
        assert [one.token_ids for one in again.completions] == [one.token_ids for one in whole.completions]


async def test_running_requests_end_if_no_sampler_can_be_made_for_them(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Sampler):
        def __init__(self, rows: list[Row], device: torch.device) -> None:
            if any(row.generated for row in rows):
                raise RuntimeError("no sampler")
            super().__init__(rows, device)

    async with open_engine() as engine:
        monkeypatch.setattr("drivetrain_transformers.scheduler.Sampler", Failing)
        async with asyncio.timeout(HANGING):
            with pytest.raises(EngineInternalError, match="RuntimeError: no sampler"):
                await engine.generate(["a", "b"], SamplingParams(max_new_tokens=4, ignore_eos=True))
