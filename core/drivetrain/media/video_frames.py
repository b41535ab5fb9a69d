"""Videos' frames, decoded with PyAV, which is FFmpeg. For backends, in the engine's process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer

MOST_FRAMES: Final = 1 << 18
"""Most frames of a video, kept or not."""

MOST_FRAME_PIXELS: Final = 1 << 25
"""Most pixels of one frame: 8K. A decoder holds up to twenty of them."""

_THREADS: Final = 4
"""Each of FFmpeg's holds a frame of its own."""

_OF_FRAMES: Final = {"max_pixels": str(MOST_FRAME_PIXELS)}

_OPTIONS: Final = {"protocol_whitelist": "none"} | _OF_FRAMES
"""Playlists are videos to FFmpeg: it would read the files and addresses that one names."""

_KNOW_THEIR_LENGTH: Final = ("mov", "matroska")
"""Formats in which the duration is written down, and not guessed at from what there is."""


@dataclass(frozen=True, slots=True)
class Frames:
    """What was kept of a video."""

    pixels: NDArray[np.uint8]
    """Shape (frames, height, width, 3): red, green, blue."""
    indices: tuple[int, ...]
    """Which frames of the video these are."""
    total: int
    """Frames of the video."""
    per_second: float | None
    """Of the video, on average; None: its file does not say."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one video. Each is checked before the memory or the time is spent."""

    seconds: float
    """Its length."""
    pixels: int
    """Of the frames that are kept, together."""
    fits: Callable[[int, int, int], None] = lambda frames, height, width: None
    """Raises if so many frames of this height and width are too many."""
    look: Callable[[], None] = lambda: None
    """Called again and again; raises when nobody waits any more."""


def decoded(data: bytes, bounds: Bounds, pick: Callable[[int, float | None], Sequence[int]] | None = None) -> Frames:
    """Decode a video's file: each frame upright, as players show it.

    Args:
        data: The file, in any format that FFmpeg reads.
        bounds: What it may take.
        pick: Of the number of frames and those per second, the indices to keep; the video is decoded twice then,
            so that only these are in memory. None: keep all.

    Raises:
        ImportError: PyAV is not installed.
        Exception: PyAV's own, or ValueError: it is no video, is broken off, or too large; or what ``bounds`` raise.
    """
    rate = _rate(data)
    wanted: Sequence[int] | None = None
    if pick is not None:
        wanted = [int(index) for index in pick(sum(1 for _ in _frames(data, bounds)), rate)]
    chosen = None if wanted is None else frozenset(wanted)
    kept: dict[int, NDArray[np.uint8]] = {}
    total = 0
    for index, frame in enumerate(_frames(data, bounds)):
        total += 1
        if chosen is None or index in chosen:
            _check_kept(len(kept) + 1 if chosen is None else len(chosen), frame, bounds)
            pixels: NDArray[np.uint8] = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
            kept[index] = np.rot90(pixels, frame.rotation // 90)
    indices = tuple(wanted if wanted is not None else kept)
    if not indices:
        raise ValueError("it has no frames")
    return Frames(_stacked(kept, indices), indices, total, rate)


def _check_kept(count: int, frame: VideoFrame, bounds: Bounds) -> None:
    if count * frame.width * frame.height > bounds.pixels:
        raise ValueError(
            f"{count} of its frames have {frame.width} by {frame.height} pixels each; expected at most {bounds.pixels} "
            "pixels together (media.max_video_pixels), so give a shorter or smaller one, or have the video processor "
            "sample it"
        )
    on_its_side = frame.rotation // 90 % 2
    bounds.fits(count, *((frame.width, frame.height) if on_its_side else (frame.height, frame.width)))


def _stacked(kept: dict[int, NDArray[np.uint8]], indices: Sequence[int]) -> NDArray[np.uint8]:
    """Put frames into one array. Each is let go as soon as it is there, so that none is in memory twice."""
    shapes = {frame.shape for frame in kept.values()}
    if len(shapes) > 1:
        raise ValueError(f"its frames have {len(shapes)} sizes; expected one")
    stacked = np.empty((len(indices), *shapes.pop()), dtype=np.uint8)
    last = {index: at for at, index in enumerate(indices)}
    for at, index in enumerate(indices):
        stacked[at] = kept.pop(index) if last[index] == at else kept[index]
    return stacked


def _rate(data: bytes) -> float | None:
    import av

    with av.open(BytesIO(data), "r", options=_OPTIONS) as container:
        stream = _stream(container)
        rate = stream.average_rate or stream.guessed_rate
        return None if rate is None else float(rate)


def _stream(container: InputContainer) -> VideoStream:
    from av.stream import Disposition

    if container.format.name.endswith("_pipe"):
        raise ValueError("it is a still image")
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:  # which is the cover of a sound
            return stream
    raise ValueError("it holds no video")


def _frames(data: bytes, bounds: Bounds) -> Iterator[VideoFrame]:
    import av

    with av.open(BytesIO(data), "r", options=_OPTIONS) as container:
        stream = _stream(container)
        context = stream.codec_context
        if context.width * context.height > MOST_FRAME_PIXELS:
            raise ValueError(
                f"its frames have {context.width} by {context.height} pixels; expected at most {MOST_FRAME_PIXELS}"
            )
        _check_seconds((container.duration or 0) / 1e6, bounds)
        context.options = _OF_FRAMES  # frames may grow after the first
        context.thread_count = _THREADS
        stream.thread_type = "AUTO"
        begin, end, count = math.inf, 0.0, 0
        for packet in container.demux():
            bounds.look()
            if packet.pts is not None and packet.duration is not None:
                end = max(end, float((packet.pts + packet.duration) * packet.time_base))
            if packet.stream_index == stream.index:
                if packet.pts is not None:
                    begin = min(begin, float(packet.pts * packet.time_base))
                    _check_seconds(float(packet.pts * packet.time_base) - begin, bounds)
                for frame in stream.decode(packet):
                    count += 1
                    if count > MOST_FRAMES:
                        raise ValueError(f"it has more than {MOST_FRAMES} frames")
                    yield frame
        _check_length(container, stream, end)


def _check_seconds(seconds: float, bounds: Bounds) -> None:
    if seconds > bounds.seconds:
        raise ValueError(
            f"it takes {seconds:.2f} seconds; expected at most {bounds.seconds:g} (media.max_video_seconds); give a "
            "shorter one, or raise the bound"
        )


def _check_length(container: InputContainer, stream: VideoStream, end: float) -> None:
    """FFmpeg reads what is broken off between two frames as a shorter video."""
    if container.duration is None or not container.format.name.startswith(_KNOW_THEIR_LENGTH):
        return
    length = ((container.start_time or 0) + container.duration) / 1e6
    frame = 1 / float(stream.average_rate or 10)
    if end < length - max(2 * frame, length / 100):
        raise ValueError(f"it ends after {end:.2f} of {length:.2f} seconds")
