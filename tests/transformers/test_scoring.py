"""Scores of given sequences: of any architecture, in small parts, whatever the model does after its layers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import drivetrain_transformers.scoring
import oracle
from drivetrain import (
    Completion,
    EngineState,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    PauseMode,
    WeightUpdateRequest,
    create_engine,
    hookimpl,
)
from drivetrain.backend.base import Backend, TokenDelta
from drivetrain.backend.registry import register, unregister
from drivetrain.testing import tiny_model
from drivetrain.types.weights import ApplyUpdate, LoraSource, WeightReply
from drivetrain_sampling.scores import score_rows
from drivetrain_transformers.engine import TransformersBackend
from drivetrain_transformers.model import LoadedModel
from engines import HANGING, until, until_generating
from tiny_adapters import save_adapters

pytestmark = pytest.mark.asyncio(loop_scope="session")


def assert_scores(completion: Completion, ids: np.ndarray, model: torch.nn.Module, temperature: float) -> None:
    tokens, found = completion.prompt_token_ids, completion.scores
    assert found is not None
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
    rows = (logits / temperature).log_softmax(-1)[-1 - len(ids) : -1]
    torch.testing.assert_close(torch.tensor(found.at_logprobs), rows.gather(-1, torch.tensor(ids)), rtol=0, atol=1e-4)
    best = rows.topk(found.top_k)
    torch.testing.assert_close(torch.tensor(found.top_logprobs), best.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["qwen2", "gemma2", "gpt2", "opt", "bloom", "qwen3_moe", "granitemoehybrid", "qwen3_next", "mamba2"]
)
async def test_any_architecture_is_scored(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivetrain_transformers.scoring, "LOGITS_AT_ONCE", 1000)  # of three positions
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 250, size=length).tolist() for length in (3, 33, 90)]
    at = [rng.integers(0, 260, size=(2, 4)) for _ in sequences]
    folder = tiny_model(architecture)
    async with create_engine("transformers", model=str(folder), isolation="inline") as engine:
        for _ in range(2):
            output = await engine.compute_logprobs(sequences, at=at, last_n=2, temperature=0.7, top_k=3)
            for completion, ids in zip(output.completions, at, strict=True):
                assert_scores(completion, ids, oracle.load(folder), 0.7)
            await engine.generate(sequences, {"max_new_tokens": 1})


@pytest.mark.parametrize(("architecture", "apart"), [("gemma2", True), ("opt", False)])
async def test_the_head_is_run_apart_where_it_can_be(
    architecture: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    head = LoadedModel.head

    def counting(model: LoadedModel, before_head: torch.Tensor, adapter: str | None) -> torch.Tensor:
        rows.append(len(before_head))
        return head(model, before_head, adapter)

    async with create_engine("transformers", model=str(tiny_model(architecture)), isolation="inline") as engine:
        monkeypatch.setattr(LoadedModel, "head", counting)
        await engine.compute_logprobs([list(range(1, 100)), list(range(1, 50))], last_n=[7, 5])
    assert rows == ([12] if apart else [])


async def test_logits_are_computed_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def counting(logits: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
        shapes.append(tuple(logits.shape))
        return score_rows(logits, *more)

    monkeypatch.setattr(drivetrain_transformers.scoring, "score_rows", counting)
    async with create_engine("transformers", model=str(model), isolation="inline") as engine:
        vocabulary = engine.model_info.vocab_size
        monkeypatch.setattr(drivetrain_transformers.scoring, "LOGITS_AT_ONCE", 10 * vocabulary)
        await engine.compute_logprobs([list(range(1, 36))], temperature=1.0)
    assert shapes == [(10, vocabulary)] * 3 + [(4, vocabulary)]


async def test_tokens_and_scores_of_one_request_outlast_a_retraction(engine: InferenceEngine, model: Path) -> None:
    prompts = np.random.default_rng(6).integers(1, 250, size=(2, 40)).tolist()
    at = np.arange(117).reshape(39, 3)
    params = {"max_new_tokens": 300, "ignore_eos": True, "logprobs": 0, "n": 2}
    scoring = engine.compute_logprobs(prompts, at=[at] * 2, last_n=39, temperature=0.7, top_k=2, sampling_params=params)
    task = asyncio.create_task(scoring)
    await until_generating(engine, 4)
    await engine.pause_generation("retract")
    await engine.continue_generation()
    completions = (await asyncio.wait_for(task, HANGING)).completions
    plain = oracle.load(model)
    for completion in completions:
        assert len(completion.token_ids) == 300
        expected = oracle.logprobs_of(plain, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
        if completion.sample_index:
            assert completion.scores is None, "one completion of each prompt has its scores"
        else:
            assert_scores(completion, at, plain, 0.7)


async def test_prefixes_are_reused_up_to_the_first_position(engine: InferenceEngine) -> None:
    prompt = np.random.default_rng(5).integers(1, 250, size=100).tolist()
    await engine.generate([prompt], {"max_new_tokens": 1})
    for last_n, cached in ((1, 96), (3, 96), (4, 80), (20, 64), (99, 0), (100, 0)):
        (scored,) = (await engine.compute_logprobs([prompt], last_n=last_n)).completions
        assert scored.cached_tokens == cached


class LateToCommit(TransformersBackend):
    """Does not say which weights scored a prompt, and scores it between an update and the update's reply.

    A prompt is scored earlier if the test sets ``updated``.
    """

    name = "late-to-commit"
    asked: ClassVar[asyncio.Event]
    updated: ClassVar[asyncio.Event]
    scored: ClassVar[asyncio.Event]
    times: ClassVar[int]
    """How many times a prompt was scored."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        async with aclosing(self.stream(request)) as deltas:
            (result,) = [delta.result async for delta in deltas]
        assert result is not None
        return result

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.asked.set()
        await self.updated.wait()
        try:
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    assert delta.result is not None
                    yield dataclasses.replace(delta, result=dataclasses.replace(delta.result, weight_versions=[]))
        finally:
            LateToCommit.times += 1
            self.scored.set()

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        reply = await super().apply_weights(update)
        self.updated.set()
        await self.scored.wait()
        return reply


@pytest.fixture
def late_to_commit() -> Iterator[str]:
    class Plugin:
        @hookimpl
        def drivetrain_backends(self) -> list[type[Backend]]:
            return [LateToCommit]

    LateToCommit.asked, LateToCommit.updated, LateToCommit.scored = (asyncio.Event() for _ in range(3))
    LateToCommit.times = 0
    plugin = Plugin()
    register(plugin)
    yield LateToCommit.name
    unregister(plugin)


async def score(engine: InferenceEngine, stream: bool) -> Completion:
    if not stream:
        return (await engine.compute_logprobs([[1, 2, 3]])).completions[0]
    params = {"max_new_tokens": 0, "prompt_logprobs": 0}
    chunks = [chunk async for chunk in engine.generate_stream([[1, 2, 3]], params)]
    completion = chunks[-1].completion
    assert completion is not None
    return completion


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_that_an_update_waits_for_are_of_the_old_weights(
    late_to_commit: str, stream: bool, model: Path, other_model: Path
) -> None:
    """They are not made a second time."""
    async with create_engine(late_to_commit, model=str(model), isolation="inline", weight_version="old") as engine:
        asking = asyncio.create_task(score(engine, stream))
        await LateToCommit.asked.wait()
        updating = asyncio.create_task(engine.load_weights_from_disk(str(other_model), "new", mode=PauseMode.WAIT))
        await until(lambda: engine.state is EngineState.UPDATING)
        LateToCommit.updated.set()
        await updating
        assert (await asking).weight_version == "old"
        assert LateToCommit.times == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_the_base_are_made_once_beside_an_adapters_update(
    late_to_commit: str, stream: bool, model: Path, tmp_path: Path
) -> None:
    """The update gives the engine another version and changes no weights of the base. So does a new name for them."""
    source = LoraSource(path=str(save_adapters(model, tmp_path) / "one"), lora_name="one")
    fields = {"isolation": "inline", "weight_version": "old", "enable_lora": True}
    async with create_engine(late_to_commit, model=str(model), **fields) as engine:
        asking = asyncio.create_task(score(engine, stream))
        await LateToCommit.asked.wait()
        await engine.update_named_weights(WeightUpdateRequest(version="adapted", source=source, mode=PauseMode.ABORT))
        await engine.update_weight_version("renamed")
        LateToCommit.updated.set()
        found = await asking
        assert LateToCommit.times == 1
        assert found.weight_version == "old"
        assert found.prompt_logprobs == (await score(engine, stream)).prompt_logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_are_labelled_with_the_weights_that_made_them_before_an_update_ends(
    late_to_commit: str, stream: bool, model: Path, other_model: Path
) -> None:
    """The backend serves the new weights as soon as they are there, and the engine knows of it with the reply."""
    async with create_engine(late_to_commit, model=str(model), isolation="inline", weight_version="old") as engine:
        asking = asyncio.create_task(score(engine, stream))
        await LateToCommit.asked.wait()
        await engine.load_weights_from_disk(str(other_model), "new", mode=PauseMode.RETRACT)
        assert (await asking).weight_version == "new"
