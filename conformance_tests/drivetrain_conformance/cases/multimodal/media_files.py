"""Small images, videos and sounds, as bytes of files."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from drivetrain_conformance.references.oracle import Film

if TYPE_CHECKING:
    pass


Pixel = tuple[int, int, int]


_SIDE: Final = 64


_HERTZ: Final = 16_000
"""Samples per second that the model takes."""


@dataclass(frozen=True)
class Video:
    """A video: a function from place to colour for each frame."""

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
class Sound:
    """A sound with one channel."""

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


def white_noise(seed: int, seconds: float = 0.5, rate: int = _HERTZ) -> Sound:
    """Return noise."""
    samples = np.random.default_rng(seed).standard_normal(round(seconds * rate)) * 4000
    return Sound(samples.clip(-32768, 32767).astype(np.int16), rate)


def silence(seconds: float) -> Sound:
    """Return a sound of zeros."""
    return Sound(np.zeros(round(seconds * _HERTZ), dtype=np.int16))


def sine(hertz: float, rate: int = _HERTZ, seconds: float = 0.5) -> Sound:
    """Return a pure tone."""
    at = np.arange(round(seconds * rate)) / rate
    return Sound((np.sin(2 * np.pi * hertz * at) * 12_000).astype(np.int16), rate)


def black_pixel(x: int, y: int) -> Pixel:
    """Return black."""
    return (0, 0, 0)


def pattern_pixel(x: int, y: int) -> Pixel:
    """Return the colour of a pattern that never repeats within an image."""
    return ((x * 37 + y * 11) % 256, (x * y) % 256, 255 - (x * 4) % 256)


def striped_pixel(x: int, y: int) -> Pixel:
    """Return the colour of horizontal stripes."""
    return (255, 255, 255) if y // 8 % 2 else (200, 30, 30)


MOVING: Final = (pattern_pixel, black_pixel, striped_pixel, pattern_pixel)


def png(pixel: Callable[[int, int], Pixel], width: int = _SIDE, height: int = _SIDE) -> bytes:
    """Encode an image with eight bits per channel as PNG (RFC 2083)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + bytes(value for x in range(width) for value in pixel(x, y)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG whose header claims this size."""
    data = png(black_pixel)
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def eps() -> bytes:
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
