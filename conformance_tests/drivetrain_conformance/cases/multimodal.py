"""Images, videos and sounds in prompts. The media files are generated here, byte by byte."""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import os
import struct
import threading
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend.toolkit.model_folder import config_levels
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.prompts import AudioInput, ChatPrompt, ImageInput, MediaInput, Message, TokenPrompt, VideoInput
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.made_adapters import change_adapter, has_layers, make_adapter, merge
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import raw_bytes, tensors_of
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, NoOracle, check_held, end_requests, in_time, until_running
from drivetrain_conformance.references.oracle import Film, ImagesOracle, Logits, SoundsOracle, VideosOracle, log_softmax
from drivetrain_conformance.references.reference_sampling import steps

if TYPE_CHECKING:
    import torch

Pixel = tuple[int, int, int]

_SIDE: Final = 64
_HERTZ: Final = 16_000
"""Samples per second that the model takes."""
_NO_TEXT: Final = (200, 254, 131)
"""Token ids that no text is tokenised to."""
_OF_TF32: Final = 5e-3
"""Difference of a logprob, in nats, that a GPU's convolutions leave: it was at most 1.5e-3 on an H200."""
_RESAMPLED: Final = 0.2
"""Largest change of a logprob, in nats, by the filter with which an engine resamples a pure tone."""
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_BOUNDS: Final = {
    "max_bytes": 1 << 20,
    "max_pixels": 1 << 16,
    "max_video_seconds": 10,
    "max_video_pixels": 1 << 18,
    "max_audio_seconds": 2,
    "max_audio_samples": 40_000,
}
_BOUNDED: Final = {"media": _BOUNDS}
_KINDS: Final = {ImageInput: "image", VideoInput: "video", AudioInput: "audio"}
_PAIRS: Final = (("q_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of which one pair is in the language model alone, by the last part of their names."""
_OF_VISION: Final = "vis"
"""Part of the names of all layers of a vision model: of ``visual`` and ``vision_tower``."""
_PRIVATE_HOSTS: Final = (
    *("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "127.1", "2130706433"),
    *("169.254.169.254", "10.0.0.1", "192.168.0.1"),
)
_GREEDY: Final = SamplingParams(max_new_tokens=16, temperature=0)
_SEEN: Final = SamplingParams(max_new_tokens=12, temperature=0, logprobs=0)


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def another_image_has_another_answer(bench: Bench) -> None:
    """The same text with two different images is answered differently, and with the same image equally."""
    black, noise = (ImageInput(data=_png(pixel)) for pixel in (_black, _pattern))
    await _assert_tells_apart(bench, "image", black, noise)


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def images_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """An image is the same given as bytes, as a path and as a data URL."""
    data = _png(_pattern)
    path = bench.folder("images") / "pattern.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    await _assert_same(bench, "image", [ImageInput(data=data), ImageInput(path=str(path)), ImageInput(url=url)])


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def images_stay_with_their_prompts(bench: Bench) -> None:
    """In a batch each prompt has its own images, and a prompt without images is answered as it is alone."""
    black, pattern = (ImageInput(data=_png(pixel)) for pixel in (_black, _pattern))
    prompts = [_chat("image", [black]), _chat("image", [pattern]), _chat("image", []), _chat("image", [black, pattern])]
    alone = [(await bench.engine.generate(prompt, _GREEDY)).completions[0] for prompt in prompts]
    together = (await bench.engine.generate(prompts, _GREEDY)).completions
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.token_ids == other.token_ids, f"prompt {index} is answered otherwise in a batch than alone"


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def images_are_fetched_once(bench: Bench) -> None:
    """An image behind a URL is fetched once for all samples of its prompt, and seen like its bytes."""
    data = _png(_pattern)
    with _served({"/pattern.png": data}) as (address, asked):
        params = _SEEN.model_copy(update={"n": 3})
        fetched = await bench.engine.generate(_chat("image", [ImageInput(url=f"{address}/pattern.png")]), params)
        assert asked == ["/pattern.png"]
        for completion in fetched.completions:
            _check_seen(bench, completion, [data])
        with refused(InvalidRequest, naming="/missing.png"):
            await bench.engine.generate(_chat("image", [ImageInput(url=f"{address}/missing.png")]), _GREEDY)


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def what_is_no_image_is_refused(bench: Bench) -> None:
    """An image that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("images") / "missing.png")
    os.mkfifo(fifo := bench.folder("fifos") / "fifo.png")
    good, nothing = _png(_black), base64.b64encode(b"nothing").decode()
    broken = (
        ImageInput(path=str(fifo)),
        ImageInput(data=_png_header(50_000, 50_000)),
        ImageInput(data=_eps()),
        ImageInput(data=b"this is no image"),
        ImageInput(data=b""),
        ImageInput(data=good[: len(good) // 2]),
        ImageInput(path=missing),
        ImageInput(url=f"data:image/png;base64,{nothing}"),
        ImageInput(url=Path(missing).as_uri()),
        ImageInput(url="http://127.0.0.1:1/image.png"),
    )
    await _check_refused(bench, "image", broken, ((ImageInput(data=_png(_black, 260, 260)), "max_pixels"),))
    await _check_bytes_are_bounded(bench, ImageInput, good)
    assert await _answers(bench, "image", ImageInput(data=good))
    there = bench.folder("images") / "there.png"
    there.write_bytes(good)
    redirects = {"/to-a-file": there.as_uri(), "/around": "/around"}
    with _served({}, redirects, {"/huge": 10**12}) as (address, _):
        for path in ("to-a-file", "around", "huge"):
            with refused(InvalidRequest, field="prompts", naming=f"/{path}"):
                await bench.engine.generate(_chat("image", [ImageInput(url=f"{address}/{path}")]), _GREEDY)


@case(Capability.IMAGES, model=ModelKind.VISION, config={"media": {**_BOUNDS, "allow_private_hosts": False}})
async def private_hosts_may_be_forbidden(bench: Bench) -> None:
    """With allow_private_hosts=False nothing is fetched from loopback, link-local or private addresses or names.

    To mend it, fetch media with ``drivetrain.media.inputs.read_bytes``: it checks each address before it connects.
    """
    image = _png(_pattern)
    with _served({"/pattern.png": image}) as (address, asked):
        port = address.rpartition(":")[2]
        for host in (
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "[::ffff:127.0.0.1]",
            "127.1",
            "2130706433",
            "169.254.169.254",
        ):
            url = f"http://{host}:{port}/pattern.png"
            with refused(InvalidRequest, field="prompts", otherwise=f"an image was fetched from {host}"):
                await bench.engine.generate(_chat("image", [ImageInput(url=url)]), _GREEDY)
        assert not asked, f"a private host was asked for {asked}"
    assert await _answers(bench, "image", ImageInput(data=image))


# What the model sees -------------------------------------------------------------------------------------------------


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def an_image_is_seen_as_the_model_sees_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the images."""
    for images in (
        [_png(_pattern)],
        [_png(_black)],
        [_png(_stripes, 96, 40)],
        [_png(_pattern), _png(_stripes, 40, 96)],
        [_png(_stripes, 40, 96), _png(_pattern)],
        [],
    ):
        (completion,) = (await bench.engine.generate(_with_images(images), _SEEN)).completions
        _check_seen(bench, completion, images)


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def a_prompt_comes_back_as_it_was_seen(bench: Bench) -> None:
    """A completion's prompt ids repeat each image's placeholder as the model needs, and can be sent back."""
    images = [_png(_pattern), _png(_stripes, 96, 40)]
    media = tuple(ImageInput(data=image) for image in images)
    engine = bench.engine
    asked = _with_images(images)
    (completion,) = (await engine.generate(asked, _SEEN)).completions
    written, seen = engine.tokenizer.encode(asked), completion.prompt_token_ids
    assert len(seen) > len(written), "the prompt comes back as it was written, and not as it was seen"
    _check_seen(bench, completion, images)
    (token,) = {token for token in seen if seen.count(token) > written.count(token)}
    assert [token for token, _ in itertools.groupby(seen)] == [token for token, _ in itertools.groupby(written)]
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=media)
        (again,) = (await engine.generate(prompt, _SEEN)).completions
        assert again.prompt_token_ids == seen
        _check_seen(bench, again, images)
    first = seen.index(token)
    wrongs = [[one for one in seen if one != token], [*seen[:first], token, *seen[first:]], [*written, token]]
    if "vision_start_token_id" in config_levels(str(bench.model))[0]:  # else nothing has to precede an image
        wrongs.append([one for at, one in enumerate(seen) if at != first - 1])
    for wrong in wrongs:
        with refused(InvalidRequest, field="prompts[0]"):
            await engine.generate(TokenPrompt(token_ids=tuple(wrong), media=media), _SEEN)


@case(Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def images_count_in_the_context(bench: Bench) -> None:
    """Images count towards the context length; a request that does not fit is refused."""
    image = [_png(_pattern)]
    seen = (await bench.engine.generate(_with_images(image), _SEEN)).completions[0].prompt_token_ids
    room = bench.engine.model_info.context_length - len(seen)
    with refused(InvalidRequest, field="sampling_params.max_new_tokens"):
        await bench.engine.generate(_with_images(image), SamplingParams(max_new_tokens=room + 1))
    fitting = SamplingParams(max_new_tokens=room, temperature=0)
    (completion,) = (await bench.engine.generate(_with_images(image), fitting)).completions
    assert completion.prompt_token_ids == seen
    assert 0 < len(completion.token_ids) <= room


@case(Capability.IMAGES, Capability.PROMPT_LOGPROBS, model=ModelKind.VISION, config=_BOUNDED)
async def prompts_with_images_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of image placeholders, are those of an independent forward pass."""
    images = [_png(_pattern), _png(_stripes, 96, 40)]
    params = _SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(_with_images(images), params)).completions
    _check_scored(bench, completion, images)
    _check_seen(bench, completion, images)


@case(Capability.IMAGES, Capability.REPETITION_PENALTY, model=ModelKind.VISION, config=_BOUNDED)
async def images_are_tokens_to_penalties(bench: Bench) -> None:
    """The repetition penalty applies to an image's placeholder token as to any other prompt token."""
    images = [_png(_pattern)]
    params = _SEEN.model_copy(update={"repetition_penalty": 1.5, "logprobs": None})
    (completion,) = (await bench.engine.generate(_with_images(images), params)).completions
    logits = _output_logits(bench, completion, images)
    drawn_from = steps(completion, logits, params, _tolerance(bench))
    for token, drawn in zip(completion.token_ids[: len(logits)], drawn_from, strict=True):
        assert drawn.scaled[token] >= drawn.scaled.max() - _tolerance(bench)


@case(
    Capability.IMAGES,
    Capability.LORA,
    model=ModelKind.VISION,
    config={**_BOUNDED, "enable_lora": True, "max_lora_rank": 8},
)
async def adapters_of_a_vision_model_are_applied_or_refused(bench: Bench) -> None:
    """An adapter of a vision model is applied, whether it has the checkpoint's names or those in memory.

    One of its vision layers is applied, too, or refused by name: some engines ignore it. Names in memory are those that
    a trainer's adapter has; ``drivetrain_weight_sync.receiver.adaptable_layers`` knows both.
    """
    images = [_png(_pattern)]
    prompt = _with_images(images)
    _check_seen(bench, (await bench.engine.generate(prompt, _SEEN)).completions[0], images)
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
            answers = (await bench.engine.generate(prompt, _SEEN, lora="a")).completions
            await bench.engine.unload_lora_adapter("a")
            _check_seen(bench, answers[0], images, merged)
    _check_seen(bench, (await bench.engine.generate(prompt, _SEEN)).completions[0], images)


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


# No mixing -----------------------------------------------------------------------------------------------------------


@case(Capability.IMAGES, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=_BOUNDED)
async def a_cached_image_is_no_other(bench: Bench) -> None:
    """The prefix cache serves an image again, but never for another image with the same ids, even one of equal size."""
    engine = bench.engine
    for first, second in (
        (_png(_pattern), _png(_stripes)),
        (_png(_black, 112, 56), _png(_black, 56, 112)),
    ):
        await engine.reset_prefix_cache()
        seen: list[list[int]] = []
        for image, is_new in ((first, True), (second, True), (first, False), (second, False)):
            (completion,) = (await engine.generate(_with_images([image]), _SEEN)).completions
            _check_seen(bench, completion, [image])
            seen.append(completion.prompt_token_ids)
            assert (completion.cached_tokens <= _first_place(completion)) is is_new
        assert seen[0] == seen[1], "the images take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(_with_images([first]), _SEEN)).completions
    assert completion.cached_tokens == 0
    _check_seen(bench, completion, [first])


@case(Capability.IMAGES, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=_BOUNDED)
async def a_further_turn_adds_an_image(bench: Bench) -> None:
    """A prompt that begins with an earlier one and adds an image sees both, the first in the cached prefix."""
    engine = bench.engine
    for images in ([_png(_pattern), _png(_stripes)], [_png(_stripes, 40, 96), _png(_pattern, 96, 40)]):
        await engine.reset_prefix_cache()
        (first,) = (await engine.generate(_with_images(images[:1]), _SEEN)).completions
        added = engine.tokenizer.encode(_with_images(images[1:]))
        media = tuple(ImageInput(data=image) for image in images)
        turn = TokenPrompt(token_ids=(*first.prompt_token_ids, *added), media=media)
        (second,) = (await engine.generate(turn, _SEEN)).completions
        _check_seen(bench, second, images)
        assert second.cached_tokens > _first_place(first), "the image of the first turn is computed again"


@case(Capability.IMAGES, Capability.ABORT, model=ModelKind.VISION, config=_BOUNDED)
async def an_aborted_request_leaves_the_images_of_others(bench: Bench) -> None:
    """Requests with images are aborted one by one, and the others see their own images to the end."""
    engine, params = bench.engine, bench.long(160, logprobs=0)
    pictures = [[_png(_pattern)], [_png(_stripes, 96, 40)], [_png(_black), _png(_pattern)]]
    prompts, ids = [_with_images(images) for images in pictures], ["first", "second", "third"]
    task = await until_running(engine, 3, lambda: engine.generate(prompts, params, request_ids=ids))
    try:
        for request_id in ("third", "first"):
            await engine.abort(request_id)
        completions = (await task).completions
    finally:
        await end_requests(engine, task)
    for index, (completion, images) in enumerate(zip(completions, pictures, strict=True)):
        if index == 1:
            assert completion.finish_reason is not FinishReason.ABORT
        if completion.token_ids:
            _check_seen(bench, completion, images)


@case(
    Capability.IMAGES,
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    Capability.VERSION_SPANS,
    model=ModelKind.VISION,
    config=_BOUNDED,
    changes_weights=True,
)
async def an_update_in_flight_sees_an_image_anew(bench: Bench) -> None:
    """A request retracted for an update goes on as if the new weights had seen its image and read its tokens."""
    other, params = bench.other_weights(), bench.long(160, logprobs=0)
    (images, *_), _ = await _seen_to_the_end(bench, params, lambda side: ([_png(_pattern, side, 84)], [], []))
    async with bench.in_flight([_with_images(images)], params) as task:
        await bench.engine.load_weights_from_disk(str(other), "new", mode=PauseMode.RETRACT)
        (completion,) = (await task).completions
    with in_time(completion):
        assert [span.version for span in completion.weight_versions][1:] == ["new"], "it had ended before the update"
    switch = completion.weight_versions[0].end
    rows = log_softmax(_output_logits(bench, completion, images, other))
    assert completion.logprobs is not None
    for at in range(switch, len(rows)):
        distance = abs(float(rows[at, completion.token_ids[at]]) - completion.logprobs[at])
        assert distance <= _tolerance(bench), f"token {at}, {at - switch} after the update, is {distance:.2g} off"
    assert len(rows) > switch


@case(Capability.IMAGES, Capability.WEIGHTS_DISK, model=ModelKind.VISION, config=_BOUNDED, changes_weights=True)
async def new_weights_see_an_image_anew(bench: Bench) -> None:
    """After an update an image seen before is seen with the new weights, including the vision model's."""
    other, images = bench.other_weights(), [_png(_pattern)]
    await bench.engine.generate(_with_images(images), _SEEN)
    await bench.engine.load_weights_from_disk(str(other), "new")
    (completion,) = (await bench.engine.generate(_with_images(images), _SEEN)).completions
    assert completion.weight_version in ("new", None)
    _check_seen(bench, completion, images, other)


@case(Capability.IMAGES, Capability.READ_WEIGHTS, model=ModelKind.VISION, config=_BOUNDED)
async def every_tensor_of_a_model_with_images_can_be_read(bench: Bench) -> None:
    """Each tensor of the checkpoint, including the vision model's, is in the manifest and reads back unchanged."""
    await _check_readable(bench, _with_images([_png(_pattern)]))


@case(Capability.IMAGES, Capability.PAUSE_RETRACT, model=ModelKind.VISION, config=_BOUNDED)
async def a_retracted_image_is_seen_again(bench: Bench) -> None:
    """A retracted request continues with its image."""
    await _check_retracted(bench, lambda side: ([_png(_pattern, side, 84)], [], []))


# Videos --------------------------------------------------------------------------------------------------------------


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def another_video_has_another_answer(bench: Bench) -> None:
    """The same text with two different videos is answered differently, and with the same video equally."""
    black, moving = _Video((_black,) * 4), _Video(_MOVING)
    await _assert_tells_apart(bench, "video", VideoInput(data=black.file), VideoInput(data=moving.file))


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def videos_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """A video is the same given as bytes, as a path and as a data URL."""
    data = _Video(_MOVING).file
    path = bench.folder("videos") / "moving.avi"
    path.write_bytes(data)
    url = f"data:video/x-msvideo;base64,{base64.b64encode(data).decode()}"
    await _assert_same(bench, "video", [VideoInput(data=data), VideoInput(path=str(path)), VideoInput(url=url)])


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def videos_are_fetched_once(bench: Bench) -> None:
    """A video behind a URL is fetched once for all samples of its prompt, and seen like its bytes."""
    video = _Video(_MOVING)
    with _served({"/moving.avi": video.file}) as (address, asked):
        prompt = _chat("video", [VideoInput(url=f"{address}/moving.avi")])
        fetched = await bench.engine.generate(prompt, _SEEN.model_copy(update={"n": 3}))
        assert asked == ["/moving.avi"]
        for completion in fetched.completions:
            _check_seen(bench, completion, videos=[video])


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def what_is_no_video_is_refused(bench: Bench) -> None:
    """A video that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("videos") / "missing.avi")
    good = _Video(_MOVING).file
    broken = (
        VideoInput(data=b"this is no video"),
        VideoInput(data=b""),
        VideoInput(data=good[:300]),
        VideoInput(data=good[: len(good) // 2]),
        VideoInput(data=_png(_black)),
        VideoInput(data=_noise(1).file),
        VideoInput(data=f"#EXTM3U\n#EXTINF:2,\n{Path(missing).as_uri()}\n#EXT-X-ENDLIST\n".encode()),
        VideoInput(path=missing),
        VideoInput(url="http://127.0.0.1:1/video.avi"),
    )
    large = (
        (VideoInput(data=_Video((_black,) * 24, 2).file), "max_video_seconds"),
        (VideoInput(data=_Video((_black,) * 70, 25).file), "max_video_pixels"),
        (VideoInput(data=_Video((_black,) * 4, 2, 260, 260).file), "max_video_pixels"),
    )
    await _check_refused(bench, "video", broken, large)
    await _check_bytes_are_bounded(bench, VideoInput, good)
    assert await _answers(bench, "video", VideoInput(data=good))


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def a_video_is_seen_as_the_model_sees_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the videos' frames."""
    for videos in (
        [_Video(_MOVING)],
        [_Video((_black,) * 4)],
        [_Video((*_MOVING, _stripes, _pattern, _black, _stripes), 8, 96, 40)],
        [_Video((_stripes, _pattern, _black), 1)],
        [_Video((_pattern,), 25)],
        [_Video(_MOVING, 3)],
        [_Video((_stripes, _pattern) * 26, 25)],
        [_Video(_MOVING, 4), _Video((_stripes, _stripes), 2, 40, 96)],
        [_Video((_stripes, _stripes), 2, 40, 96), _Video(_MOVING, 4)],
    ):
        (completion,) = (await bench.engine.generate(_with(videos=videos), _SEEN)).completions
        _check_seen(bench, completion, videos=videos)


@case(Capability.VIDEO, Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def images_and_videos_stand_in_one_prompt(bench: Bench) -> None:
    """Images and videos in one prompt are seen in their own places, in any order and beside other prompts."""
    image, other, video = _png(_stripes, 96, 40), _png(_pattern), _Video(_MOVING, 4, 84, 56)
    one, first, second = ImageInput(data=image), ImageInput(data=other), VideoInput(data=video.file)
    beside: list[tuple[list[MediaInput], list[bytes], list[_Video]]] = [
        ([second, one], [image], [video]),
        ([one, second], [image], [video]),
        ([first, second, one], [other, image], [video]),
        ([second], [], [video]),
        ([first], [other], []),
        ([], [], []),
    ]
    batch = await bench.engine.generate([_chat("video", media) for media, _, _ in beside], _SEEN)
    for completion, (_, images, videos) in zip(batch.completions, beside, strict=True):
        _check_seen(bench, completion, images, videos=videos)


@case(Capability.VIDEO, Capability.IMAGES, model=ModelKind.VISION, config=_BOUNDED)
async def a_prompt_with_a_video_comes_back_as_it_was_seen(bench: Bench) -> None:
    """A completion's prompt ids repeat each image's and video's placeholder, and can be sent back as a prompt."""
    image, video = _png(_stripes, 96, 40), _Video(_MOVING)
    media = (VideoInput(data=video.file), ImageInput(data=image))
    asked = _chat("video", media)
    (completion,) = (await bench.engine.generate(asked, _SEEN)).completions
    _check_seen(bench, completion, [image], videos=[video])
    written, seen = bench.engine.tokenizer.encode(asked), completion.prompt_token_ids
    repeated = {token for token in seen if seen.count(token) > written.count(token)}
    assert len(repeated) == 2
    assert [token for token, _ in itertools.groupby(seen)] == [token for token, _ in itertools.groupby(written)]
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=media)
        (again,) = (await bench.engine.generate(prompt, _SEEN)).completions
        assert again.prompt_token_ids == seen
        _check_seen(bench, again, [image], videos=[video])
    first = _first_place(completion)
    for wrong in (
        [one for one in seen if one != seen[first]],
        [*seen[:first], seen[first], *seen[first:]],
        [*written, seen[first]],
    ):
        with refused(InvalidRequest, field="prompts[0]"):
            await bench.engine.generate(TokenPrompt(token_ids=tuple(wrong), media=media), _SEEN)


@case(Capability.VIDEO, model=ModelKind.VISION, config=_BOUNDED)
async def videos_count_in_the_context(bench: Bench) -> None:
    """Videos count towards the context length; a request that does not fit is refused."""
    prompt = _with(videos=[_Video(_MOVING)])
    seen = (await bench.engine.generate(prompt, _SEEN)).completions[0].prompt_token_ids
    room = bench.engine.model_info.context_length - len(seen)
    with refused(InvalidRequest, field="sampling_params.max_new_tokens"):
        await bench.engine.generate(prompt, SamplingParams(max_new_tokens=room + 1))
    fitting = SamplingParams(max_new_tokens=room, temperature=0)
    (completion,) = (await bench.engine.generate(prompt, fitting)).completions
    assert completion.prompt_token_ids == seen
    assert 0 < len(completion.token_ids) <= room


@case(Capability.VIDEO, Capability.PROMPT_LOGPROBS, model=ModelKind.VISION, config=_BOUNDED)
async def prompts_with_videos_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of video placeholders, are those of an independent forward pass."""
    videos = [_Video(_MOVING, 4), _Video((_stripes, _black), 2, 96, 40)]
    params = _SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(_with(videos=videos), params)).completions
    _check_scored(bench, completion, videos=videos)
    _check_seen(bench, completion, videos=videos)


@case(Capability.VIDEO, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=_BOUNDED)
async def a_cached_video_is_no_other(bench: Bench) -> None:
    """The prefix cache serves a video again, but never for another that differs only in shape or speed."""
    engine = bench.engine
    for first, second, is_speed in (
        (_Video(_MOVING), _Video((*_MOVING[:3], _stripes)), False),
        (_Video((_black,) * 2, 2, 112, 56), _Video((_black,) * 2, 2, 56, 112), False),
        (_Video(_MOVING * 2, 1), _Video(_MOVING * 2, 8), True),
    ):
        await engine.reset_prefix_cache()
        seen: list[list[int]] = []
        for video, is_new in ((first, True), (second, True), (first, False), (second, False)):
            (completion,) = (await engine.generate(_with(videos=[video]), _SEEN)).completions
            _check_seen(bench, completion, videos=[video])
            seen.append(completion.prompt_token_ids)
            if not is_speed:  # some models are not told the speed
                assert (completion.cached_tokens <= _first_place(completion)) is is_new
        assert seen[0] == seen[1], "the videos take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(_with(videos=[first]), _SEEN)).completions
    assert completion.cached_tokens == 0
    _check_seen(bench, completion, videos=[first])


@case(Capability.VIDEO, Capability.WEIGHTS_DISK, model=ModelKind.VISION, config=_BOUNDED, changes_weights=True)
async def new_weights_see_a_video_anew(bench: Bench) -> None:
    """After an update a video seen before is seen with the new weights, including the vision model's."""
    other, videos = bench.other_weights(), [_Video(_MOVING)]
    await bench.engine.generate(_with(videos=videos), _SEEN)
    await bench.engine.load_weights_from_disk(str(other), "new")
    (completion,) = (await bench.engine.generate(_with(videos=videos), _SEEN)).completions
    assert completion.weight_version in ("new", None)
    _check_seen(bench, completion, model=other, videos=videos)


@case(Capability.VIDEO, Capability.PAUSE_RETRACT, model=ModelKind.VISION, config=_BOUNDED)
async def a_retracted_video_is_seen_again(bench: Bench) -> None:
    """A retracted request continues with its video."""
    await _check_retracted(bench, lambda side: ([], [_Video(_MOVING, 2, side, 84)], []))


# Sound ---------------------------------------------------------------------------------------------------------------


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def another_sound_has_another_answer(bench: Bench) -> None:
    """The same text with two different sounds is answered differently, and with the same sound equally."""
    await _assert_tells_apart(bench, "audio", AudioInput(data=_noise(1).file), AudioInput(data=_noise(2).file))


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def sounds_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """A sound is the same given as bytes, as a path and as a data URL."""
    data = _noise(1).file
    path = bench.folder("sounds") / "noise.wav"
    path.write_bytes(data)
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    await _assert_same(bench, "audio", [AudioInput(data=data), AudioInput(path=str(path)), AudioInput(url=url)])


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def what_is_no_sound_is_refused(bench: Bench) -> None:
    """A sound that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("sounds") / "missing.wav")
    good = _noise(1).file
    broken = (
        AudioInput(data=b"this is no sound"),
        AudioInput(data=b""),
        AudioInput(data=good[:44]),
        AudioInput(data=good[: len(good) // 2]),
        AudioInput(data=_png(_black)),
        AudioInput(data=_Video((_black,) * 2).file),
        AudioInput(data=f"#EXTM3U\n#EXTINF:2,\n{Path(missing).as_uri()}\n#EXT-X-ENDLIST\n".encode()),
        AudioInput(path=missing),
        AudioInput(url="http://127.0.0.1:1/sound.wav"),
    )
    large = (
        (AudioInput(data=_noise(1, 2.1).file), "max_audio_seconds"),
        (AudioInput(data=_noise(1, 1.0, 48_000).file), "max_audio_samples"),
    )
    await _check_refused(bench, "audio", broken, large)
    await _check_bytes_are_bounded(bench, AudioInput, good)
    assert await _answers(bench, "audio", AudioInput(data=good))


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_sound_is_heard_as_the_model_hears_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the sounds."""
    for sounds in (
        [_noise(1)],
        [_sine(440)],
        [_noise(2, 0.1)],
        [_silence(0.5)],
        [_silence(1.0)],
        [_noise(1), _noise(2, 1.3)],
        [_noise(2, 1.3), _noise(1)],
        [],
    ):
        (completion,) = (await bench.engine.generate(_with_sounds(sounds), _SEEN)).completions
        _check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def sounds_stay_with_their_prompts(bench: Bench) -> None:
    """In a batch each prompt has its own sounds, of any length, beside prompts of text alone."""
    beside = [[_noise(1)], [_noise(2)], [], [_noise(3, 1.6), _noise(1)], [_noise(4, 0.1)], [_noise(1), _noise(3, 1.6)]]
    batch = await bench.engine.generate([_with_sounds(sounds) for sounds in beside], _SEEN)
    for completion, sounds in zip(batch.completions, beside, strict=True):
        _check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_sound_of_another_rate_is_resampled(bench: Bench) -> None:
    """A tone sampled at another rate than the model's takes as many tokens, and is answered almost equally."""
    (own,) = (await bench.engine.generate(_with_sounds([_sine(440)]), _SEEN)).completions
    _check_seen(bench, own, sounds=[_sine(440)])
    for rate in (8_000, 32_000):
        (other,) = (await bench.engine.generate(_with_sounds([_sine(440, rate)]), _SEEN)).completions
        assert other.prompt_token_ids == own.prompt_token_ids, f"at {rate} Hz the tone takes other tokens"
        ids = [*other.prompt_token_ids, *other.token_ids[:1]]
        row = log_softmax(_logits_of(bench, ids, (), (), sounds=[_sine(440)]))[-2]
        assert other.logprobs is not None
        distance = abs(other.logprobs[0] - float(row[other.token_ids[0]]))
        assert distance <= _RESAMPLED, f"a tone at {rate} Hz is answered {distance:.2g} nats otherwise"


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_prompt_with_a_sound_comes_back_as_it_was_heard(bench: Bench) -> None:
    """A completion's prompt ids repeat each sound's placeholder as the model needs, and can be sent back."""
    sounds = [_noise(1), _noise(2, 1.3)]
    asked = _with_sounds(sounds)
    (completion,) = (await bench.engine.generate(asked, _SEEN)).completions
    _check_seen(bench, completion, sounds=sounds)
    written, seen = bench.engine.tokenizer.encode(asked), completion.prompt_token_ids
    (token,) = {token for token in seen if seen.count(token) > written.count(token)}
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=asked.media)
        (again,) = (await bench.engine.generate(prompt, _SEEN)).completions
        assert again.prompt_token_ids == seen
        _check_seen(bench, again, sounds=sounds)
    untokenized = TokenPrompt(token_ids=(*_NO_TEXT, *seen), media=asked.media)
    (exact,) = (await bench.engine.generate(untokenized, _SEEN)).completions
    assert exact.prompt_token_ids == [*_NO_TEXT, *seen]
    _check_seen(bench, exact, sounds=sounds)
    first = seen.index(token)
    for wrong in ([one for one in seen if one != token], [*seen[:first], token, *seen[first:]], [*written, token]):
        with refused(InvalidRequest, field="prompts[0]"):
            await bench.engine.generate(TokenPrompt(token_ids=tuple(wrong), media=asked.media), _SEEN)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=_BOUNDED)
async def openais_input_audio_is_heard(bench: Bench) -> None:
    """An ``input_audio`` part of an OpenAI message is heard like the same sound beside a chat prompt."""
    sound = _noise(1)
    (completion,) = (await bench.engine.generate(_with_sounds([sound]), _SEEN)).completions
    _check_seen(bench, completion, sounds=[sound])
    data = base64.b64encode(sound.file).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "Describe the audio in one word."},
    ]
    answer = await bench.engine.chat_completion(
        {"messages": [{"role": "user", "content": parts}], "max_tokens": _SEEN.max_new_tokens, "temperature": 0}
    )
    assert answer["prompt_token_ids"] == completion.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == completion.token_ids


@case(Capability.AUDIO, Capability.PROMPT_LOGPROBS, model=ModelKind.AUDIO, config=_BOUNDED)
async def prompts_with_sounds_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of sound placeholders, are those of an independent forward pass."""
    sounds = [_noise(1), _noise(2, 1.3)]
    params = _SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(_with_sounds(sounds), params)).completions
    _check_scored(bench, completion, sounds=sounds)
    _check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, Capability.PREFIX_CACHE, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_cached_sound_is_no_other(bench: Bench) -> None:
    """The prefix cache serves a sound again, but never for another sound of the same length."""
    engine = bench.engine
    await engine.reset_prefix_cache()
    one, other = _noise(1, 1.0), _noise(2, 1.0)
    seen: list[list[int]] = []
    for sound, is_new in ((one, True), (other, True), (one, False), (other, False)):
        (completion,) = (await engine.generate(_with_sounds([sound]), _SEEN)).completions
        _check_seen(bench, completion, sounds=[sound])
        seen.append(completion.prompt_token_ids)
        assert (completion.cached_tokens <= _first_place(completion)) is is_new
    assert seen[0] == seen[1], "the sounds take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(_with_sounds([one]), _SEEN)).completions
    assert completion.cached_tokens == 0
    _check_seen(bench, completion, sounds=[one])


@case(Capability.AUDIO, Capability.PREFIX_CACHE, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_further_turn_adds_a_sound(bench: Bench) -> None:
    """A prompt that begins with an earlier one and adds a sound hears both, the first in the cached prefix."""
    engine, sounds = bench.engine, [_noise(1), _noise(2)]
    await engine.reset_prefix_cache()
    (first,) = (await engine.generate(_with_sounds(sounds[:1]), _SEEN)).completions
    added = engine.tokenizer.encode(_with_sounds(sounds[1:]))
    turn = TokenPrompt(token_ids=(*first.prompt_token_ids, *added), media=_with_sounds(sounds).media)
    (second,) = (await engine.generate(turn, _SEEN)).completions
    _check_seen(bench, second, sounds=sounds)
    assert second.cached_tokens > _first_place(first), "the sound of the first turn is computed again"


@case(Capability.AUDIO, Capability.ABORT, model=ModelKind.AUDIO, config=_BOUNDED)
async def an_aborted_request_leaves_the_sounds_of_others(bench: Bench) -> None:
    """Requests with sounds are aborted one by one, and the others hear their own sounds to the end."""
    engine, params = bench.engine, bench.long(160, logprobs=0)
    heard, ids = [[_noise(1)], [_noise(2)], [_noise(3), _noise(1)]], ["first", "second", "third"]
    prompts = [_with_sounds(sounds) for sounds in heard]
    task = await until_running(engine, 3, lambda: engine.generate(prompts, params, request_ids=ids))
    try:
        for request_id in ("third", "first"):
            await engine.abort(request_id)
        completions = (await task).completions
    finally:
        await end_requests(engine, task)
    assert completions[1].finish_reason is not FinishReason.ABORT
    for completion, sounds in zip(completions, heard, strict=True):
        if completion.token_ids:
            _check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, Capability.WEIGHTS_DISK, model=ModelKind.AUDIO, config=_BOUNDED, changes_weights=True)
async def new_weights_hear_a_sound_anew(bench: Bench) -> None:
    """After an update a sound heard before is heard with the new weights, including the audio model's."""
    other, sounds = bench.other_weights(), [_noise(1)]
    await bench.engine.generate(_with_sounds(sounds), _SEEN)
    await bench.engine.load_weights_from_disk(str(other), "new")
    (completion,) = (await bench.engine.generate(_with_sounds(sounds), _SEEN)).completions
    assert completion.weight_version in ("new", None)
    _check_seen(bench, completion, model=other, sounds=sounds)


@case(Capability.AUDIO, Capability.READ_WEIGHTS, model=ModelKind.AUDIO, config=_BOUNDED)
async def every_tensor_of_a_model_with_sounds_can_be_read(bench: Bench) -> None:
    """Each tensor of the checkpoint, including the audio model's, is in the manifest and reads back unchanged."""
    await _check_readable(bench, _with_sounds([_noise(1)]))


@case(Capability.AUDIO, Capability.PAUSE_RETRACT, model=ModelKind.AUDIO, config=_BOUNDED)
async def a_retracted_sound_is_heard_again(bench: Bench) -> None:
    """A retracted request continues with its sound."""
    await _check_retracted(bench, lambda side: ([], [], [_noise(side, 1.0)]))


# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Video:
    frames: tuple[Callable[[int, int], Pixel], ...]
    per_second: int = 2
    width: int = _SIDE
    height: int = _SIDE

    @property
    def file(self) -> bytes:
        return _avi(self.frames, self.per_second, self.width, self.height)

    @property
    def film(self) -> Film:
        """The decoded video, computed without the file."""
        return Film(
            np.array(
                [[[frame(x, y) for x in range(self.width)] for y in range(self.height)] for frame in self.frames],
                dtype=np.uint8,
            ),
            self.per_second,
        )


@dataclass(frozen=True)
class _Sound:
    samples: NDArray[np.int16]
    """Shape (samples,)."""
    rate: int = _HERTZ

    @property
    def file(self) -> bytes:
        """The sound as a WAV file of 16 bits."""
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(self.rate)
            writer.writeframes(self.samples.astype("<i2").tobytes())
        return file.getvalue()

    @property
    def heard(self) -> NDArray[np.float32]:
        """The samples as a decoder returns them, in -1 to 1."""
        assert self.rate == _HERTZ
        return (self.samples / 32768).astype(np.float32)


def _noise(seed: int, seconds: float = 0.5, rate: int = _HERTZ) -> _Sound:
    samples = np.random.default_rng(seed).standard_normal(round(seconds * rate)) * 4000
    return _Sound(samples.clip(-32768, 32767).astype(np.int16), rate)


def _silence(seconds: float) -> _Sound:
    return _Sound(np.zeros(round(seconds * _HERTZ), dtype=np.int16))


def _sine(hertz: float, rate: int = _HERTZ, seconds: float = 0.5) -> _Sound:
    at = np.arange(round(seconds * rate)) / rate
    return _Sound((np.sin(2 * np.pi * hertz * at) * 12_000).astype(np.int16), rate)


_Beside = tuple[Sequence[bytes], Sequence[_Video], Sequence[_Sound]]
"""Images, videos and sounds of a prompt."""


def _with_images(images: Sequence[bytes]) -> ChatPrompt:
    return _chat("image", [ImageInput(data=image) for image in images])


def _with(*, videos: Sequence[_Video]) -> ChatPrompt:
    return _chat("video", [VideoInput(data=video.file) for video in videos])


def _with_sounds(sounds: Sequence[_Sound]) -> ChatPrompt:
    return _chat("audio", [AudioInput(data=sound.file) for sound in sounds])


def _prompt_beside(media: _Beside) -> ChatPrompt:
    images, videos, sounds = media
    return _with_images(images) if images else _with(videos=videos) if videos else _with_sounds(sounds)


def _logits_of(
    bench: Bench,
    ids: Sequence[int],
    images: Sequence[bytes],
    videos: Sequence[_Video],
    model: Path | None = None,
    sounds: Sequence[_Sound] = (),
) -> Logits:
    """Return the oracle's logits of ids that contain the placeholders of these images and videos, or sounds."""
    oracle = bench.oracle(model)
    if sounds:
        if not isinstance(oracle, SoundsOracle):
            raise NoOracle
        return oracle.logits_beside_sounds(ids, [sound.heard for sound in sounds])
    if videos:
        if not isinstance(oracle, VideosOracle):
            raise NoOracle
        return oracle.logits_beside_videos(ids, images, [video.film for video in videos])
    if not images:
        return oracle.logits(ids)
    if not isinstance(oracle, ImagesOracle):
        raise NoOracle
    return oracle.logits_beside(ids, images)


def _output_logits(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    model: Path | None = None,
    videos: Sequence[_Video] = (),
    sounds: Sequence[_Sound] = (),
) -> Logits:
    """Return the oracle's logits of a completion up to its first placeholder, which the oracle would see as media."""
    prompt, tokens = completion.prompt_token_ids, completion.token_ids
    if images or videos or sounds:
        places = _places(completion)
        until = next((at for at, token in enumerate(tokens) if token in places), len(tokens))
        tokens = tokens[: until + 1]
    return _logits_of(bench, [*prompt, *tokens[:-1]], images, videos, model, sounds)[len(prompt) - 1 :]


def _first_place(completion: Completion) -> int:
    """Return the number of prompt tokens before the first placeholder, which is the first token to repeat."""
    pairs = itertools.pairwise(completion.prompt_token_ids)
    return next(at for at, (one, other) in enumerate(pairs) if one == other)


def _places(completion: Completion) -> set[int]:
    """Return the placeholder tokens of media: those that occur more than twice in a row."""
    runs = itertools.groupby(completion.prompt_token_ids)
    return {token for token, run in runs if len(list(run)) > 2}


def _tolerance(bench: Bench) -> float:
    """Return the allowed difference of a logprob from the oracle's; a GPU's convolutions round float32 to TF32."""
    info = bench.engine.model_info
    is_rounded = info.device.startswith("cuda") and info.dtype == "float32"
    return _OF_TF32 if is_rounded else bench.tolerance()


def _check_seen(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    model: Path | None = None,
    videos: Sequence[_Video] = (),
    sounds: Sequence[_Sound] = (),
) -> None:
    """Raise unless a completion's tokens and logprobs are the oracle's greedy ones for these media."""
    beside = f"{len(images)} images, {len(videos)} videos and {len(sounds)} sounds"
    assert completion.logprobs is not None
    assert completion.token_ids
    rows = log_softmax(_output_logits(bench, completion, images, model, videos, sounds))
    expected = [float(row[token]) for row, token in zip(rows, completion.token_ids[: len(rows)], strict=True)]
    below = max(float(row.max()) - value for row, value in zip(rows, expected, strict=True))
    assert below <= _tolerance(bench), f"a greedy token beside {beside} is {below:.2g} nats below the most likely"
    worst = max(abs(one - other) for one, other in zip(completion.logprobs[: len(rows)], expected, strict=True))
    assert worst <= _tolerance(bench), (
        f"logprobs beside {beside} are {worst:.2g} from those of the model: {completion.logprobs}"
    )


def _check_scored(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    videos: Sequence[_Video] = (),
    sounds: Sequence[_Sound] = (),
) -> None:
    """Raise unless the prompt's logprobs are the oracle's for these media."""
    prompt, scores = completion.prompt_token_ids, completion.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    rows = log_softmax(_logits_of(bench, prompt, images, videos, sounds=sounds))
    for index, (token, score) in enumerate(zip(prompt[1:], scores[1:], strict=True)):
        assert score is not None
        assert abs(score - rows[index, token]) <= _tolerance(bench), f"token {index + 1} of {prompt}: {score}"


async def _check_readable(bench: Bench, prompt: ChatPrompt) -> None:
    """Raise unless all tensors of the checkpoint read back unchanged after a prompt."""
    await bench.engine.generate(prompt, _SEEN)
    stored = tensors_of(bench.model)
    manifest = await bench.engine.weight_manifest()
    assert {spec.name for spec in manifest.tensors} == set(stored)
    for name, tensor in stored.items():
        assert (await bench.engine.get_weights_by_name(name)).data == raw_bytes(tensor), name


async def _seen_to_the_end(
    bench: Bench, params: SamplingParams, of_side: Callable[[int], _Beside]
) -> tuple[_Beside, Completion]:
    """Return media whose answer has no placeholder, so that the oracle can check it to its end, and the answer."""
    for side in range(56, 196, 28):
        media = of_side(side)
        (whole,) = (await bench.engine.generate(_prompt_beside(media), params)).completions
        if not _places(whole) & set(whole.token_ids):
            return media, whole
    raise AssertionError("every answer holds the token that stands for what is seen: none can be checked to its end")


async def _check_retracted(bench: Bench, of_side: Callable[[int], _Beside]) -> None:
    """Raise unless a retracted request continues with its media, of a width whose answer has no placeholder."""
    params = bench.long(160, logprobs=0)
    media, whole = await _seen_to_the_end(bench, params, of_side)
    async with bench.in_flight([_prompt_beside(media)], params) as task:
        await bench.engine.pause_generation(PauseMode.RETRACT)
        await check_held(bench.engine, task)
        await bench.engine.continue_generation()
        (completion,) = (await task).completions
    assert len(completion.token_ids) == len(whole.token_ids)
    images, videos, sounds = media
    _check_seen(bench, completion, images, videos=videos, sounds=sounds)


@contextmanager
def _served(
    files: Mapping[str, bytes],
    redirects: Mapping[str, str] = _NONE,
    sizes: Mapping[str, int] = _NONE,
    encodings: Mapping[str, str] = _NONE,
) -> Iterator[tuple[str, list[str]]]:
    """Serve files over HTTP; yield the address, and the list of paths that were requested and found.

    Args:
        files: Bodies, by path.
        redirects: Redirected paths and their targets.
        sizes: Paths that announce this content length and send no body.
        encodings: Content encodings that paths announce.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            if (location := redirects.get(self.path)) is not None:
                self.send_response(302)
                self.send_header("Location", location)
            else:
                self.send_response(404 if body is None and self.path not in sizes else 200)
            if (size := sizes.get(self.path)) is not None:
                self.send_header("Content-Length", str(size))
            if (encoding := encodings.get(self.path)) is not None:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            if body is not None:
                asked.append(self.path)
                with suppress(OSError):  # a client that reads only so much closes the connection
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


async def _check_refused(
    bench: Bench, kind: str, broken: Sequence[MediaInput], large: Sequence[tuple[MediaInput, str]]
) -> None:
    """Raise unless broken media are refused with their batch, and large ones by the name of the bound they exceed."""
    for one in broken:
        with refused(InvalidRequest, field="prompts"):
            await bench.engine.generate([_chat(kind, []), _chat(kind, [one])], _GREEDY)
        assert (await bench.engine.stats()).running == 0
    for one, bound in large:
        with refused(InvalidRequest, field="prompts", naming=bound):
            await bench.engine.generate(_chat(kind, [one]), _GREEDY)


async def _check_bytes_are_bounded(bench: Bench, kind: type[MediaInput], good: bytes) -> None:
    """Raise unless files are refused beyond the bound on bytes.

    The bound holds for a file from any source, for what a server sends compressed, and for all files of a prompt.
    """
    most, says = _BOUNDS["max_bytes"], _KINDS[kind]
    large = good + bytes(most)
    half = bench.folder("files") / "half"
    half.write_bytes(good + bytes(most // 2))
    (path := half.with_name("large")).write_bytes(large)
    files = {"/large": large, "/compressed": gzip.compress(large)}
    with _served(files, encodings={"/compressed": "gzip"}) as (address, _):
        url = f"data:{says}/x;base64,{base64.b64encode(large).decode()}"
        for media in (
            [kind(data=large)],
            [kind(path=str(path))],
            [kind(url=url)],
            [kind(url=f"{address}/large")],
            [kind(path=str(half)), kind(path=str(half))],
        ):
            with refused(InvalidRequest, field="prompts", naming="max_bytes"):
                await bench.engine.generate(_chat(says, media), _GREEDY)
        with refused(InvalidRequest, field="prompts", naming="/compressed"):
            await bench.engine.generate(_chat(says, [kind(url=f"{address}/compressed")]), _GREEDY)


def _chat(kind: str, media: Sequence[MediaInput]) -> ChatPrompt:
    """Return a question about media, with one placeholder in the message for each."""
    question = {"type": "text", "text": f"Describe the {kind} in one word."}
    content = [*({"type": _KINDS[type(one)]} for one in media), question]
    return ChatPrompt(messages=(Message.model_validate({"role": "user", "content": content}),), media=tuple(media))


async def _answers(bench: Bench, kind: str, *media: MediaInput) -> list[Completion]:
    """Return greedy answers to the same question about each medium."""
    return (await bench.engine.generate([_chat(kind, [one]) for one in media], _GREEDY)).completions


async def _assert_tells_apart(bench: Bench, kind: str, one: MediaInput, other: MediaInput) -> None:
    first, second, again = await _answers(bench, kind, one, other, one)
    assert first.token_ids == again.token_ids
    assert first.token_ids != second.token_ids, f"the {kind} changes nothing: {first.text!r}"


async def _assert_same(bench: Bench, kind: str, forms: Sequence[MediaInput]) -> None:
    answers = await _answers(bench, kind, *forms)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1, (
        f"one {kind} in several forms has several answers: {[answer.text for answer in answers]}"
    )


def _black(x: int, y: int) -> Pixel:
    return (0, 0, 0)


def _pattern(x: int, y: int) -> Pixel:
    return ((x * 37 + y * 11) % 256, (x * y) % 256, 255 - (x * 4) % 256)


def _stripes(x: int, y: int) -> Pixel:
    return (255, 255, 255) if y // 8 % 2 else (200, 30, 30)


_MOVING: Final = (_pattern, _black, _stripes, _pattern)


def _png(pixel: Callable[[int, int], Pixel], width: int = _SIDE, height: int = _SIDE) -> bytes:
    """Encode an image with eight bits per channel as PNG (RFC 2083)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + bytes(value for x in range(width) for value in pixel(x, y)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _png_header(width: int, height: int) -> bytes:
    """Return a small PNG whose header claims this size."""
    data = _png(_black)
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def _eps() -> bytes:
    """Return a PostScript program that draws nothing; some decoders would run it."""
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


def _avi(frames: Sequence[Callable[[int, int], Pixel]], per_second: int, width: int, height: int) -> bytes:
    """Encode a video as uncompressed frames in AVI 1.0 (RIFF)."""
    assert width % 4 == 0, "a bitmap's rows are whole words"

    def chunk(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)

    def parts(kind: bytes, *bodies: bytes) -> bytes:
        return chunk(b"LIST", kind + b"".join(bodies))

    # A bitmap stores rows bottom-up and channels as blue, green, red.
    images = [
        bytes(value for y in reversed(range(height)) for x in range(width) for value in reversed(frame(x, y)))
        for frame in frames
    ]
    size, count = width * height * 3, len(frames)
    main = struct.pack(
        "<14I", 1_000_000 // per_second, size * per_second, 0, 0x10, count, 0, 1, size, width, height, 0, 0, 0, 0
    )
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIhhhh",
        b"vids",
        b"DIB ",
        0,
        0,
        0,
        0,
        1,
        per_second,
        0,
        count,
        size,
        2**32 - 1,
        0,
        0,
        0,
        width,
        height,
    )
    layout = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, size, 0, 0, 0, 0)
    headers = parts(b"hdrl", chunk(b"avih", main), parts(b"strl", chunk(b"strh", stream), chunk(b"strf", layout)))
    movie = parts(b"movi", *(chunk(b"00db", image) for image in images))
    entries = (struct.pack("<4sIII", b"00db", 0x10, 4 + at * (size + 8), size) for at in range(count))
    return chunk(b"RIFF", b"AVI " + headers + movie + chunk(b"idx1", b"".join(entries)))
