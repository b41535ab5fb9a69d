"""Sounds beside prompts, in every mixture of rows, compared with the model's own forward pass and ``generate``."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from drivetrain import (
    AudioInput,
    Capability,
    ChatPrompt,
    Completion,
    EngineConfig,
    EngineError,
    EngineStartError,
    FinishReason,
    GenerationOutput,
    ImageInput,
    InferenceEngine,
    InvalidRequest,
    Message,
    PauseMode,
    SamplingParams,
    TokenPrompt,
    create_engine,
)
from drivetrain.media import qwen_audio, sound
from drivetrain.testing import tiny_model
from drivetrain_conformance.assets.made_adapters import make_adapter, merge
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.hearing import Hearing
from drivetrain_transformers.row_media import MediaPass, RowMedia
from engines import HANGING, until, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHIN = 1e-4
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
START, END, PLACE = 260, 261, 262
RATE = 16_000
ENCODE = Qwen2AudioEncoder.forward

Sound = NDArray[np.float32]


@dataclass(frozen=True)
class Prompt:
    """Token ids in which -1 - i stands for sound i."""

    ids: tuple[int, ...]
    sounds: tuple[Sound, ...] = ()

    @property
    def given(self) -> TokenPrompt:
        ids = itertools.chain.from_iterable((START, PLACE, END) if one < 0 else (one,) for one in self.ids)
        return TokenPrompt(
            token_ids=tuple(ids), media=tuple(AudioInput.from_array(sound, RATE) for sound in self.sounds)
        )


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


class Reference:
    """The model's own forward pass: one row, no cache, all sounds by the model's feature extractor."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(folder)

    def inputs(self, ids: Sequence[int], sounds: Sequence[Sound]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.tensor([list(ids)])}
        if sounds:
            made = self._extractor(list(sounds), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
            inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
        return inputs

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], sounds: Sequence[Sound]) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self.inputs(ids, sounds)).logits[0]
        return logits.log_softmax(-1)

    @torch.no_grad()
    def states(self, ids: Sequence[int], sounds: Sequence[Sound]) -> torch.Tensor:
        states: torch.Tensor = self.model.base_model(**self.inputs(ids, sounds))[0][0]
        return states


@cache
def reference(folder: Path) -> Reference:
    return Reference(folder)


def assert_heard(completion: Completion, prompt: Prompt, by: Reference, since: int = 0) -> None:
    """Raise unless the tokens from ``since`` on, up to the first sampled placeholder, have the model's logprobs."""
    drawn, asked = completion.token_ids, completion.prompt_token_ids
    until = next((at for at, token in enumerate(drawn) if token == PLACE and prompt.sounds), len(drawn))
    known = drawn[: until + 1]
    rows = by.logprobs([*asked, *known[:-1]], prompt.sounds)[len(asked) - 1 :]
    assert completion.logprobs is not None
    for at in range(since, len(known)):
        assert abs(float(rows[at, known[at]]) - completion.logprobs[at]) <= WITHIN


async def answers(
    engine: InferenceEngine, prompts: Sequence[Prompt], params: SamplingParams = GREEDY
) -> list[Completion]:
    return (await engine.generate([prompt.given for prompt in prompts], params)).completions


def engine_of(folder: Path, **fields: object) -> Any:
    return create_engine("transformers", model=str(folder), isolation="inline", **fields)


@pytest.fixture
def folder() -> Path:
    return tiny_model("qwen2_audio")


@pytest.mark.parametrize("fields", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 40}], ids=str)
async def test_rows_of_any_mixture_are_heard_as_alone(folder: Path, fields: dict[str, object]) -> None:
    params = GREEDY.model_copy(update={"n": 2})
    async with engine_of(folder, **fields) as engine:
        for round in range(2):  # the second from the prefix cache
            completions = await answers(engine, MIXED, params)
            for index, completion in enumerate(completions):
                assert_heard(completion, MIXED[index // 2], reference(folder))
            assert round == 0 or all(completion.cached_tokens for completion in completions[4:10])


async def test_greedy_answers_are_those_of_the_models_own_generate(folder: Path) -> None:
    by = reference(folder)
    prompts = [prompt for prompt in MIXED if prompt.sounds]
    async with engine_of(folder) as engine:
        completions = await answers(engine, prompts)
    for completion, prompt in zip(completions, prompts, strict=True):
        inputs = by.inputs(completion.prompt_token_ids, prompt.sounds)
        given = by.model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        given = given[0, len(completion.prompt_token_ids) :].tolist()
        until = next((at for at, token in enumerate(given) if token == PLACE or token in (256, 258)), len(given))
        assert completion.token_ids[:until] == given[:until]
        assert until > 0


async def test_prompts_with_sounds_are_scored_and_have_states(folder: Path) -> None:
    by = reference(folder)
    params = GREEDY.model_copy(update={"prompt_logprobs": 2, "return_hidden_states": True, "max_new_tokens": 4})
    async with engine_of(folder) as engine:
        for completion, prompt in zip(await answers(engine, MIXED, params), MIXED, strict=True):
            asked = completion.prompt_token_ids
            assert completion.prompt_logprobs is not None
            expected = by.logprobs(asked, prompt.sounds)[:-1].gather(-1, torch.tensor(asked[1:])[:, None])[:, 0]
            scored = torch.tensor(completion.prompt_logprobs[1:])
            assert float((scored - expected).abs().max()) <= WITHIN
            states = by.states(asked, prompt.sounds)[-1]
            assert completion.hidden_states is not None
            torch.testing.assert_close(torch.tensor(completion.hidden_states[0]), states, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_rows_with_sounds_go_on_after_a_pause(folder: Path, mode: PauseMode) -> None:
    long = GREEDY.model_copy(update={"max_new_tokens": 200})
    async with engine_of(folder) as engine:
        whole = await answers(engine, MIXED, long)
        await engine.reset_prefix_cache()
        task = asyncio.create_task(answers(engine, MIXED, long))
        await until_running(engine, len(MIXED))
        for _ in range(3):
            await engine.pause_generation(mode)
            assert not task.done()
            await engine.continue_generation()
        paused = await asyncio.wait_for(task, HANGING)
    for one, other in zip(paused, whole, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=WITHIN)


def with_other_ears(folder: Path, to: Path) -> Path:
    """Copy a model with other weights of its audio part alone."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = [name for name in tensors if "audio_tower" in name or "multi_modal_projector" in name]
    assert changed
    for name in changed:
        tensors[name] += torch.randn(tensors[name].shape, generator=generator) * tensors[name].std().nan_to_num() * 0.5
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_of_the_audio_part_takes_effect(folder: Path, mode: PauseMode, tmp_path: Path) -> None:
    other = with_other_ears(folder, tmp_path / "other")
    prompts, long = MIXED[1:3], GREEDY.model_copy(update={"max_new_tokens": 150})
    async with engine_of(folder) as engine:
        before = await answers(engine, prompts)
        task = asyncio.create_task(answers(engine, prompts, long))
        await until_running(engine, 2)
        await engine.load_weights_from_disk(str(other), "other", mode=mode)
        in_flight = await asyncio.wait_for(task, HANGING)
        after = await answers(engine, prompts)
        again = await answers(engine, prompts)
    for index, prompt in enumerate(prompts):
        assert_heard(before[index], prompt, reference(folder))
        assert_heard(after[index], prompt, Reference(other))
        assert_heard(again[index], prompt, Reference(other))
        assert before[index].logprobs != pytest.approx(after[index].logprobs, abs=10 * WITHIN)
        if mode is PauseMode.RETRACT and len(in_flight[index].weight_versions) > 1:
            assert_heard(in_flight[index], prompt, Reference(other), in_flight[index].weight_versions[0].end)


async def test_a_cached_prefix_holds_each_sound_whole_or_not(folder: Path) -> None:
    first = Prompt((1, 2, 3, 4, 5, -1, 9, 9, 9), (SHORT,))
    text = tuple(range(20, 60))
    async with engine_of(folder) as engine:
        (begun,) = await answers(engine, [first])
        start = begun.prompt_token_ids.index(PLACE)
        end = start + begun.prompt_token_ids.count(PLACE)
        # Whole blocks of 16 are cached; the common beginning of the first two prompts ends after the sound's end token.
        common = (end + 1) // 16 * 16
        kept = end + 2 + len(text)
        for prompt, cached in (
            (Prompt((1, 2, 3, 4, 5, -1, 8, *text), (SHORT,)), start if start < common < end else common),
            (Prompt((1, 2, 3, 4, 5, -1, 9, 9, 9), (OTHER,)), 0),
            (Prompt((1, 2, 3, 4, 5, -1, 8, *text, -2), (SHORT, LONG)), kept // 16 * 16),
            (Prompt((1, 2, 3, 4, 5, -1, 8, *text, -2), (SHORT, OTHER)), None),
        ):
            (completion,) = await answers(engine, [prompt])
            assert_heard(completion, prompt, reference(folder))
            assert cached is None or completion.cached_tokens == cached


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


async def test_requests_with_sounds_can_be_aborted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = GREEDY.model_copy(update={"max_new_tokens": 900})
    async with engine_of(folder) as engine:
        backend = engine.parts.backend
        assert isinstance(backend, TransformersBackend)
        assert isinstance(backend._media, Hearing)
        reached, go_on, original = asyncio.Event(), asyncio.Event(), backend._media.of

        async def slow(request: Any) -> RowMedia | None:
            reached.set()
            await go_on.wait()
            return await original(request)

        monkeypatch.setattr(backend._media, "of", slow)
        task = asyncio.create_task(answers(engine, MIXED[1:2], endless))
        await asyncio.wait_for(reached.wait(), HANGING)
        aborting = asyncio.create_task(engine.abort_generation())
        await until(lambda: bool(backend._aborted))
        go_on.set()
        await asyncio.wait_for(aborting, HANGING)
        (completion,) = await asyncio.wait_for(task, HANGING)
        assert completion.finish_reason is FinishReason.ABORT
        monkeypatch.undo()
        given = [prompt.given for prompt in MIXED[1:3]]
        both: asyncio.Task[GenerationOutput] = asyncio.create_task(
            engine.generate(given, [endless, GREEDY], request_ids=["a", "b"])
        )
        await until_running(engine, 2)
        await engine.abort("a")
        completions = (await asyncio.wait_for(both, HANGING)).completions
        assert completions[0].finish_reason is FinishReason.ABORT
        for completion, prompt in zip(completions, MIXED[1:3], strict=True):
            assert_heard(completion, prompt, reference(folder))


async def test_rows_with_sounds_use_adapters_of_the_language_model(folder: Path, tmp_path: Path) -> None:
    for name in ("stored", "merged", "refused"):
        (tmp_path / name).mkdir()
    adapter = make_adapter(folder, tmp_path / "stored", seed=1, targets=["gate_proj", "up_proj"])
    by, changed = reference(folder), Reference(merge(folder, adapter, tmp_path / "merged"))
    make_adapter(folder, tmp_path / "refused", seed=2, targets=["fc1"])
    given = [prompt.given for prompt in MIXED]
    async with engine_of(folder, enable_lora=True) as engine:
        with pytest.raises(InvalidRequest, match="fc1"):
            await engine.load_lora_adapter("ears", str(tmp_path / "refused"))
        await engine.load_lora_adapter("a", str(adapter.path))
        for _ in range(2):  # the second time from the prefix cache
            both = await asyncio.gather(engine.generate(given, GREEDY), engine.generate(given, GREEDY, lora="a"))
            for output, heard_by in zip(both, (by, changed), strict=True):
                for completion, prompt in zip(output.completions, MIXED, strict=True):
                    assert_heard(completion, prompt, heard_by)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_streams_have_sounds(folder: Path, isolation: str) -> None:
    async with create_engine("transformers", model=str(folder), isolation=isolation) as engine:
        streamed = [chunk async for chunk in engine.generate_stream(MIXED[4].given, GREEDY)]
        (whole,) = await answers(engine, MIXED[4:5])
    assert [token for chunk in streamed for token in chunk.token_ids] == whole.token_ids
    assert_heard(whole, MIXED[4], reference(folder))


async def test_a_sound_of_another_rate_is_resampled(folder: Path) -> None:
    at = np.arange(2 * RATE) / (2 * RATE)
    tone = (np.sin(2 * np.pi * 440 * at) / 2).astype(np.float32)
    token_ids = (1, START, PLACE, END, 2)
    async with engine_of(folder) as engine:
        given = [AudioInput.from_array(tone, 2 * RATE), AudioInput.from_array(tone[::2], RATE)]
        prompts = [TokenPrompt(token_ids=token_ids, media=(one,)) for one in given]
        fast, plain = (await engine.generate(prompts, GREEDY)).completions
    assert fast.prompt_token_ids == plain.prompt_token_ids
    assert fast.logprobs == pytest.approx(plain.logprobs, abs=0.05)


async def test_openais_input_audio_is_heard(folder: Path) -> None:
    data = AudioInput.from_array(SHORT, RATE).data
    assert data is not None
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}},
        {"type": "text", "text": "?"},
    ]
    payload = {"messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0, "logprobs": True}
    chat = ChatPrompt(
        messages=(Message(role="user", content=[{"type": "audio"}, {"type": "text", "text": "?"}]),),
        media=(AudioInput(data=data),),
    )
    async with engine_of(folder) as engine:
        (completion,) = (await engine.generate(chat, SamplingParams(max_new_tokens=12, temperature=0))).completions
        answer = await engine.chat_completion(payload)
    assert completion.prompt_token_ids.count(PLACE) == 12
    assert answer["usage"]["prompt_tokens"] == len(completion.prompt_token_ids)
    assert answer["choices"][0]["message"]["content"] == completion.text


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
        (completion,) = await answers(engine, MIXED[1:2])
        assert_heard(completion, MIXED[1], reference(folder))


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
        assert_heard(completion, prompt, by)


async def test_one_that_ignores_the_rate_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sound.decoded

    def at_its_own_rate(data: bytes, bounds: Any, rate: int) -> Sound:
        return original(data, bounds, int.from_bytes(data[24:28], "little"))

    monkeypatch.setattr(qwen_audio, "decoded", at_its_own_rate)
    with pytest.raises(AssertionError):
        await test_a_sound_of_another_rate_is_resampled(folder)
