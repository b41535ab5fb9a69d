"""Videos' frames, decoded with PyAV, which is FFmpeg. For backends, in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer

MOST_BYTES: Final = 1 << 32
"""Most memory that the frames of one video take before they are resized."""

_ALONE: Final = {"protocol_whitelist": "none"}
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


def decoded(data: bytes, pick: Callable[[int, float | None], Sequence[int]] | None = None) -> Frames:
    """Decode a video's file: each frame upright, as players show it.

    Args:
        data: The file, in any format that FFmpeg reads.
        pick: Of the number of frames and those per second, the indices to keep; the video is decoded twice then,
            so that only these are in memory. None: keep all.

    Raises:
        ImportError: PyAV is not installed.
        Exception: PyAV's own, or ValueError: it is no video, is broken off, or too large.
    """
    rate = _rate(data)
    wanted: Sequence[int] | None = None
    if pick is not None:
        wanted = [int(index) for index in pick(sum(1 for _ in _frames(data)), rate)]
    chosen = None if wanted is None else frozenset(wanted)
    kept: dict[int, NDArray[np.uint8]] = {}
    total = size = 0
    for index, frame in enumerate(_frames(data)):
        total += 1
        if chosen is None or index in chosen:
            pixels: NDArray[np.uint8] = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
            kept[index] = np.rot90(pixels, frame.rotation // 90)
            size += kept[index].nbytes
            if size > MOST_BYTES:
                raise ValueError(
                    f"its first {index + 1} frames of {frame.width} by {frame.height} pixels take more than "
                    f"{MOST_BYTES >> 30} GiB; give a shorter or smaller one, or have the video processor sample it"
                )
    indices = tuple(wanted if wanted is not None else kept)
    if not indices:
        raise ValueError("it has no frames")
    return Frames(np.stack([kept[index] for index in indices]), indices, total, rate)


def _rate(data: bytes) -> float | None:
    import av

    with av.open(BytesIO(data), "r", options=_ALONE) as container:
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


def _frames(data: bytes) -> Iterator[VideoFrame]:
    import av

    with av.open(BytesIO(data), "r", options=_ALONE) as container:
        stream = _stream(container)
        stream.thread_type = "AUTO"
        end = 0.0
        for packet in container.demux():
            if packet.pts is not None and packet.duration is not None:
                end = max(end, float((packet.pts + packet.duration) * packet.time_base))
            if packet.stream_index == stream.index:
                yield from stream.decode(packet)
        _check_length(container, stream, end)


def _check_length(container: InputContainer, stream: VideoStream, end: float) -> None:
    """FFmpeg reads what is broken off between two frames as a shorter video."""
    if container.duration is None or not container.format.name.startswith(_KNOW_THEIR_LENGTH):
        return
    length = ((container.start_time or 0) + container.duration) / 1e6
    frame = 1 / float(stream.average_rate or 10)
    if end < length - max(2 * frame, length / 100):
        raise ValueError(f"it ends after {end:.2f} of {length:.2f} seconds")
