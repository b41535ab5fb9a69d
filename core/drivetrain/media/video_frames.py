"""Decoding of video frames with PyAV (FFmpeg). For backends, in the engine's process."""

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
"""Maximum number of frames of a video, kept or not."""

MOST_FRAME_PIXELS: Final = 1 << 25
"""Maximum pixels of one frame: 8K. A decoder holds up to twenty frames."""

_THREADS: Final = 4
"""Number of FFmpeg threads; each holds one decoded frame."""

_OF_FRAMES: Final = {"max_pixels": str(MOST_FRAME_PIXELS)}

_OPTIONS: Final = {"protocol_whitelist": "none"} | _OF_FRAMES
"""No protocols: FFmpeg treats playlists as videos and would read the files and addresses named in them."""

_KNOW_THEIR_LENGTH: Final = ("mov", "matroska")
"""Formats that store the duration; for others FFmpeg estimates it from the data."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The kept frames of a video."""

    pixels: NDArray[np.uint8]
    """Shape (frames, height, width, 3), RGB."""
    indices: tuple[int, ...]
    """Indices of the kept frames in the video."""
    total: int
    """Number of frames of the video."""
    per_second: float | None
    """Average frames per second of the video; None if its file does not say."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on one video. Each is checked before the memory or time is spent."""

    seconds: float
    """Maximum length in seconds."""
    pixels: int
    """Maximum pixels of all kept frames together."""
    fits: Callable[[int, int, int], None] = lambda frames, height, width: None
    """Raises if so many frames of this height and width exceed a limit."""
    look: Callable[[], None] = lambda: None
    """Called repeatedly; raises if the caller was cancelled or the time is over."""


def decoded(data: bytes, bounds: Bounds, pick: Callable[[int, float | None], Sequence[int]] | None = None) -> Frames:
    """Decode a video file. Frames are rotated upright, as players show them.

    Args:
        data: The file, in any format that FFmpeg reads.
        bounds: Limits on the video.
        pick: Takes the number of frames and the frames per second; returns the indices to keep. The video is then
            decoded twice, so that only the kept frames are in memory. None: keep all.

    Raises:
        ImportError: PyAV is not installed.
        Exception: PyAV's own or ValueError: The file is not a video, is truncated, or is too large. Also anything that
            the functions of ``bounds`` raise.
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
    """Copy frames into one array. Each frame is freed once copied, so that none is in memory twice."""
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
        if not stream.disposition & Disposition.attached_pic:  # the cover picture of an audio file
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
        context.options = _OF_FRAMES  # frames after the first may be larger
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
    """Raise if the video is truncated: FFmpeg reads one that breaks off between two frames as a shorter video."""
    if container.duration is None or not container.format.name.startswith(_KNOW_THEIR_LENGTH):
        return
    length = ((container.start_time or 0) + container.duration) / 1e6
    frame = 1 / float(stream.average_rate or 10)
    if end < length - max(2 * frame, length / 100):
        raise ValueError(f"it ends after {end:.2f} of {length:.2f} seconds")
