"""Frames of videos, as PyAV decodes them."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from av.error import FFmpegError
from numpy.typing import NDArray
from PIL import Image

from drivetrain.media import video_frames
from drivetrain.media.video_frames import Bounds, decoded

HEIGHT, WIDTH, COUNT, RATE = 32, 48, 12, 6
FREE = Bounds(3600, 1 << 28)


def frames() -> NDArray[np.uint8]:
    """A white square that moves right, on a background that brightens."""
    made = np.zeros((COUNT, HEIGHT, WIDTH, 3), dtype=np.uint8)
    for index, frame in enumerate(made):
        frame[:] = (10 * index, 5 * index, 200)
        frame[:8, 3 * index : 3 * index + 8] = 255
    return made


def file(folder: Path, form: str, codec: str, pixels: str, options: Mapping[str, str] | None = None) -> bytes:
    """Encode the frames as a file of this format."""
    path = folder / f"video.{form}"
    with av.open(str(path), "w", format=form, options=dict(options or {})) as container:
        stream = container.add_stream(codec, rate=RATE)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pixels
        for frame in frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


@pytest.mark.parametrize(
    ("form", "codec", "pixels"), [("matroska", "ffv1", "bgr0"), ("mov", "png", "rgb24"), ("avi", "rawvideo", "bgr24")]
)
def test_frames_come_as_they_were_put_in(form: str, codec: str, pixels: str, tmp_path: Path) -> None:
    read = decoded(file(tmp_path, form, codec, pixels), FREE)
    assert np.array_equal(read.pixels, frames())
    assert (read.indices, read.total, read.per_second) == (tuple(range(COUNT)), COUNT, RATE)


@pytest.mark.parametrize(
    ("form", "codec", "pixels"), [("mp4", "mpeg4", "yuv420p"), ("webm", "libvpx", "yuv420p"), ("gif", "gif", "rgb8")]
)
def test_common_formats_are_read(form: str, codec: str, pixels: str, tmp_path: Path) -> None:
    read = decoded(file(tmp_path, form, codec, pixels), FREE)
    assert read.pixels.shape == (COUNT, HEIGHT, WIDTH, 3)
    assert np.abs(read.pixels.astype(int) - frames()).mean() < 20


def test_only_frames_that_are_picked_are_kept(tmp_path: Path) -> None:
    asked: list[tuple[int, float | None]] = []

    def pick(total: int, per_second: float | None) -> range:
        asked.append((total, per_second))
        return range(1, total, 4)

    read = decoded(file(tmp_path, "mp4", "mpeg4", "yuv420p"), FREE, pick)
    assert asked == [(COUNT, RATE)]
    assert (read.indices, read.total) == ((1, 5, 9), COUNT)
    assert np.abs(read.pixels.astype(int) - frames()[1::4]).mean() < 20


def test_a_video_that_was_filmed_on_its_side_is_upright(tmp_path: Path) -> None:
    data = file(tmp_path, "mov", "png", "rgb24")
    matrix = data.index(b"tkhd") + 44
    quarter = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    turned = decoded(data[:matrix] + quarter + data[matrix + 36 :], FREE)
    assert np.array_equal(turned.pixels, np.rot90(frames(), -1, axes=(1, 2)))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.4, 0.85])
@pytest.mark.parametrize(
    ("form", "codec", "pixels", "options"),
    [
        ("matroska", "ffv1", "bgr0", {}),
        ("mov", "png", "rgb24", {}),
        ("mp4", "mpeg4", "yuv420p", {}),
        ("mp4", "mpeg4", "yuv420p", {"movflags": "faststart"}),
        ("webm", "libvpx", "yuv420p", {}),
        ("avi", "rawvideo", "bgr24", {}),
    ],
)
def test_what_is_broken_off_is_refused(
    form: str, codec: str, pixels: str, options: dict[str, str], part: float, tmp_path: Path
) -> None:
    data = file(tmp_path, form, codec, pixels, options)
    with pytest.raises((ValueError, FFmpegError)):
        decoded(data[: int(part * len(data))], FREE)


def test_what_shows_nothing_that_moves_is_refused(tmp_path: Path) -> None:
    still = BytesIO()
    Image.new("RGB", (8, 8)).save(still, "PNG")
    sound = tmp_path / "sound.wav"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        assert isinstance(stream, av.AudioStream)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
    for data, why in ((still.getvalue(), "still image"), (sound.read_bytes(), "no video"), (b"text", "Invalid data")):
        with pytest.raises((ValueError, FFmpegError), match=why):
            decoded(data, FREE)


def test_a_playlist_reaches_no_other_file(tmp_path: Path) -> None:
    file(tmp_path, "mp4", "mpeg4", "yuv420p")
    other = (tmp_path / "video.mp4").as_uri()
    for data in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{other}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{other}'\n",
    ):
        with pytest.raises(FFmpegError):
            decoded(data.encode(), FREE)


def test_a_video_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    data = file(tmp_path, "mp4", "mpeg4", "yuv420p")
    small = Bounds(3600, 3 * HEIGHT * WIDTH)
    with pytest.raises(ValueError, match=r"4 of its frames have 48 by 32 .*media.max_video_pixels"):
        decoded(data, small)
    assert decoded(data, small, lambda total, per_second: range(0, total, 4)).pixels.shape[0] == 3
    shown: list[tuple[int, int, int]] = []
    decoded(data, Bounds(3600, 1 << 28, fits=lambda *frames: shown.append(frames)), lambda *_: [1, 2])
    assert shown == [(2, HEIGHT, WIDTH)] * 2


@pytest.mark.parametrize(("form", "codec", "pixels"), [("mp4", "mpeg4", "yuv420p"), ("gif", "gif", "rgb8")])
def test_a_video_too_long_is_refused(form: str, codec: str, pixels: str, tmp_path: Path) -> None:
    data = file(tmp_path, form, codec, pixels)
    with pytest.raises(ValueError, match=r"expected at most 1.5 \(media.max_video_seconds"):
        decoded(data, Bounds(1.5, 1 << 28))
    assert decoded(data, Bounds(2.1, 1 << 28)).total == COUNT


def test_a_video_of_more_frames_or_larger_ones_than_any_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file(tmp_path, "mp4", "mpeg4", "yuv420p")
    monkeypatch.setattr(video_frames, "MOST_FRAMES", COUNT - 1)
    with pytest.raises(ValueError, match="more than 11 frames"):
        decoded(data, FREE, lambda *_: [0])
    monkeypatch.setattr(video_frames, "MOST_FRAME_PIXELS", HEIGHT * WIDTH - 1)
    with pytest.raises(ValueError, match="48 by 32 pixels; expected at most 1535"):
        decoded(data, FREE)


def test_decoding_ends_when_nobody_waits(tmp_path: Path) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(0)
        if len(looks) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        decoded(file(tmp_path, "mp4", "mpeg4", "yuv420p"), Bounds(3600, 1 << 28, look=look))
    assert len(looks) == 3


def test_a_small_file_of_many_large_frames_takes_little_memory(tmp_path: Path) -> None:
    """Run in a process of its own, to measure its own peak memory."""
    path = tmp_path / "black.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((720, 1280, 3), dtype=np.uint8), format="rgb24")
        for _ in range(60):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert path.stat().st_size < 1 << 20
    script = f"""
import resource
from pathlib import Path
from drivetrain.media.video_frames import Bounds, decoded
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
frames = decoded(Path({str(path)!r}).read_bytes(), Bounds(3600, 1 << 28), lambda total, rate: range(0, total, 6))
assert frames.pixels.shape == (10, 720, 1280, 3), frames.pixels.shape
try:
    decoded(Path({str(path)!r}).read_bytes(), Bounds(3600, 1 << 24))
except ValueError as error:
    assert "19 of its frames" in str(error), error
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 150, f"{ran.stdout} MiB"
