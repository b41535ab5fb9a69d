"""Images on their way to an engine, with no engine installed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from drivetrain import (
    Capability,
    EngineConfig,
    ImageInput,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    VideoInput,
    images,
)
from drivetrain.backend import GenerateRequest
from drivetrain.errors import EngineInternalError
from drivetrain.images import ImageReader, Patches, takes_images
from drivetrain.testing import VISION_ARCHITECTURES, tiny_model
from drivetrain_sglang import translate
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.images import image_data
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.images import places_of
from drivetrain_weight_sync.checkpoint import checkpoint_of


def config(model: Path | str, **fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "sglang", "model": str(model), **fields})


def reader(model: Path) -> ImageReader:
    return ImageReader(config(model), AutoConfig.from_pretrained(model))


def image(width: int, height: int, value: int = 0) -> ImageInput:
    return ImageInput.from_pil(Image.new("RGB", (width, height), (value, value, value)))


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
def test_images_are_claimed_for_models_that_take_them(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    for backend, device in itertools.product((SGLangBackend, VLLMBackend), ("cpu", "cuda")):
        assert Capability.IMAGES in backend.capabilities(config(model, device=device))
        assert Capability.IMAGES not in backend.capabilities(config(tiny_model("qwen2"), device=device))
    assert not takes_images(config(model, task="embed"))
    assert not takes_images(config(tiny_model("qwen2")))
    assert not takes_images(config(tmp_path))


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
    with pytest.raises(InvalidRequest, match="VideoInput"):
        made.read([VideoInput(data=file.getvalue())])


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
        assert len({patches.name for patches in made.patches([first, second])}) == 2
    assert done == [first.data, second.data]
    monkeypatch.setattr(images, "HELD_BYTES", 0)
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
