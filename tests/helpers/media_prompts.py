"""Prompts with media beside them, and checks of their answers against the model's own forward pass and ``generate``."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain import (
    Completion,
    FinishReason,
    InferenceEngine,
    PauseMode,
    SamplingParams,
    TokenPrompt,
)
from drivetrain.backend.base import GenerateRequest
from drivetrain.types.prompts import MediaInput
from drivetrain_conformance.harness.testbench import check_held
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.media_preparation import MediaPreparation
from drivetrain_transformers.row_media import RowMedia
from engines import HANGING, until_running

WITHIN = 1e-4
"""Nats by which a logprob may differ from the reference's."""
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
START, END, PLACE = 260, 261, 262
"""Token ids before, after and in place of a medium."""


@dataclass(frozen=True)
class MediaPrompt(ABC):
    """Token ids in which -1 - i stands for medium i."""

    ids: tuple[int, ...]
    media: tuple[Any, ...] = ()

    @abstractmethod
    def as_input(self, medium: Any) -> MediaInput:
        """Return a medium as a request brings it."""

    @property
    def given(self) -> TokenPrompt:
        ids = itertools.chain.from_iterable((START, PLACE, END) if one < 0 else (one,) for one in self.ids)
        return TokenPrompt(token_ids=tuple(ids), media=tuple(map(self.as_input, self.media)))


class Reference(ABC):
    """A model's own forward pass: one row, no cache, all media by the model's processor."""

    model: Any

    @abstractmethod
    def inputs(self, ids: Sequence[int], media: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for a prompt whose placeholders are expanded."""

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], media: Sequence[Any]) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self.inputs(ids, media)).logits[0]
        return logits.log_softmax(-1)

    @torch.no_grad()
    def states(self, ids: Sequence[int], media: Sequence[Any]) -> torch.Tensor:
        states: torch.Tensor = self.model.base_model(**self.inputs(ids, media))[0][0]
        return states


async def answers(
    engine: InferenceEngine, prompts: Sequence[MediaPrompt], params: SamplingParams = GREEDY
) -> list[Completion]:
    return (await engine.generate([prompt.given for prompt in prompts], params)).completions


def check_answer(completion: Completion, prompt: MediaPrompt, by: Reference, since: int = 0) -> None:
    """Raise unless the tokens from ``since`` on, up to the first sampled placeholder, have the model's logprobs."""
    drawn, asked = completion.token_ids, completion.prompt_token_ids
    end = next((at for at, token in enumerate(drawn) if token == PLACE and prompt.media), len(drawn))
    known = drawn[: end + 1]
    rows = by.logprobs([*asked, *known[:-1]], prompt.media)[len(asked) - 1 :]
    assert completion.logprobs is not None
    for at in range(since, len(known)):
        assert abs(float(rows[at, known[at]]) - completion.logprobs[at]) <= WITHIN


async def check_answers(
    engine: InferenceEngine, prompts: Sequence[MediaPrompt], by: Reference, params: SamplingParams = GREEDY
) -> list[Completion]:
    """Generate, and compare the samples of each prompt with the reference."""
    completions = await answers(engine, prompts, params)
    for index, completion in enumerate(completions):
        check_answer(completion, prompts[index // params.n], by)
    return completions


async def check_against_generate(engine: InferenceEngine, prompts: Sequence[MediaPrompt], by: Reference) -> None:
    """Raise unless greedy answers begin like those of the model's own ``generate``, up to a placeholder."""
    for completion, prompt in zip(await answers(engine, prompts), prompts, strict=True):
        inputs = by.inputs(completion.prompt_token_ids, prompt.media)
        made = by.model.generate(**inputs, max_new_tokens=12, do_sample=False)
        given = made[0, len(completion.prompt_token_ids) :].tolist()
        end = next((at for at, token in enumerate(given) if token == PLACE), len(given))
        assert completion.token_ids[:end] == given[:end]
        assert end > 0


async def check_scores_and_states(engine: InferenceEngine, prompts: Sequence[MediaPrompt], by: Reference) -> None:
    """Raise unless prompt logprobs and hidden states are the model's."""
    params = GREEDY.model_copy(update={"prompt_logprobs": 2, "return_hidden_states": True, "max_new_tokens": 4})
    for completion, prompt in zip(await answers(engine, prompts, params), prompts, strict=True):
        asked = completion.prompt_token_ids
        assert completion.prompt_logprobs is not None
        expected = by.logprobs(asked, prompt.media)[:-1].gather(-1, torch.tensor(asked[1:])[:, None])[:, 0]
        scored = torch.tensor(completion.prompt_logprobs[1:])
        assert float((scored - expected).abs().max() if len(asked) > 1 else 0) <= WITHIN
        states = by.states(asked, prompt.media)[-1]
        assert completion.hidden_states is not None
        torch.testing.assert_close(torch.tensor(completion.hidden_states[0]), states, rtol=1e-3, atol=2e-3)


async def check_pauses(engine: InferenceEngine, prompts: Sequence[MediaPrompt], mode: PauseMode) -> None:
    """Raise unless long answers are the same with three pauses; ``TooLate`` if they end before these."""
    long = GREEDY.model_copy(update={"max_new_tokens": 200})
    whole = await answers(engine, prompts, long)
    await engine.reset_prefix_cache()
    task = asyncio.create_task(answers(engine, prompts, long))
    await until_running(engine, len(prompts))
    for _ in range(3):
        await engine.pause_generation(mode)
        await check_held(engine, task)
        await engine.continue_generation()
    for one, other in zip(await asyncio.wait_for(task, HANGING), whole, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=WITHIN)


def with_other_weights(folder: Path, to: Path, of: Callable[[str], bool]) -> Path:
    """Copy a model, changing the tensors for whose name ``of`` returns True."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = list(filter(of, tensors))
    assert changed
    for name in changed:
        tensors[name] += torch.randn(tensors[name].shape, generator=generator) * tensors[name].std().nan_to_num() * 0.5
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


async def check_update(
    engine: InferenceEngine,
    prompts: Sequence[MediaPrompt],
    mode: PauseMode,
    by: Reference,
    other: Path,
    later: Reference,
) -> None:
    """Raise unless a load of ``other`` takes effect at once, also for what was computed of the media before."""
    long = GREEDY.model_copy(update={"max_new_tokens": 150})
    before = await check_answers(engine, prompts, by)
    task = asyncio.create_task(answers(engine, prompts, long))
    await until_running(engine, len(prompts))
    await engine.load_weights_from_disk(str(other), "other", mode=mode)
    in_flight = await asyncio.wait_for(task, HANGING)
    after = await check_answers(engine, prompts, later)
    await check_answers(engine, prompts, later)
    for index, prompt in enumerate(prompts):
        assert before[index].logprobs != pytest.approx(after[index].logprobs, abs=10 * WITHIN)
        if mode is PauseMode.RETRACT and len(in_flight[index].weight_versions) > 1:
            check_answer(in_flight[index], prompt, later, in_flight[index].weight_versions[0].end)


async def check_cached_prefixes(
    engine: InferenceEngine, made: Callable[..., MediaPrompt], media: tuple[Any, Any, Any], by: Reference
) -> None:
    """Raise unless a cached prefix holds each medium whole or not at all; the second of ``media`` is like the first."""
    one, like, other = media
    text = tuple(range(20, 60))
    (begun,) = await answers(engine, [made((1, 2, 3, 4, 5, -1, 9, 9, 9), (one,))])
    start = begun.prompt_token_ids.index(PLACE)
    end = start + begun.prompt_token_ids.count(PLACE)
    # Whole blocks of 16 are cached; the common beginning of the first two prompts ends after the medium's end token.
    common = (end + 1) // 16 * 16
    kept = end + 2 + len(text)
    for prompt, cached in (
        (made((1, 2, 3, 4, 5, -1, 8, *text), (one,)), start if start < common < end else common),
        (made((1, 2, 3, 4, 5, -1, 9, 9, 9), (like,)), 0),
        (made((1, 2, 3, 4, 5, -1, 8, *text, -2), (one, other)), kept // 16 * 16),
        (made((1, 2, 3, 4, 5, -1, 8, *text, -2), (one, like)), None),
    ):
        (completion,) = await check_answers(engine, [prompt], by)
        assert cached is None or completion.cached_tokens == cached


async def check_abort_while_prepared(opened: AbstractAsyncContextManager[InferenceEngine], prompt: MediaPrompt) -> None:
    """Raise unless an abort that comes while media are prepared ends the request, and no later one of the same id."""
    reached, aborted, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    prepare, abort = MediaPreparation.of, TransformersBackend.abort

    async def slow(self: MediaPreparation[Any], request: GenerateRequest) -> RowMedia | None:
        reached.set()
        await go_on.wait()
        return await prepare(self, request)

    async def noted(self: TransformersBackend, request_ids: list[str]) -> None:
        await abort(self, request_ids)
        aborted.set()

    async def answer(engine: InferenceEngine, tokens: int) -> Completion:
        params = GREEDY.model_copy(update={"max_new_tokens": tokens})
        return (await engine.generate(prompt.given, params, request_ids=["a"])).completions[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaPreparation, "of", slow)
        patch.setattr(TransformersBackend, "abort", noted)
        async with asyncio.timeout(HANGING), opened as engine:
            task = asyncio.create_task(answer(engine, 900))
            await reached.wait()
            aborting = asyncio.create_task(engine.abort_generation())
            await aborted.wait()
            go_on.set()
            await aborting
            completion = await task
            assert completion.finish_reason is FinishReason.ABORT
            assert len(completion.token_ids) < 900
            for _ in range(2):
                assert (await answer(engine, 3)).finish_reason is FinishReason.LENGTH
                await engine.abort("a")


async def check_adapter(
    engine: InferenceEngine, prompts: Sequence[MediaPrompt], by: Reference, merged: Reference
) -> None:
    """Raise unless rows with and without the adapter ``a`` are each answered by their own weights, twice."""
    given = [prompt.given for prompt in prompts]
    for _ in range(2):  # the second time from the prefix cache
        both = await asyncio.gather(engine.generate(given, GREEDY), engine.generate(given, GREEDY, lora="a"))
        for output, model in zip(both, (by, merged), strict=True):
            for completion, prompt in zip(output.completions, prompts, strict=True):
                check_answer(completion, prompt, model)
