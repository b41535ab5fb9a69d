"""Images and videos on their way to an engine, with no engine installed."""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
import threading
import time
import tracemalloc
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoConfig
from transformers.video_utils import VideoMetadata

from drivetrain import (
    AudioInput,
    Capability,
    DeadlineExceeded,
    EngineConfig,
    ImageInput,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    TokenPrompt,
    UnsupportedCapability,
    VideoInput,
)
from drivetrain.backend.base import Backend, GenerateRequest
from drivetrain.engine.validation import check_media
from drivetrain.errors import EngineInternalError
from drivetrain.media import qwen_vision
from drivetrain.media import reader as media_reader
from drivetrain.media.qwen_vision import IMAGE_MODELS, Patches, VisionReader, vision_capabilities
from drivetrain.media.video_frames import Bounds
from drivetrain.testing import VISION_ARCHITECTURES, tiny_model
from drivetrain_sglang import translate
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.multimodal_inputs import image_data
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.multimodal_inputs import places_of
from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of

BACKENDS: tuple[type[Backend], ...] = (SGLangBackend, VLLMBackend)


def config(model: Path | str, **fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "sglang", "model": str(model), **fields})


def reader(model: Path, context_length: int = 4096, **media: object) -> VisionReader:
    return VisionReader(config(model, media=media), AutoConfig.from_pretrained(model), context_length)


def image(width: int, height: int, value: int = 0) -> ImageInput:
    return ImageInput.from_pil(Image.new("RGB", (width, height), (value, value, value)))


@pytest.mark.parametrize("architecture", sorted(IMAGE_MODELS))
def test_images_are_claimed_for_models_that_take_them(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    for backend, device in itertools.product(BACKENDS, ("cpu", "cuda")):
        assert Capability.IMAGES in backend.capabilities(config(model, device=device))
        assert Capability.IMAGES not in backend.capabilities(config(tiny_model("qwen2"), device=device))
    for refused in (config(model, task="embed"), config(tiny_model("qwen2")), config(tmp_path)):
        assert not vision_capabilities(refused)


@pytest.mark.parametrize(
    ("installed", "claimed"), [({"av", "torchvision"}, True), ({"av"}, False), ({"torchvision"}, False)]
)
@pytest.mark.parametrize("architecture", sorted(IMAGE_MODELS))
def test_videos_are_claimed_where_they_can_be_read(
    architecture: str, installed: set[str], claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(architecture)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in installed else None)
    for backend, device in itertools.product(BACKENDS, ("cpu", "cuda")):
        found = Capability.VIDEO in backend.capabilities(config(model, device=device))
        assert found is (claimed and architecture != "qwen3_vl")


async def test_the_refusal_of_a_video_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = TokenPrompt(token_ids=(1,), media=(VideoInput(data=b""),))
    arguments = prompt, "prompts[0]", config(tiny_model("qwen2_vl")), frozenset({Capability.IMAGES})
    with pytest.raises(UnsupportedCapability, match="'video'") as caught:
        check_media(*arguments)
    assert "drivetrain[video]" not in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedCapability, match=r"pip install 'drivetrain\[video\]'"):
        check_media(*arguments)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedCapability, match=r"pip install 'drivetrain\[video\]'"):
        await reader(tiny_model("qwen2_vl")).read([VideoInput(data=b"")])


class Halves:
    """A video processor that takes every second frame, as one patch with one value."""

    do_sample_frames = True
    temporal_patch_size = 2
    merge_size = 1

    def sample_frames(self, metadata: VideoMetadata) -> torch.Tensor:
        assert metadata.fps is not None
        assert round(metadata.fps) == 8
        return torch.arange(0, metadata.total_num_frames, 2)

    def __call__(self, videos: list[NDArray[np.uint8]], **_: object) -> dict[str, torch.Tensor]:
        (frames,) = videos
        pixels = torch.from_numpy(frames[:, :1, 0, 0].astype(np.float32))
        return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[len(pixels), 1, 1]])}


@pytest.mark.parametrize(("architecture", "seconds"), [("qwen2_vl", None), ("qwen2_5_vl", 0.5)])
async def test_videos_become_patches_of_the_frames_that_their_processor_picks(
    architecture: str, seconds: float | None, tmp_path: Path
) -> None:
    made = reader(tiny_model(architecture))
    made.video_processor = Halves()
    path = tmp_path / "video.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=8)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "bgr0"
        for value in range(6):
            frame = np.full((16, 16, 3), value, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    media = (VideoInput(path=str(path)), image(56, 84))
    first, second = await made.read(media)
    assert (first.count, first.token_id, first.follows, first.data) == (3, 263, 260, path.read_bytes())
    assert (second.count, second.token_id) == (6, 262)
    seen = await made.patches(media)
    (video,) = seen.videos
    assert (video.pixels.flatten().tolist(), video.seconds) == ([0, 2, 4], seconds)
    assert len(seen.images) == 1
    (data,) = image_data(seen)
    assert data["video_grid_thw"].tolist() == [[3, 1, 1]]
    assert ("second_per_grid_ts" in data) is (seconds is not None)
    assert data["image_grid_thw"].tolist() == [[1, 6, 4]]


async def test_bytes_that_are_an_image_and_a_video_have_two_names() -> None:
    made = reader(tiny_model("qwen2_vl"))
    made.video_processor = Halves()
    file = BytesIO()
    shown = [Image.new("RGB", (64, 64), (value, 0, 0)) for value in (0, 255)]
    shown[0].save(file, "GIF", save_all=True, append_images=shown[1:], duration=125)
    data = file.getvalue()
    seen = await made.patches([ImageInput(data=data), VideoInput(data=data)])
    assert len({one.name for one in (*seen.images, *seen.videos)}) == 2


async def test_images_become_patches_in_order() -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    media = (image(56, 84), image(112, 56, 9))
    read = await made.read(media)
    assert [(medium.count, medium.token_id, medium.follows, medium.data) for medium in read] == [
        (6, 262, 260, None),
        (8, 262, 260, None),
    ]
    (data,) = image_data(await made.patches(media))
    assert data["format"] == "processor_output"
    assert data["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 8]]
    assert data["pixel_values"].shape == (24 + 32, 1176)
    assert not torch.equal(data["pixel_values"][0], data["pixel_values"][-1])


async def test_bytes_that_were_looked_for_come_along(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(image(56, 56).data or b"")
    (read,) = await reader(tiny_model("qwen2_5_vl")).read([ImageInput(path=str(file))])
    assert read.data == file.read_bytes()


async def test_what_is_no_image_is_refused() -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    file = BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    for broken in (b"", b"no image", file.getvalue()[:200]):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await made.read([ImageInput(data=broken)])
    with pytest.raises(InvalidRequest, match="takes images, and no VideoInput"):
        await reader(tiny_model("qwen3_vl")).read([VideoInput(data=file.getvalue())])
    with pytest.raises(InvalidRequest, match="takes images and videos, and no AudioInput"):
        await made.read([AudioInput(data=file.getvalue())])


async def test_an_image_is_cut_into_patches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    first, second, third = image(56, 56), image(56, 56, 5), image(56, 56, 7)

    async def patches() -> list[Patches]:
        await made.read([first, second])
        return [*(await made.patches([first, second])).images]

    seen = await patches()
    assert len({one.name for one in seen}) == 2
    assert all(one is other for one, other in zip(await patches(), seen, strict=True))
    monkeypatch.setattr(media_reader, "HELD_BYTES", 0)
    (newest,) = (await made.patches([third])).images
    assert (await made.patches([third])).images[0] is newest, "the newest is kept however large it is"
    assert all(one is not other for one, other in zip(await patches(), seen, strict=True))


def test_no_request_goes_without_its_images() -> None:
    plain = GenerateRequest("r", [1, 2], SamplingParams(), 8, (9,), LogprobsMode.TEMPERATURE)
    seeing = replace(plain, media=(image(56, 56),))
    data = {"format": "processor_output"}
    assert translate.request_fields(seeing, "rid", "key", stream=False, image_data=[data])["image_data"] == [data]
    assert "image_data" not in translate.request_fields(plain, "rid", "key", stream=False)
    for request, given in ((seeing, []), (plain, [data])):
        with pytest.raises(EngineInternalError, match="were not read"):
            translate.request_fields(request, "rid", "key", stream=False, image_data=given)


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
def test_a_checkpoint_with_a_vision_model_is_named_as_it_is_stored(architecture: str) -> None:
    from safetensors import safe_open

    folder = tiny_model(architecture)

    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert {spec.name: spec.shape for spec in checkpoint_of(str(folder)).tensors} == stored


def test_the_places_of_images_in_a_prompt_are_found_in_order() -> None:
    assert places_of([1, 9, 9, 2, 3, 9, 9, 9, 4], [2, 3], 9) == [1, 5]
    assert places_of([9, 9, 9], [1, 2], 9) == [0, 1]
    with pytest.raises(ValueError, match="9 is not in list"):
        places_of([1, 9], [1, 1], 9)


def png_header(width: int, height: int) -> bytes:
    """Return the beginning of a PNG with no image data."""
    file = BytesIO()
    Image.new("1", (1, 1)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(("width", "height"), [(9000, 10_000), (50_000, 50_000), (2**31 - 1, 1)])
async def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(width: int, height: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"xpected at most 89478485 .*media\.max_pixels") as caught:
            await reader(tiny_model("qwen2_5_vl")).read([ImageInput(data=png_header(width, height))])
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert caught.value.field == "prompts"
    with pytest.raises(InvalidRequest, match=r"56 by 57 pixels; expected at most 3191 \(media\.max_pixels\)"):
        await reader(tiny_model("qwen2_5_vl"), max_pixels=3191).read([image(56, 57)])


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
async def test_usual_images_are_read(form: str) -> None:
    file = BytesIO()
    Image.new("RGB", (56, 56)).save(file, form)
    (read,) = await reader(tiny_model("qwen2_5_vl")).read([ImageInput(data=file.getvalue())])
    assert read.count == 4


async def test_images_that_others_decode_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ghostscript(*arguments: object, **fields: object) -> None:
        raise AssertionError("Ghostscript was run")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", ghostscript)
    for form in ("EPS", "PDF", "ICO", "PCX"):
        file = BytesIO()
        Image.new("RGB", (56, 56)).save(file, form)
        with pytest.raises(InvalidRequest, match="none of PNG, JPEG"):
            await reader(tiny_model("qwen2_5_vl")).read([ImageInput(data=file.getvalue())])


async def test_a_jpeg_of_very_many_scans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG", progressive=True)
    (read,) = await reader(tiny_model("qwen2_5_vl")).read([ImageInput(data=file.getvalue())])
    assert read.count == 4
    scans = file.getvalue().count(b"\xff\xda")
    assert 1 < scans < 20
    monkeypatch.setattr(qwen_vision, "MOST_SCANS", scans - 1)
    with pytest.raises(InvalidRequest, match="scans"):
        await reader(tiny_model("qwen2_5_vl")).read([ImageInput(data=file.getvalue())])


async def test_what_all_media_of_a_prompt_take_is_bounded(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        path.write_bytes(image(56, 84).data or b"")
    two = [ImageInput(path=str(path)) for path in paths]
    model, size = tiny_model("qwen2_5_vl"), paths[0].stat().st_size
    assert len(await reader(model, context_length=12, max_bytes=2 * size).read(two)) == 2
    with pytest.raises(InvalidRequest, match=r"more than \d+ bytes together \(media\.max_bytes\)"):
        await reader(model, max_bytes=2 * size - 1).read(two)
    with pytest.raises(
        InvalidRequest, match="2 images and videos beside a prompt take 12 tokens; the context holds 11"
    ):
        await reader(model, context_length=11).read(two)


def test_bytes_over_the_bound_are_refused_before_they_are_sent() -> None:
    settings = config(tiny_model("qwen2_5_vl"), media={"max_bytes": 10})
    can = frozenset({Capability.IMAGES})
    check_media(TokenPrompt(token_ids=(1,), media=(ImageInput(data=b"12345"),) * 2), "prompts[0]", settings, can)
    with pytest.raises(InvalidRequest, match=r"prompts\[0\] holds 12 bytes .* at most 10 \(media\.max_bytes") as caught:
        check_media(TokenPrompt(token_ids=(1,), media=(ImageInput(data=b"123456"),) * 2), "prompts[0]", settings, can)
    assert caught.value.field == "prompts"


class Quarters(Halves):
    """A video processor that reports the number of patches it makes, as Qwen's do."""

    do_sample_frames = False
    cap_pixels_per_frame: bool | None = True
    size: ClassVar = {"shortest_edge": 1000, "longest_edge": 2000}
    asked: ClassVar[list[tuple[object, ...]]] = []

    def get_num_of_video_patches(self, frames: int, height: int, width: int, fields: dict[str, object]) -> int:
        self.asked.append((frames, height, width, fields["size"]))
        return 10 * frames


def film(frames: int, folder: Path) -> VideoInput:
    path = folder / "film.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=8)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "bgr24"
        for value in range(frames):
            frame = np.full((16, 32, 3), value, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="bgr24")))
        container.mux(stream.encode())
    return VideoInput(path=str(path))


async def test_a_video_that_cannot_fit_the_context_is_refused_before_its_frames_are_kept(tmp_path: Path) -> None:
    made = reader(tiny_model("qwen2_vl"), context_length=39)
    made.video_processor = processor = Quarters()
    with pytest.raises(InvalidRequest, match="4 of its frames take 40 tokens or more; the context holds 39"):
        await made.read([film(6, tmp_path)])
    # Processors that shrink the frames of long videos use fewer tokens than they report.
    assert Quarters.asked[-1] == (4, 16, 32, {"shortest_edge": 1000, "longest_edge": 1050})
    processor.cap_pixels_per_frame = None
    with pytest.raises(InvalidRequest, match="the context holds 39"):
        await made.read([film(6, tmp_path)])
    assert Quarters.asked[-1] == (4, 16, 32, Quarters.size)
    assert len(await made.read([film(3, tmp_path)])) == 1


async def test_a_video_is_bounded_by_the_configuration(tmp_path: Path) -> None:
    for bounds, why in (
        ({"max_video_seconds": 0.5}, r"\(media\.max_video_seconds\)"),
        ({"max_video_pixels": 6 * 16 * 32 - 1}, r"6 of its frames have 32 by 16 .*\(media\.max_video_pixels\)"),
    ):
        made = reader(tiny_model("qwen2_vl"), 4096, **bounds)
        made.video_processor = Quarters()
        with pytest.raises(InvalidRequest, match=why):
            await made.read([film(6, tmp_path)])


async def test_decoding_has_a_deadline_and_ends_with_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, ended = threading.Event(), threading.Event()

    def endless(data: bytes, bounds: Bounds, pick: object) -> object:
        try:
            while True:
                bounds.look()
                looked.set()
                time.sleep(0.01)
        except BaseException:
            ended.set()
            raise

    monkeypatch.setattr(qwen_vision, "decoded", endless)
    settings = config(tiny_model("qwen2_vl"), timeouts={"media": 0.3})
    made = VisionReader(settings, AutoConfig.from_pretrained(settings.model), 4096)
    made.video_processor = Quarters()
    video = film(3, tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"timed out after 0\.3 s waiting for the video .* to be decoded"):
        await made.read([video])
    assert await asyncio.to_thread(ended.wait, 60), "a thread goes on decoding"
    ended.clear()
    looked.clear()
    task = asyncio.create_task(made.read([video]))
    assert await asyncio.to_thread(looked.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 60), "a thread goes on decoding"
