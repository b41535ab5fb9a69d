"""The engine sees an image as the model does, and counts and scores its tokens."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Final

from drivetrain.backend.toolkit.model_folder import config_levels
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.prompts import ImageInput, TokenPrompt
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.made_adapters import change_adapter, has_layers, make_adapter, merge
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.reference_sampling import steps

if TYPE_CHECKING:
    import torch
from drivetrain_conformance.cases.multimodal.checks import (
    BOUNDED,
    SEEN,
    check_scored,
    check_seen,
    media_tolerance,
    output_logits,
    with_images,
)
from drivetrain_conformance.cases.multimodal.media_files import black_pixel, pattern_pixel, png, striped_pixel

_PAIRS: Final = (("q_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of which one pair is in the language model alone, by the last part of their names."""


_OF_VISION: Final = "vis"
"""Part of the names of all layers of a vision model: of ``visual`` and ``vision_tower``."""


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def an_image_is_seen_as_the_model_sees_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the images."""
    for images in (
        [png(pattern_pixel)],
        [png(black_pixel)],
        [png(striped_pixel, 96, 40)],
        [png(pattern_pixel), png(striped_pixel, 40, 96)],
        [png(striped_pixel, 40, 96), png(pattern_pixel)],
        [],
    ):
        (completion,) = (await bench.engine.generate(with_images(images), SEEN)).completions
        check_seen(bench, completion, images)


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def a_prompt_comes_back_as_it_was_seen(bench: Bench) -> None:
    """A completion's prompt ids repeat each image's placeholder as the model needs, and can be sent back."""
    images = [png(pattern_pixel), png(striped_pixel, 96, 40)]
    media = tuple(ImageInput(data=image) for image in images)
    engine = bench.engine
    asked = with_images(images)
    (completion,) = (await engine.generate(asked, SEEN)).completions
    written, seen = engine.tokenizer.encode(asked), completion.prompt_token_ids
    assert len(seen) > len(written), "the prompt comes back as it was written, and not as it was seen"
    check_seen(bench, completion, images)
    (token,) = {token for token in seen if seen.count(token) > written.count(token)}
    assert [token for token, _ in itertools.groupby(seen)] == [token for token, _ in itertools.groupby(written)]
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=media)
        (again,) = (await engine.generate(prompt, SEEN)).completions
        assert again.prompt_token_ids == seen
        check_seen(bench, again, images)
    first = seen.index(token)
    wrongs = [[one for one in seen if one != token], [*seen[:first], token, *seen[first:]], [*written, token]]
    if "vision_start_token_id" in config_levels(str(bench.model))[0]:  # else nothing has to precede an image
        wrongs.append([one for at, one in enumerate(seen) if at != first - 1])
    for wrong in wrongs:
        with refused(InvalidRequest, field="prompts[0]"):
            await engine.generate(TokenPrompt(token_ids=tuple(wrong), media=media), SEEN)


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED, slow=True)
async def images_count_in_the_context(bench: Bench) -> None:
    """Images count towards the context length; a request that does not fit is refused."""
    image = [png(pattern_pixel)]
    seen = (await bench.engine.generate(with_images(image), SEEN)).completions[0].prompt_token_ids
    room = bench.engine.model_info.context_length - len(seen)
    with refused(InvalidRequest, field="sampling_params.max_new_tokens"):
        await bench.engine.generate(with_images(image), SamplingParams(max_new_tokens=room + 1))
    fitting = SamplingParams(max_new_tokens=room, temperature=0)
    (completion,) = (await bench.engine.generate(with_images(image), fitting)).completions
    assert completion.prompt_token_ids == seen
    assert 0 < len(completion.token_ids) <= room


@case(Capability.IMAGES, Capability.PROMPT_LOGPROBS, model=ModelKind.VISION, config=BOUNDED)
async def prompts_with_images_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of image placeholders, are those of an independent forward pass."""
    images = [png(pattern_pixel), png(striped_pixel, 96, 40)]
    params = SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(with_images(images), params)).completions
    check_scored(bench, completion, images)
    check_seen(bench, completion, images)


@case(Capability.IMAGES, Capability.REPETITION_PENALTY, model=ModelKind.VISION, config=BOUNDED)
async def images_are_tokens_to_penalties(bench: Bench) -> None:
    """The repetition penalty applies to an image's placeholder token as to any other prompt token."""
    images = [png(pattern_pixel)]
    params = SEEN.model_copy(update={"repetition_penalty": 1.5, "logprobs": None})
    (completion,) = (await bench.engine.generate(with_images(images), params)).completions
    logits = output_logits(bench, completion, images)
    drawn_from = steps(completion, logits, params, media_tolerance(bench))
    for token, drawn in zip(completion.token_ids[: len(logits)], drawn_from, strict=True):
        drawn.check_drawn(token, params, media_tolerance(bench), f"token {token}")


@case(
    Capability.IMAGES,
    Capability.LORA,
    model=ModelKind.VISION,
    config={**BOUNDED, "enable_lora": True, "max_lora_rank": 8},
    slow=True,
)
async def adapters_of_a_vision_model_are_applied_or_refused(bench: Bench) -> None:
    """An adapter of a vision model is applied, whether it has the checkpoint's names or those in memory.

    One of its vision layers is applied, too, or refused by name: some engines ignore it. Names in memory are those that
    a trainer's adapter has; ``drivetrain_weight_sync.receiver.adaptable_layers`` knows both.
    """
    images = [png(pattern_pixel)]
    prompt = with_images(images)
    check_seen(bench, (await bench.engine.generate(prompt, SEEN)).completions[0], images)
    stored = [name for name in tensors_of(bench.model) if _OF_VISION in name]
    of_vision = {name.removesuffix(".weight").rpartition(".")[2] for name in stored}
    of_language = next(pair for pair in _PAIRS if of_vision.isdisjoint(pair))
    for targets in (of_language, ("down_proj",), ("qkv",), ("q_proj", "qkv"), ("fc1",)):
        if not has_layers(bench.model, targets):
            continue
        adapter = make_adapter(bench.model, bench.folder("adapter"), seed=1, targets=targets)
        merged = merge(bench.model, adapter, bench.folder("merged"))
        for path in (adapter.path, change_adapter(adapter, bench.folder("adapter"), partial(_as_in_memory, bench))):
            try:
                await bench.engine.load_lora_adapter("a", str(path))
            except InvalidRequest as error:
                refusal = str(error)
                assert targets is not of_language, f"an adapter of the language model is refused: {refusal}"
                layers = [layer.removeprefix("model.") for layer in adapter.scales]
                assert any(layer in refusal for layer in layers), f"the refusal names no layer: {refusal}"
                continue
            answers = (await bench.engine.generate(prompt, SEEN, lora="a")).completions
            await bench.engine.unload_lora_adapter("a")
            check_seen(bench, answers[0], images, merged)
    check_seen(bench, (await bench.engine.generate(prompt, SEEN)).completions[0], images)


def _as_in_memory(bench: Bench, _: object, tensors: dict[str, torch.Tensor]) -> None:
    """Give an adapter's tensors the names of the model's layers in memory."""
    from transformers import AutoModelForImageTextToText

    layers = [name for name, _ in AutoModelForImageTextToText.from_pretrained(bench.model).named_modules()]
    for name in list(tensors):
        stored, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        own = stored[stored.rindex("blocks." if "blocks." in stored else "layers.") :]
        is_alike = _OF_VISION in stored
        (layer,) = (one for one in layers if one.endswith(f".{own}") and (_OF_VISION in one) is is_alike)
        tensors[f"base_model.model.{layer}.lora_{part}"] = tensors.pop(name)
