"""Images, video and sound beside the prompt. The files are made here, byte by byte, so that nothing has to be read."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from typing import Final

from drivetrain.capability import Capability
from drivetrain.errors import InvalidRequest
from drivetrain.outputs import Completion
from drivetrain.prompts import AudioInput, ChatPrompt, ImageInput, MediaInput, Message, VideoInput
from drivetrain.sampling import SamplingParams
from drivetrain_conformance.bench import Bench
from drivetrain_conformance.case import ModelKind, case
from drivetrain_conformance.expect import refused

Pixel = tuple[int, int, int]

_SIDE: Final = 64
_GREEDY: Final = SamplingParams(max_new_tokens=16, temperature=0)


@case(Capability.IMAGES, model=ModelKind.VISION)
async def another_image_has_another_answer(bench: Bench) -> None:
    """The same words beside two different images are answered differently, and beside one image the same again."""
    black, noise = (ImageInput(data=_png(pixel)) for pixel in (_black, _pattern))
    await _assert_tells_apart(bench, "image", black, noise)


@case(Capability.IMAGES, model=ModelKind.VISION)
async def images_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """An image is the same given as bytes, as a path and as a data URL."""
    data = _png(_pattern)
    path = bench.folder("images") / "pattern.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    await _assert_same(bench, "image", [ImageInput(data=data), ImageInput(path=str(path)), ImageInput(url=url)])


@case(Capability.IMAGES, model=ModelKind.VISION)
async def images_stay_with_their_prompts(bench: Bench) -> None:
    """In a batch each prompt has its own images, and a prompt without any is answered as it is alone."""
    black, pattern = (ImageInput(data=_png(pixel)) for pixel in (_black, _pattern))
    prompts = [_chat("image", [black]), _chat("image", [pattern]), _chat("image", []), _chat("image", [black, pattern])]
    alone = [(await bench.engine.generate(prompt, _GREEDY)).completions[0] for prompt in prompts]
    together = (await bench.engine.generate(prompts, _GREEDY)).completions
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@case(Capability.IMAGES, model=ModelKind.VISION)
async def what_is_no_image_is_refused(bench: Bench) -> None:
    """Bytes that are no image, and a path where there is none, are refused as the request's mistake."""
    missing = str(bench.folder("images") / "missing.png")
    for broken in (ImageInput(data=b"this is no image"), ImageInput(path=missing)):
        with refused(InvalidRequest):
            await bench.engine.generate(_chat("image", [broken]), _GREEDY)
    assert await _answers(bench, "image", ImageInput(data=_png(_black)))


@case(Capability.VIDEO, model=ModelKind.VISION)
async def another_video_has_another_answer(bench: Bench) -> None:
    """The same words beside two different videos are answered differently, and beside one the same again."""
    black, moving = _avi([_black] * 4), _avi([_pattern, _black, _stripes, _pattern])
    await _assert_tells_apart(bench, "video", VideoInput(data=black), VideoInput(data=moving))


@case(Capability.VIDEO, model=ModelKind.VISION)
async def videos_are_read_from_bytes_and_files(bench: Bench) -> None:
    """A video is the same given as bytes and as a path."""
    data = _avi([_pattern, _stripes, _black, _pattern])
    path = bench.folder("videos") / "moving.avi"
    path.write_bytes(data)
    await _assert_same(bench, "video", [VideoInput(data=data), VideoInput(path=str(path))])


@case(Capability.AUDIO, model=ModelKind.VISION)
async def another_sound_has_another_answer(bench: Bench) -> None:
    """The same words beside two different sounds are answered differently, and beside one the same again."""
    await _assert_tells_apart(bench, "audio", AudioInput(data=_wav(440)), AudioInput(data=_wav(97)))


@case(Capability.AUDIO, model=ModelKind.VISION)
async def sounds_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """A sound is the same given as bytes, as a path and as a data URL."""
    data = _wav(440)
    path = bench.folder("sounds") / "tone.wav"
    path.write_bytes(data)
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    await _assert_same(bench, "audio", [AudioInput(data=data), AudioInput(path=str(path)), AudioInput(url=url)])


# ------------------------------------------------------------------------------------------------------------------


def _chat(kind: str, media: Sequence[MediaInput]) -> ChatPrompt:
    """A question about what lies beside it; each medium has its placeholder in the message."""
    question = {"type": "text", "text": f"Describe the {kind} in one word."}
    content = [*({"type": kind} for _ in media), question]
    return ChatPrompt(messages=(Message.model_validate({"role": "user", "content": content}),), media=tuple(media))


async def _answers(bench: Bench, kind: str, *media: MediaInput) -> list[Completion]:
    """Greedy answers to the same question about each medium."""
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


def _png(pixel: Callable[[int, int], Pixel]) -> bytes:
    """A square image of eight bits per channel, as the PNG specification has it (RFC 2083)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + bytes(value for x in range(_SIDE) for value in pixel(x, y)) for y in range(_SIDE))
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _avi(frames: Sequence[Callable[[int, int], Pixel]], per_second: int = 2) -> bytes:
    """A video of uncompressed frames, in the RIFF form of AVI 1.0."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)

    def parts(kind: bytes, *bodies: bytes) -> bytes:
        return chunk(b"LIST", kind + b"".join(bodies))

    # A bitmap's rows go from the bottom up, its channels from blue to red.
    images = [
        bytes(value for y in reversed(range(_SIDE)) for x in range(_SIDE) for value in reversed(frame(x, y)))
        for frame in frames
    ]
    size, count = _SIDE * _SIDE * 3, len(frames)
    main = struct.pack(
        "<14I", 1_000_000 // per_second, size * per_second, 0, 0x10, count, 0, 1, size, _SIDE, _SIDE, 0, 0, 0, 0
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
        _SIDE,
        _SIDE,
    )
    layout = struct.pack("<IiiHHIIiiII", 40, _SIDE, _SIDE, 1, 24, 0, size, 0, 0, 0, 0)
    headers = parts(b"hdrl", chunk(b"avih", main), parts(b"strl", chunk(b"strh", stream), chunk(b"strf", layout)))
    movie = parts(b"movi", *(chunk(b"00db", image) for image in images))
    entries = (struct.pack("<4sIII", b"00db", 0x10, 4 + at * (size + 8), size) for at in range(count))
    return chunk(b"RIFF", b"AVI " + headers + movie + chunk(b"idx1", b"".join(entries)))


def _wav(period: int, rate: int = 16_000) -> bytes:
    """One second of a sawtooth whose period is so many samples."""
    samples = struct.pack(f"<{rate}h", *((at % period) * 40_000 // period - 20_000 for at in range(rate)))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples)
    return file.getvalue()
