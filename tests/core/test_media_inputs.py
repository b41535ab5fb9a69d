"""Media inputs: read from any kind of source, and placed among the prompt's ids."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import get_type_hints

import pytest
from PIL import Image

from drivetrain import AudioInput, EngineConfig, ImageInput, InvalidRequest, VideoInput
from drivetrain.backend.base import Backend, ReadMedium
from drivetrain.errors import WireError
from drivetrain.media.inputs import placed, read_bytes
from drivetrain.process.codec import codec_for
from drivetrain.process.rpc_methods import METHODS
from drivetrain.types.prompts import MediaInput

IMAGE, SOUND, START = 7, 8, 6
CONFIG = EngineConfig.from_mapping({"backend": "b", "model": "m"})


async def test_bytes_are_read_from_paths_and_data_urls(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\0\xff")
    url = ImageInput(url="data:image/png;base64,AP8=")
    for medium in (ImageInput(data=b"\0\xff"), ImageInput(path=str(file)), url):
        assert await read_bytes(medium, CONFIG) == b"\0\xff"


@pytest.mark.parametrize(
    ("medium", "why"),
    [
        (ImageInput(path="/nowhere/a.png"), "the image '/nowhere/a.png'"),
        (AudioInput(path="/"), "the audio '/'"),
        (VideoInput(url="file:///etc/hostname"), "expected http"),
        (ImageInput(url="http://127.0.0.1:1/a.png"), "127.0.0.1:1"),
        (ImageInput(url="http://[/a.png"), "cannot be read"),
        (ImageInput(path="a\0b"), "null"),
    ],
)
async def test_what_cannot_be_had_is_the_requests_mistake(medium: MediaInput, why: str) -> None:
    with pytest.raises(InvalidRequest, match="beside a prompt") as caught:
        await read_bytes(medium, CONFIG)
    assert why in str(caught.value)
    assert caught.value.field == "prompts"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_an_image_of_pil_crosses_without_loss(mode: str) -> None:
    image = Image.frombytes("L", (4, 2), bytes(range(0, 256, 32))).convert("RGB")
    image = image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)
    data = ImageInput.from_pil(image).data
    assert data is not None
    with Image.open(BytesIO(data)) as read:
        assert read.convert("RGB").tobytes() == image.convert("RGB").tobytes()


def test_each_medium_stands_as_often_as_it_is_taken() -> None:
    media = [ReadMedium(IMAGE, 3), ReadMedium(SOUND, 1), ReadMedium(IMAGE, 2)]
    whole = [1, 7, 7, 7, 8, 2, 7, 7, 3]
    assert placed([1, 7, 8, 2, 7, 3], media, "p") == whole
    assert placed(whole, media, "p") == whole
    assert placed([1, 7, 7, 7, 8, 2, 7, 3], media, "p") == whole


@pytest.mark.parametrize(
    ("token_ids", "why"),
    [
        ([1, 6, 7], "1 places for the 2"),
        ([6, 7, 6, 7, 6, 7], "3 places for the 2"),
        ([6, 7, 7, 7], "1 places for the 2"),
        ([6, 7, 6, 7, 7, 7], "3 times where a medium takes it 2"),
        ([6, 7, 1, 7], "does not follow token id 6"),
        ([7, 6, 7], "does not follow token id 6"),
    ],
)
def test_places_that_are_not_those_of_the_media_are_refused(token_ids: list[int], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        placed(token_ids, [ReadMedium(IMAGE, 4, follows=START), ReadMedium(IMAGE, 2, follows=START)], "prompts[3]")
    assert caught.value.field == "prompts[3]"


def test_media_cross_the_wire() -> None:
    media = (ImageInput(data=b"\0\xff"), VideoInput(url="http://a"), AudioInput(path="/a"))
    codec = codec_for(get_type_hints(Backend.read_media)["media"])
    assert codec.decode(codec.encode(media)) == media
    assert codec.decode(codec.encode(())) == ()
    with pytest.raises(WireError, match="expected one of"):
        codec.encode((b"bytes",))
    with pytest.raises(WireError, match="expected a tuple"):
        codec.encode(media[0])
    with pytest.raises(WireError):
        codec.decode(codec_for(int).encode(3))
    read = [ReadMedium(IMAGE, 3, b"\0", follows=6), ReadMedium(IMAGE, 1)]
    result = METHODS["read_media"].result
    assert result.decode(result.encode(read)) == read
