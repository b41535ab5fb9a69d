"""Images beside prompts, in every mixture of rows, compared with the model's own forward pass and ``generate``."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from drivetrain import (
    Capability,
    EngineConfig,
    EngineError,
    EngineStartError,
    ImageInput,
    InvalidRequest,
    PauseMode,
    RegexGrammar,
    SamplingParams,
    TokenPrompt,
    create_engine,
)
from drivetrain.testing import VISION_ARCHITECTURES, tiny_model
from drivetrain_conformance.assertions.weight_checks import check_holds
from drivetrain_conformance.assets.made_adapters import change_adapter, make_adapter, merge
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.harness.testbench import check_held
from drivetrain_conformance.references.oracle import mrope_positions
from drivetrain_transformers import TransformersBackend, vision
from drivetrain_transformers.row_media import MediaPass, Padded, PlacedMedium, RowMedia
from drivetrain_transformers.translate import media_capabilities
from drivetrain_weight_sync import WeightSync
from engines import HANGING, tried_again, until_running
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

FEATURES = Qwen2_5_VLModel.get_image_features


class Prompt(MediaPrompt):
    """A prompt with images."""

    def as_input(self, medium: Image.Image) -> ImageInput:
        return ImageInput.from_pil(medium)


def noise(width: int, height: int, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


SMALL, WIDE, TALL = noise(64, 64, 0), noise(140, 60, 1), noise(50, 120, 2)
MIXED = (
    Prompt((5, 6, 7)),
    Prompt((1, -1, 2, 3), (SMALL,)),
    Prompt((-1, -2, 9), (WIDE, SMALL)),
    Prompt(tuple(range(70))),
    Prompt((8, -1, 10, -2, -3), (TALL, TALL, WIDE)),
    Prompt((1, -1, 2, 3), (TALL,)),
    Prompt((1, -1, 2, 3), (SMALL,)),
    Prompt((11,)),
)


class Reference(MediaReference):
    """The model's own forward pass, with all images by its processor."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._is_llava = self.model.config.model_type == "llava"

    def inputs(self, ids: Sequence[int], media: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([list(ids)])
        inputs = {"input_ids": tokens}
        if media:
            inputs |= dict(self._processor(images=list(media), return_tensors="pt"))
            if not self._is_llava:
                inputs["mm_token_type_ids"] = (tokens == PLACE).int()
        return inputs

    @torch.no_grad()
    def merged_logprobs(self, ids: Sequence[int], prompt: int, images: Sequence[Image.Image]) -> torch.Tensor:
        """The same for LLaVA, whose placeholders after the prompt are ordinary tokens."""
        assert self._is_llava
        embedded = self.model.get_input_embeddings()(torch.tensor([list(ids)]))
        pixels = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        places = [at for at in range(prompt) if ids[at] == PLACE]
        embedded[0, places] = torch.cat(list(self.model.get_image_features(pixels).pooler_output))
        logits: torch.Tensor = self.model(inputs_embeds=embedded).logits[0]
        return logits.log_softmax(-1)


@cache
def reference(folder: Path) -> Reference:
    return Reference(folder)


def engine_of(folder: Path, **fields: object) -> Any:
    return create_engine("transformers", model=str(folder), isolation="inline", **fields)


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
@pytest.mark.parametrize("fields", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 40}], ids=str)
async def test_rows_of_any_mixture_are_seen_as_alone(architecture: str, fields: dict[str, object]) -> None:
    folder = tiny_model(architecture)
    by = reference(folder)
    params = GREEDY.model_copy(update={"n": 2})
    async with engine_of(folder, **fields) as engine:
        for round in range(2):  # the second from the prefix cache
            completions = await check_answers(engine, MIXED, by, params)
            assert round == 0 or all(completion.cached_tokens for completion in completions[6:10])


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
async def test_greedy_answers_are_those_of_the_models_own_generate(architecture: str) -> None:
    folder = tiny_model(architecture)
    async with engine_of(folder) as engine:
        await check_against_generate(engine, [prompt for prompt in MIXED if prompt.media], reference(folder))


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
async def test_prompts_with_images_are_scored_and_have_states(architecture: str) -> None:
    folder = tiny_model(architecture)
    async with engine_of(folder) as engine:
        await check_scores_and_states(engine, MIXED, reference(folder))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "llava"])
@tried_again
async def test_rows_with_images_go_on_after_a_pause(architecture: str, mode: PauseMode) -> None:
    async with engine_of(tiny_model(architecture)) as engine:
        await check_pauses(engine, MIXED, mode)


def with_other_vision(folder: Path, to: Path) -> Path:
    """Copy a model with other weights of its vision part alone."""
    return with_other_weights(folder, to, lambda name: name.startswith(("visual", "model.visual", "vision_tower")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "llava"])
async def test_an_update_of_the_vision_part_takes_effect(architecture: str, mode: PauseMode, tmp_path: Path) -> None:
    folder = tiny_model(architecture)
    other = with_other_vision(folder, tmp_path / "other")
    async with engine_of(folder) as engine:
        await check_update(engine, MIXED[1:3], mode, reference(folder), other, Reference(other))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(VISION_ARCHITECTURES))
async def test_a_policy_in_memory_is_pushed_in_every_form(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(architecture)
    other = with_other_vision(folder, tmp_path / "other")
    policies = [AutoModelForImageTextToText.from_pretrained(path) for path in (other, folder)]
    forms: list[Callable[[Any], Any]] = [
        lambda policy: policy,
        lambda policy: policy.state_dict(),
        lambda policy: policy.named_parameters,
    ]
    async with engine_of(folder) as engine:
        for form in forms:
            for policy, path in zip(policies, (other, folder), strict=True):
                async with WeightSync.connect(form(policy), engine) as sync:
                    await sync.push(version=path.name)
                await check_holds(engine, tensors_of(path))


@tried_again
async def test_a_sampled_placeholder_is_an_ordinary_token() -> None:
    folder = tiny_model("llava")
    by = reference(folder)
    biased = GREEDY.model_copy(update={"logit_bias": {PLACE: 100.0}, "max_new_tokens": 30})
    free = GREEDY.model_copy(update={"max_new_tokens": 300})
    async with engine_of(folder) as engine:
        (first,) = await answers(engine, MIXED[1:2], biased)
        assert set(first.token_ids) == {PLACE}
        turn = TokenPrompt(token_ids=(*first.prompt_token_ids, *first.token_ids[:8], 5))
        stray = TokenPrompt(token_ids=(3, PLACE, PLACE, 4))
        await engine.reset_prefix_cache()
        with pytest.raises(InvalidRequest, match="places for the 1 images"):
            await engine.generate(TokenPrompt(token_ids=turn.token_ids, media=MIXED[1].given.media), GREEDY)
        task = asyncio.create_task(engine.generate([MIXED[1].given, stray, MIXED[2].given], [biased, GREEDY, free]))
        await until_running(engine, 2)
        await engine.pause_generation(PauseMode.RETRACT)
        await check_held(engine, task)
        await engine.continue_generation()
        completions = (await asyncio.wait_for(task, HANGING)).completions
    for completion, prompt in zip(completions, (MIXED[1], Prompt(()), MIXED[2]), strict=True):
        asked, drawn = completion.prompt_token_ids, completion.token_ids
        ids = [*asked, *drawn[:-1]]
        rows = by.merged_logprobs(ids, len(asked), prompt.media) if prompt.media else by.logprobs(ids, ())
        own = rows[len(asked) - 1 :].gather(-1, torch.tensor(drawn)[:, None])[:, 0]
        if completion is not completions[0]:  # those of a biased row are 0
            torch.testing.assert_close(torch.tensor(completion.logprobs), own, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
async def test_a_cached_prefix_holds_each_image_whole_or_not(architecture: str) -> None:
    folder = tiny_model(architecture)
    async with engine_of(folder) as engine:
        await check_cached_prefixes(engine, Prompt, (SMALL, TALL, WIDE), reference(folder))


async def test_requests_with_images_can_be_aborted_while_they_are_prepared() -> None:
    await check_abort_while_prepared(engine_of(tiny_model("llava")), MIXED[1])


async def test_stops_and_seeds_work_beside_images() -> None:
    folder = tiny_model("qwen2_5_vl")
    sampled = SamplingParams(max_new_tokens=40, seed=3, logprobs=0, ignore_eos=True)
    async with engine_of(folder) as engine:
        (whole,) = await answers(engine, MIXED[2:3], sampled)
        (again, *_) = await answers(engine, [MIXED[2], *MIXED], [sampled, *[GREEDY] * len(MIXED)])  # type: ignore[arg-type]
        assert again.token_ids == whole.token_ids
        stop = whole.token_ids[9]
        (cut,) = await answers(engine, MIXED[2:3], sampled.model_copy(update={"stop_token_ids": (stop,)}))
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
async def test_rows_with_images_use_adapters_of_the_language_model(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(architecture)
    targets = ["gate_proj", "up_proj"] if architecture in ("qwen3_vl", "llava") else ["q_proj", "v_proj"]
    (stored := tmp_path / "stored").mkdir()
    (in_memory := tmp_path / "in-memory").mkdir()
    (merged := tmp_path / "merged").mkdir()
    adapter = make_adapter(folder, stored, seed=1, targets=targets)
    own = [name for name, _ in reference(folder).model.named_modules()]

    def rename(_: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            layer, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            (found,) = (one for one in own if one.endswith(layer[layer.index("layers.") :]) and "language" in one)
            tensors[f"base_model.model.{found}.lora_{part}"] = tensors.pop(name)

    paths = [adapter.path, change_adapter(adapter, in_memory, rename)]
    by, changed = reference(folder), Reference(merge(folder, adapter, merged))
    vision = "fc1" if architecture == "llava" else "qkv"
    (refused := tmp_path / "refused").mkdir()
    make_adapter(folder, refused, seed=2, targets=[vision])
    async with engine_of(folder, enable_lora=True) as engine:
        with pytest.raises(InvalidRequest, match=vision):
            await engine.load_lora_adapter("vision", str(refused))
        for path in paths:
            await engine.load_lora_adapter("a", str(path))
            await check_adapter(engine, MIXED, by, changed)
            await engine.unload_lora_adapter("a")


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_grammars_and_streams_work_beside_images(isolation: str) -> None:
    folder = tiny_model("qwen2_5_vl")
    pattern = SamplingParams(max_new_tokens=12, temperature=0, structured_output=RegexGrammar(regex="[a-h]{6}"))
    async with create_engine("transformers", model=str(folder), isolation=isolation) as engine:
        letters = await answers(engine, MIXED[:3], pattern)
        assert all(re.fullmatch("[a-h]{6}", completion.text) for completion in letters)
        assert len({completion.text for completion in letters}) > 1
        (whole,) = await answers(engine, MIXED[4:5])
        streamed = [chunk async for chunk in engine.generate_stream(MIXED[4].given, GREEDY)]
        assert [token for chunk in streamed for token in chunk.token_ids] == whole.token_ids
        check_answer(whole, MIXED[4], reference(folder))


# Claims and refusals -------------------------------------------------------------------------------------------------


def of(folder: Path | str, **fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "transformers", "model": str(folder), **fields})


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
async def test_images_are_claimed_by_what_the_folder_holds(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(architecture)
    assert Capability.IMAGES in TransformersBackend.capabilities(of(folder))
    assert not media_capabilities(of(folder, task="embed"))
    assert not media_capabilities(of(tiny_model("qwen2")))
    assert not media_capabilities(of(tmp_path / "missing"))
    without = tmp_path / "without"
    shutil.copytree(folder, without, ignore=lambda *_: ["preprocessor_config.json", "processor_config.json"])
    assert not media_capabilities(of(without))
    # Newer releases of transformers save all processors in one file.
    images = json.loads((folder / "preprocessor_config.json").read_text())
    own = folder / "processor_config.json"
    fields = json.loads(own.read_text()) if own.exists() else {}
    (without / "processor_config.json").write_text(json.dumps({**fields, "image_processor": images}))
    assert Capability.IMAGES in media_capabilities(of(without))


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
@pytest.mark.parametrize("installed", [("av", "torchvision"), ("av",), ("torchvision",)], ids=" ".join)
async def test_videos_are_claimed_where_they_can_be_read(
    architecture: str, installed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in installed else None)
    claims = Capability.VIDEO in TransformersBackend.capabilities(of(tiny_model(architecture)))
    assert claims is (len(installed) == 2 and architecture in ("qwen2_vl", "qwen2_5_vl"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"image_token": "ab"}, "the processor writes token ids"),
        ({"patch_size": 7}, "cannot be run with an image"),
        ({"processor_class": "NoSuchProcessor"}, "cannot be run with an image|cannot load the image processor"),
    ],
)
async def test_a_processor_that_does_not_fit_the_model_is_refused_at_start(
    fields: dict[str, object], why: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llava"), folder, copy_function=shutil.copyfile)
    file = folder / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(EngineStartError, match=why):
        async with engine_of(folder):
            pass


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "llava"])
async def test_too_many_and_broken_images_are_refused_and_the_engine_serves_on(architecture: str) -> None:
    async with engine_of(tiny_model(architecture), media={"max_pixels": 100_000}) as engine:
        for wrong, why in (
            (Prompt(tuple(range(-200, 0)), (SMALL,) * 200), "context (holds|length of) 1024"),
            (Prompt((-1,), (SMALL, SMALL)), "places for the 2 images"),
            (Prompt((-1,), (noise(400, 400, 0),)), "media.max_pixels"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await answers(engine, [MIXED[0], wrong])
        broken = ImageInput(data=b"no image")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await engine.generate(TokenPrompt(token_ids=(START, PLACE, END), media=(broken,)), GREEDY)
        await check_answers(engine, MIXED[1:2], reference(tiny_model(architecture)))


# Parts ---------------------------------------------------------------------------------------------------------------


async def test_images_cut_into_different_numbers_of_parts_are_padded() -> None:
    model = reference(tiny_model("llava")).model
    inputs = [torch.ones(1, parts, 3, 4, 4) for parts in (2, 5)]
    media = [PlacedMedium(-1, PLACE, 0, 2, {"pixel_values": one}) for one in inputs]
    rows = [RowMedia((one,)) for one in media]
    padded = Padded(torch.tensor([[PLACE, PLACE, 1]] * 2), torch.arange(3).expand(2, 3), [3, 3], 0)
    joined = MediaPass(model, [PLACE], rows, padded).inputs()["pixel_values"]
    assert joined.shape == (2, 5, 3, 4, 4)
    assert joined.flatten(2).amax(-1).tolist() == [[1, 1, 0, 0, 0], [1] * 5]


async def test_a_row_knows_where_a_prefix_may_end() -> None:
    medium = PlacedMedium(-9, PLACE, 3, 4, {})
    row = RowMedia((medium, replace(medium, start=10, key=-8)))
    assert [row.without_a_part(length) for length in range(16)] == [
        0,
        1,
        2,
        3,
        3,
        3,
        3,
        7,
        8,
        9,
        10,
        10,
        10,
        10,
        14,
        15,
    ]
    assert row.keys(list(range(16))) == [0, 1, 2, *[-9] * 4, 7, 8, 9, *[-8] * 4, 14, 15]


@pytest.mark.parametrize("whole", [False, True], ids=["", "whole-seconds"])
@pytest.mark.parametrize("step", [1.0, 2.0, 7.5])
async def test_text_after_a_video_begins_after_its_largest_position(
    step: float, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the rule of Qwen2-VL's authors, as the suite's oracle has it.

    transformers 5.17 takes whole seconds, and 5.24 does not.
    """
    ids = [5, 6, START, *[PLACE + 1] * 24, END, START, *[PLACE] * 6, END, 7, START, *[PLACE + 1] * 4, END, 8, 9]
    videos, images = [(6, 4, 4), (2, 2, 4)], [(1, 4, 6)]
    model = reference(tiny_model("qwen2_5_vl")).model
    a_second = model.config.vision_config.tokens_per_second
    if whole:
        index = model.base_model.get_rope_index

        def of_whole_seconds(
            ids: torch.Tensor, second_per_grid_ts: torch.Tensor, mm_token_type_ids: torch.Tensor, **grids: torch.Tensor
        ) -> object:
            seconds = second_per_grid_ts.long()
            return index(ids, mm_token_type_ids=mm_token_type_ids, second_per_grid_ts=seconds, **grids)

        monkeypatch.setattr(model.base_model, "get_rope_index", of_whole_seconds)
    starts = {3: (24, PLACE + 1, videos[0]), 29: (6, PLACE, images[0]), 38: (4, PLACE + 1, videos[1])}
    media = [
        PlacedMedium(
            -1, token, start, count, {f"{'image' if token == PLACE else 'video'}_grid_thw": torch.tensor([grid])}
        )
        for start, (count, token, grid) in starts.items()
    ]
    positions = vision.mrope_positions(model.base_model, ids, media, [step / a_second] * 2, PLACE + 1)
    grids = {PLACE: [(*images[0], 1.0)], PLACE + 1: [(*grid, step) for grid in videos]}
    assert positions.tolist() == mrope_positions(ids, grids, 2).tolist()


async def test_processors_expand_prompts_as_prompts_come_back() -> None:
    folder = tiny_model("llava")
    processor: Any = AutoProcessor.from_pretrained(folder)
    made = processor(text=["a<|image_pad|>b<|image_pad|>"], images=[SMALL, WIDE], return_tensors="pt")
    file = BytesIO()
    SMALL.save(file, "PNG")
    prompt = TokenPrompt(
        token_ids=(97, PLACE, 98, PLACE), media=(ImageInput(data=file.getvalue()), ImageInput.from_pil(WIDE))
    )
    async with engine_of(folder) as engine:
        (completion,) = (await engine.generate(prompt, GREEDY)).completions
    assert completion.prompt_token_ids == made["input_ids"][0].tolist()


# Mutants -------------------------------------------------------------------------------------------------------------


def positions_of_a_text(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMedia, "positions_of", lambda _, begin, end: torch.arange(begin, end).expand(3, -1))


def positions_after_the_prompt_counted_as_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vision, "RowMedia", lambda media, positions=None, offset=0: RowMedia(media, positions))


def images_of_rows_in_another_order(patch: pytest.MonkeyPatch) -> None:
    original = MediaPass.inputs

    def wrong(self: MediaPass) -> dict[str, torch.Tensor]:
        inputs = original(self)
        if "image_grid_thw" not in inputs:
            return inputs
        grids = inputs["image_grid_thw"]
        pixels = torch.split(inputs["pixel_values"], grids.prod(-1).tolist())
        return {"pixel_values": torch.cat(pixels[::-1]), "image_grid_thw": grids.flip(0)}

    patch.setattr(MediaPass, "inputs", wrong)


def prefixes_that_end_within_an_image(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMedia, "without_a_part", lambda _, length: length)


def prefixes_known_by_ids_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMedia, "keys", lambda _, token_ids: token_ids)


def features_kept_after_an_update(patch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[float, ...], Any] = {}
    original = Qwen2_5_VLModel.get_image_features

    def remembered(self: Any, pixel_values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        key = (float(pixel_values.sum()), *pixel_values.shape)
        if key not in kept:
            kept[key] = original(self, pixel_values, *arguments, **options)
        return copy.copy(kept[key])

    patch.setattr(Qwen2_5_VLModel, "get_image_features", remembered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        positions_of_a_text,
        positions_after_the_prompt_counted_as_tokens,
        images_of_rows_in_another_order,
        prefixes_that_end_within_an_image,
        prefixes_known_by_ids_alone,
        features_kept_after_an_update,
    ],
)
async def test_what_is_done_wrongly_is_noticed(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tiny_model("qwen2_5_vl")
    other = with_other_vision(folder, tmp_path / "other")
    by, later = Reference(folder), Reference(other)
    long = Prompt((1, 2, 3, 4, 5, 6, 7, 8, -1, *range(20, 60)), (noise(224, 112, 3),))
    twin = Prompt(long.ids, (noise(224, 112, 4),))
    rounds = ([*MIXED, long], [replace(long, ids=(*long.ids[:9], 9, 9))], [twin, *MIXED])

    async def all_seen() -> bool:
        async with engine_of(folder) as engine:
            for reference_of, update in ((by, False), (later, True)):
                if update:
                    await engine.load_weights_from_disk(str(other), "other")
                for prompts in rounds:
                    for completion, prompt in zip(await answers(engine, prompts), prompts, strict=True):
                        # The reference runs as it should.
                        with monkeypatch.context() as undone:
                            undone.setattr(Qwen2_5_VLModel, "get_image_features", FEATURES)
                            check_answer(completion, prompt, reference_of)
        return True

    assert await all_seen()
    wrong(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        await all_seen()
