"""Caches, aborts and updates mix up no images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain.types.prompts import ImageInput, TokenPrompt
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import is_of_vision, tensors_of, write_checkpoint
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, in_time
from drivetrain_conformance.references.oracle import log_softmax
from drivetrain_weight_sync import WeightSync

if TYPE_CHECKING:
    pass
from drivetrain_conformance.cases.multimodal.checks import (
    BOUNDED,
    SEEN,
    check_readable,
    check_retracted,
    check_seen,
    first_place,
    media_tolerance,
    output_logits,
    seen_to_the_end,
    with_images,
)
from drivetrain_conformance.cases.multimodal.media_files import black_pixel, pattern_pixel, png, striped_pixel


@case(Capability.IMAGES, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=BOUNDED)
async def a_cached_image_is_no_other(bench: Bench) -> None:
    """The prefix cache serves an image again, but never for another image with the same ids, even one of equal size."""
    engine = bench.engine
    for first, second in (
        (png(pattern_pixel), png(striped_pixel)),
        (png(black_pixel, 112, 56), png(black_pixel, 56, 112)),
    ):
        await engine.reset_prefix_cache()
        seen: list[list[int]] = []
        for image, is_new in ((first, True), (second, True), (first, False), (second, False)):
            (completion,) = (await engine.generate(with_images([image]), SEEN)).completions
            check_seen(bench, completion, [image])
            seen.append(completion.prompt_token_ids)
            assert (completion.cached_tokens <= first_place(completion)) is is_new
        assert seen[0] == seen[1], "the images take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(with_images([first]), SEEN)).completions
    assert completion.cached_tokens == 0
    check_seen(bench, completion, [first])


@case(Capability.IMAGES, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=BOUNDED)
async def a_further_turn_adds_an_image(bench: Bench) -> None:
    """A prompt that begins with an earlier one and adds an image sees both, the first in the cached prefix."""
    engine = bench.engine
    for images in ([png(pattern_pixel), png(striped_pixel)], [png(striped_pixel, 40, 96), png(pattern_pixel, 96, 40)]):
        await engine.reset_prefix_cache()
        (first,) = (await engine.generate(with_images(images[:1]), SEEN)).completions
        added = engine.tokenizer.encode(with_images(images[1:]))
        media = tuple(ImageInput(data=image) for image in images)
        turn = TokenPrompt(token_ids=(*first.prompt_token_ids, *added), media=media)
        (second,) = (await engine.generate(turn, SEEN)).completions
        check_seen(bench, second, images)
        assert second.cached_tokens > first_place(first), "the image of the first turn is computed again"


@case(Capability.IMAGES, Capability.ABORT, model=ModelKind.VISION, config=BOUNDED)
async def an_aborted_request_leaves_the_images_of_others(bench: Bench) -> None:
    """Requests with images are aborted one by one, and the others see their own images to the end."""
    engine, params = bench.engine, bench.long(160, logprobs=0)
    pictures = [[png(pattern_pixel)], [png(striped_pixel, 96, 40)], [png(black_pixel), png(pattern_pixel)]]
    prompts, ids = [with_images(images) for images in pictures], ["first", "second", "third"]
    async with bench.in_flight(prompts, params, tokens=0, request_ids=ids) as task:
        for request_id in ("third", "first"):
            await engine.abort(request_id)
        completions = (await task).completions
    for index, (completion, images) in enumerate(zip(completions, pictures, strict=True)):
        if index == 1:
            assert completion.finish_reason is not FinishReason.ABORT
        if completion.token_ids:
            check_seen(bench, completion, images)


@case(
    Capability.IMAGES,
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    Capability.VERSION_SPANS,
    model=ModelKind.VISION,
    config=BOUNDED,
    changes_weights=True,
)
async def an_update_in_flight_sees_an_image_anew(bench: Bench) -> None:
    """A request retracted for an update goes on as if the new weights had seen its image and read its tokens."""
    other, params = bench.other_weights(), bench.long(160, logprobs=0)
    (images, *_), _ = await seen_to_the_end(bench, params, lambda side: ([png(pattern_pixel, side, 84)], [], []))
    async with bench.in_flight([with_images(images)], params) as task:
        await bench.engine.load_weights_from_disk(str(other), "new", mode=PauseMode.RETRACT)
        (completion,) = (await task).completions
    with in_time(completion):
        assert [span.version for span in completion.weight_versions][1:] == ["new"], "it had ended before the update"
    switch = completion.weight_versions[0].end
    rows = log_softmax(output_logits(bench, completion, images, other))
    assert completion.logprobs is not None
    for at in range(switch, len(rows)):
        distance = abs(float(rows[at, completion.token_ids[at]]) - completion.logprobs[at])
        assert distance <= media_tolerance(bench), f"token {at}, {at - switch} after the update, is {distance:.2g} off"
    assert len(rows) > switch


@case(Capability.IMAGES, Capability.WEIGHTS_DISK, model=ModelKind.VISION, config=BOUNDED, changes_weights=True)
async def new_weights_see_an_image_anew(bench: Bench) -> None:
    """After an update an image seen before is seen with the new weights, including the vision model's.

    Further updates change the vision model alone, then all but that, then everything; every second one comes from the
    trainer's memory if the engine takes such.
    """
    engine, other, images = bench.engine, bench.other_weights(), [png(pattern_pixel)]
    old, new = tensors_of(bench.model), tensors_of(other)
    of_vision = {name: old[name] if is_of_vision(name) else new[name] for name in old}
    mixed = write_checkpoint(bench.folder("mixed"), bench.model, of_vision)
    await engine.generate(with_images(images), SEEN)
    for number, model in enumerate((other, mixed, bench.model, other)):
        version = f"new-{number}"
        if number % 2 and bench.claims(Capability.WEIGHTS_SHARED_MEMORY):
            async with WeightSync.connect(tensors_of(model), engine, "shared_memory") as sync:
                await sync.push(version=version)
        else:
            await engine.load_weights_from_disk(str(model), version)
        (completion,) = (await engine.generate(with_images(images), SEEN)).completions
        assert completion.weight_version in (version, None)
        check_seen(bench, completion, images, model)


@case(Capability.IMAGES, Capability.READ_WEIGHTS, model=ModelKind.VISION, config=BOUNDED)
async def every_tensor_of_a_model_with_images_can_be_read(bench: Bench) -> None:
    """Each tensor of the checkpoint, including the vision model's, is in the manifest and reads back unchanged."""
    await check_readable(bench, with_images([png(pattern_pixel)]))


@case(Capability.IMAGES, Capability.PAUSE_RETRACT, model=ModelKind.VISION, config=BOUNDED)
async def a_retracted_image_is_seen_again(bench: Bench) -> None:
    """A retracted request continues with its image."""
    await check_retracted(bench, lambda side: ([png(pattern_pixel, side, 84)], [], []))
