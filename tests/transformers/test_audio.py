"""Sounds beside prompts, in every mixture of rows, compared with the model's own forward pass and ``generate``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from drivetrain import (
    AudioInput,
    Capability,
    EngineConfig,
    EngineError,
    EngineStartError,
    GenerationOutput,
    ImageInput,
    InvalidRequest,
    PauseMode,
    TokenPrompt,
    create_engine,
)
from drivetrain.testing import tiny_model
from drivetrain_conformance.assets.made_adapters import make_adapter, merge
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.row_media import MediaPass, RowMedia
from engines import tried_again
from media_prompts import (
    END,
    GREEDY,
    PLACE,
    START,
    WITHIN,
    MediaPrompt,
    answers,
    check_abort_while_prepared,
    check_adapter,
    check_against_generate,
    check_answer,
    check_answers,
    check_cached_prefixes,
    check_pauses,
    check_scores_and_states,
    check_update,
    with_other_weights,
)
from media_prompts import Reference as MediaReference

pytestmark = pytest.mark.asyncio(loop_scope="session")

RATE = 16_000
ENCODE = Qwen2AudioEncoder.forward

Sound = NDArray[np.float32]


class Prompt(MediaPrompt):
    """A prompt with sounds."""

    def as_input(self, medium: Sound) -> AudioInput:
        return AudioInput.from_array(medium, RATE)


def noise(seconds: float, seed: int) -> Sound:
    return (np.random.default_rng(seed).standard_normal(round(seconds * RATE)) / 8).astype(np.float32)


SHORT, OTHER, LONG, SHORTEST = noise(0.5, 0), noise(0.5, 1), noise(2.3, 2), noise(0.061, 3)
MIXED = (
    Prompt((5, 6, 7)),
    Prompt((1, -1, 2, 3), (SHORT,)),
    Prompt((-1, -2, 9), (LONG, SHORT)),
    Prompt(tuple(range(70))),
    Prompt((8, -1, 10, -2, -3), (OTHER, OTHER, SHORTEST)),
    Prompt((1, -1, 2, 3), (OTHER,)),
    Prompt((1, -1, 2, 3), (SHORT,)),
    Prompt((-1,), (SHORTEST,)),
)


class Reference(MediaReference):
    """The model's own forward pass, with all sounds by its feature extractor."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(folder)

    def inputs(self, ids: Sequence[int], media: Sequence[Sound]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.tensor([list(ids)])}
        if media:
            made = self._extractor(list(media), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
            inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
        return inputs


@cache
def reference(folder: Path) -> Reference:
    return Reference(folder)


def engine_of(folder: Path, **fields: object) -> Any:
    return create_engine("transformers", model=str(folder), isolation="inline", **fields)


@pytest.fixture
def folder() -> Path:
    return tiny_model("qwen2_audio")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 40}], ids=str)
async def test_rows_of_any_mixture_are_heard_as_alone(folder: Path, fields: dict[str, object]) -> None:
    params = GREEDY.model_copy(update={"n": 2})
    async with engine_of(folder, **fields) as engine:
        for round in range(2):  # the second from the prefix cache
            completions = await check_answers(engine, MIXED, reference(folder), params)
            assert round == 0 or all(completion.cached_tokens for completion in completions[4:10])


async def test_greedy_answers_are_those_of_the_models_own_generate(folder: Path) -> None:
    async with engine_of(folder) as engine:
        await check_against_generate(engine, [prompt for prompt in MIXED if prompt.media], reference(folder))


async def test_prompts_with_sounds_are_scored_and_have_states(folder: Path) -> None:
    async with engine_of(folder) as engine:
        await check_scores_and_states(engine, MIXED, reference(folder))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
@tried_again
async def test_rows_with_sounds_go_on_after_a_pause(folder: Path, mode: PauseMode) -> None:
    async with engine_of(folder) as engine:
        await check_pauses(engine, MIXED, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_of_the_audio_part_takes_effect(folder: Path, mode: PauseMode, tmp_path: Path) -> None:
    other = with_other_weights(
        folder, tmp_path / "other", lambda name: "audio_tower" in name or "multi_modal_projector" in name
    )
    async with engine_of(folder) as engine:
        await check_update(engine, MIXED[1:3], mode, reference(folder), other, Reference(other))


async def test_a_cached_prefix_holds_each_sound_whole_or_not(folder: Path) -> None:
    async with engine_of(folder) as engine:
        await check_cached_prefixes(engine, Prompt, (SHORT, OTHER, LONG), reference(folder))


async def test_a_sampled_placeholder_is_an_ordinary_token(folder: Path) -> None:
    biased = GREEDY.model_copy(update={"logit_bias": {PLACE: 100.0}, "max_new_tokens": 30})
    stray = TokenPrompt(token_ids=(3, PLACE, PLACE, 4))
    embedded = reference(folder).model.get_input_embeddings()
    async with engine_of(folder) as engine:
        (first,) = await answers(engine, MIXED[1:2], biased)
        assert set(first.token_ids) == {PLACE}
        await engine.reset_prefix_cache()
        output: GenerationOutput = await engine.generate([stray, MIXED[2].given], GREEDY)
        alone, _ = output.completions
    rows = reference(folder).model(inputs_embeds=embedded(torch.tensor([[*stray.token_ids, *alone.token_ids[:-1]]])))
    own = rows.logits[0].log_softmax(-1)[3:].gather(-1, torch.tensor(alone.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(alone.logprobs), own.detach(), rtol=0, atol=WITHIN)


async def test_requests_with_sounds_can_be_aborted_while_they_are_prepared(folder: Path) -> None:
    await check_abort_while_prepared(engine_of(folder), MIXED[1])


@pytest.mark.slow
async def test_rows_with_sounds_use_adapters_of_the_language_model(folder: Path, tmp_path: Path) -> None:
    for name in ("stored", "merged", "refused"):
        (tmp_path / name).mkdir()
    adapter = make_adapter(folder, tmp_path / "stored", seed=1, targets=["gate_proj", "up_proj"])
    by, changed = reference(folder), Reference(merge(folder, adapter, tmp_path / "merged"))
    make_adapter(folder, tmp_path / "refused", seed=2, targets=["fc1"])
    async with engine_of(folder, enable_lora=True) as engine:
        with pytest.raises(InvalidRequest, match="fc1"):
            await engine.load_lora_adapter("ears", str(tmp_path / "refused"))
        await engine.load_lora_adapter("a", str(adapter.path))
        await check_adapter(engine, MIXED, by, changed)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_streams_have_sounds(folder: Path, isolation: str) -> None:
    async with create_engine("transformers", model=str(folder), isolation=isolation) as engine:
        streamed = [chunk async for chunk in engine.generate_stream(MIXED[4].given, GREEDY)]
        (whole,) = await answers(engine, MIXED[4:5])
    assert [token for chunk in streamed for token in chunk.token_ids] == whole.token_ids
    check_answer(whole, MIXED[4], reference(folder))


# Claims and refusals -------------------------------------------------------------------------------------------------


async def test_sounds_are_claimed_by_what_the_folder_holds(folder: Path, tmp_path: Path) -> None:
    def claims(model: Path, **fields: object) -> frozenset[Capability]:
        settings = EngineConfig.from_mapping({"backend": "transformers", "model": str(model), **fields})
        return TransformersBackend.capabilities(settings)

    media = {Capability.AUDIO, Capability.IMAGES, Capability.VIDEO}
    assert claims(folder) & media == {Capability.AUDIO}
    assert not claims(folder, task="embed") & media
    assert not claims(tiny_model("qwen2")) & media
    assert Capability.AUDIO not in claims(tiny_model("qwen2_5_vl"))


async def test_a_model_without_its_feature_extractor_is_refused_at_start(folder: Path, tmp_path: Path) -> None:
    without = tmp_path / "without"
    shutil.copytree(folder, without, ignore=lambda *_: ["preprocessor_config.json"])
    with pytest.raises(EngineStartError, match="cannot be run with a sound"):
        async with engine_of(without):
            pass
    file = without / "preprocessor_config.json"
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    file.write_text(json.dumps({**fields, "feature_size": 80}))
    with pytest.raises(EngineStartError, match="cannot be run with a sound"):
        async with engine_of(without):
            pass


async def test_too_many_and_broken_sounds_are_refused_and_the_engine_serves_on(folder: Path) -> None:
    async with engine_of(folder, media={"max_audio_seconds": 3}) as engine:
        for wrong, why in (
            (Prompt(tuple(range(-200, 0)), (SHORT,) * 200), "context (holds|length of) 1024"),
            (Prompt((-1,), (SHORT, SHORT)), "places for the 2 images, videos and sounds"),
            (Prompt((-1,), (noise(3.1, 0),)), "media.max_audio_seconds"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await answers(engine, [MIXED[0], wrong])
        for broken, why in ((AudioInput(data=b"no sound"), "cannot be read"), (ImageInput(data=b"1"), "images")):
            with pytest.raises(Exception, match=why):
                await engine.generate(TokenPrompt(token_ids=(START, PLACE, END), media=(broken,)), GREEDY)
        await check_answers(engine, MIXED[1:2], reference(folder))


# Mutants -------------------------------------------------------------------------------------------------------------


def sounds_dropped(patch: pytest.MonkeyPatch) -> None:
    original = MediaPass.inputs

    def silent(self: MediaPass) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros_like(one) if name == "input_features" else one for name, one in original(self).items()
        }

    patch.setattr(MediaPass, "inputs", silent)


def rows_mixed_up(patch: pytest.MonkeyPatch) -> None:
    original = MediaPass.inputs

    def turned(self: MediaPass) -> dict[str, torch.Tensor]:
        inputs = original(self)
        return {name: one.roll(1, 0) if name == "input_features" else one for name, one in inputs.items()}

    patch.setattr(MediaPass, "inputs", turned)


def padding_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Qwen2AudioEncoder,
        "forward",
        lambda self, features, attention_mask=None, **fields: ENCODE(self, features, None, **fields),
    )


def sounds_of_one_length_mixed_up_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMedia, "keys", lambda _, token_ids: list(token_ids))


@pytest.mark.parametrize(
    "mutant", [sounds_dropped, rows_mixed_up, padding_heard, sounds_of_one_length_mixed_up_in_the_cache]
)
async def test_the_checks_above_catch(folder: Path, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    by = Reference(folder)
    with pytest.raises((AssertionError, EngineError)):
        await _heard_in_two_rounds(folder, mutant, by)


async def _heard_in_two_rounds(folder: Path, mutant: Callable[[pytest.MonkeyPatch], None], by: Reference) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        async with engine_of(folder) as engine:
            completions = [*await answers(engine, MIXED), *await answers(engine, MIXED)]
    for completion, prompt in zip(completions, MIXED * 2, strict=True):
        check_answer(completion, prompt, by)
