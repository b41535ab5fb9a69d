"""Images and videos on their way to an engine, with no engine installed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

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
    EngineConfig,
    ImageInput,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    TokenPrompt,
    UnsupportedCapability,
    VideoInput,
    vision,
)
from drivetrain.backend import GenerateRequest
from drivetrain.errors import EngineInternalError
from drivetrain.testing import VISION_ARCHITECTURES, tiny_model
from drivetrain.validation import check_media
from drivetrain.vision import Patches, VisionReader, vision_capabilities
from drivetrain_sglang import translate
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.vision import image_data
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.vision import places_of
from drivetrain_weight_sync.checkpoint import checkpoint_of


def config(model: Path | str, **fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "sglang", "model": str(model), **fields})


def reader(model: Path) -> VisionReader:
    return VisionReader(config(model), AutoConfig.from_pretrained(model))


def image(width: int, height: int, value: int = 0) -> ImageInput:
    return ImageInput.from_pil(Image.new("RGB", (width, height), (value, value, value)))


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
def test_images_are_claimed_for_models_that_take_them(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    for backend, device in itertools.product((SGLangBackend, VLLMBackend), ("cpu", "cuda")):
        assert Capability.IMAGES in backend.capabilities(config(model, device=device))
        assert Capability.IMAGES not in backend.capabilities(config(tiny_model("qwen2"), device=device))
    for refused in (config(model, task="embed"), config(tiny_model("qwen2")), config(tmp_path)):
        assert not vision_capabilities(refused)


@pytest.mark.parametrize(
    ("installed", "claimed"), [({"av", "torchvision"}, True), ({"av"}, False), ({"torchvision"}, False)]
)
@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
def test_videos_are_claimed_where_they_can_be_read(
    architecture: str, installed: set[str], claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(architecture)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in installed else None)
    for backend, device in itertools.product((SGLangBackend, VLLMBackend), ("cpu", "cuda")):
        found = Capability.VIDEO in backend.capabilities(config(model, device=device))
        assert found is (claimed and architecture != "qwen3_vl")


def test_the_refusal_of_a_video_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
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
        reader(tiny_model("qwen2_vl")).read([VideoInput(data=b"")])


class Halves:
    """A video processor that takes every second frame, each as one patch of one value."""

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
def test_videos_become_patches_of_the_frames_that_their_processor_picks(
    architecture: str, seconds: float | None, tmp_path: Path
) -> None:
    made = reader(tiny_model(architecture))
    made.__dict__["_video_processor"] = Halves()
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
    first, second = made.read(media)
    assert (first.count, first.token_id, first.follows, first.data) == (3, 263, 260, path.read_bytes())
    assert (second.count, second.token_id) == (6, 262)
    seen = made.patches(media)
    (video,) = seen.videos
    assert (video.pixels.flatten().tolist(), video.seconds) == ([0, 2, 4], seconds)
    assert len(seen.images) == 1
    (data,) = image_data(seen)
    assert data["video_grid_thw"].tolist() == [[3, 1, 1]]
    assert ("second_per_grid_ts" in data) is (seconds is not None)
    assert data["image_grid_thw"].tolist() == [[1, 6, 4]]


def test_bytes_that_are_an_image_and_a_video_have_two_names() -> None:
    made = reader(tiny_model("qwen2_vl"))
    made.__dict__["_video_processor"] = Halves()
    file = BytesIO()
    shown = [Image.new("RGB", (64, 64), (value, 0, 0)) for value in (0, 255)]
    shown[0].save(file, "GIF", save_all=True, append_images=shown[1:], duration=125)
    data = file.getvalue()
    seen = made.patches([ImageInput(data=data), VideoInput(data=data)])
    assert len({one.name for one in (*seen.images, *seen.videos)}) == 2


def test_images_become_patches_in_order() -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    media = (image(56, 84), image(112, 56, 9))
    read = made.read(media)
    assert [(medium.count, medium.token_id, medium.follows, medium.data) for medium in read] == [
        (6, 262, 260, None),
        (8, 262, 260, None),
    ]
    (data,) = image_data(made.patches(media))
    assert data["format"] == "processor_output"
    assert data["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 8]]
    assert data["pixel_values"].shape == (24 + 32, 1176)
    assert not torch.equal(data["pixel_values"][0], data["pixel_values"][-1])


def test_bytes_that_were_looked_for_come_along(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(image(56, 56).data or b"")
    (read,) = reader(tiny_model("qwen2_5_vl")).read([ImageInput(path=str(file))])
    assert read.data == file.read_bytes()


def test_what_is_no_image_is_refused() -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    file = BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    for broken in (b"", b"no image", file.getvalue()[:200]):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            made.read([ImageInput(data=broken)])
    with pytest.raises(InvalidRequest, match="takes images, and no VideoInput"):
        reader(tiny_model("qwen3_vl")).read([VideoInput(data=file.getvalue())])
    with pytest.raises(InvalidRequest, match="takes images and videos, and no AudioInput"):
        made.read([AudioInput(data=file.getvalue())])


def test_an_image_is_cut_into_patches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reader(tiny_model("qwen2_5_vl"))
    done: list[bytes] = []
    original = made._made

    def noted(medium: ImageInput, data: bytes, name: str) -> Patches:
        done.append(data)
        return original(medium, data, name)

    monkeypatch.setattr(made, "_made", noted)
    first, second = image(56, 56), image(56, 56, 5)
    for _ in range(2):
        made.read([first, second])
        assert len({patches.name for patches in made.patches([first, second]).images}) == 2
    assert done == [first.data, second.data]
    monkeypatch.setattr(vision, "HELD_BYTES", 0)
    made.read([image(56, 56, 7)])
    assert len(made._held) == 1


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
