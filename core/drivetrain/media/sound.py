"""Decoding of sounds with PyAV (FFmpeg). For backends, in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

MOST_CHANNELS: Final = 64
"""Maximum channels of a sound."""

MOST_RATE: Final = 384_000
"""Maximum sampling rate in Hz."""

_OPTIONS: Final = {"protocol_whitelist": "none"}
"""No protocols: FFmpeg treats playlists as media and would read the files and addresses named in them."""

_KNOW_THEIR_LENGTH: Final = ("flac", "mov", "matroska")
"""Formats that store the duration; for others FFmpeg estimates it from the data."""

_UNKNOWN_SIZES: Final = (0, 0xFFFFFFFF)
"""Sizes that programs write into a WAV whose length they do not know yet."""

_A_MARGIN: Final = 0.01
"""Share of the stored duration that a whole file may lack, by rounding and by what decoders cut off."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on one sound. Each is checked before the memory or time is spent."""

    seconds: float
    """Maximum length in seconds."""
    samples: int
    """Maximum samples of all channels together, at the file's own rate."""
    fits: Callable[[float], None] = lambda seconds: None
    """Raises if the model does not take so many seconds."""
    look: Callable[[], None] = lambda: None
    """Called repeatedly; raises if the caller was cancelled or the time is over."""


def decoded(data: bytes, bounds: Bounds, rate: int) -> NDArray[np.float32]:
    """Decode a sound file to one channel at ``rate``.

    The channels are averaged. A sound of another rate is resampled by FFmpeg.

    Args:
        data: The file: WAV, FLAC, MP3, Ogg, or another format that FFmpeg reads.
        bounds: Limits on the sound.
        rate: Sampling rate of the result in Hz.

    Returns:
        Samples of shape (samples,), between -1 and 1 unless the file itself goes beyond.

    Raises:
        ImportError: PyAV is not installed.
        Exception: PyAV's own or ValueError: The file is not a sound, is truncated, or is too large. Also anything that
            the functions of ``bounds`` raise.
    """
    import av

    _check_whole_wav(data)
    with av.open(BytesIO(data), "r", options=_OPTIONS) as container:
        stream = _stream(container)
        own_rate = int(stream.rate)
        told = _told_seconds(container, stream)
        _check(told or 0.0, stream, bounds)
        parts = [part.mean(axis=0, dtype=np.float32) for part in _frames(container, stream, bounds)]
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not len(samples):
        raise ValueError("it holds no samples")
    seconds = len(samples) / own_rate
    if told is not None and seconds < told * (1 - _A_MARGIN):
        raise ValueError(f"it ends after {seconds:.2f} of {told:.2f} seconds")
    if not bool(np.isfinite(samples).all()):
        raise ValueError("it holds samples that are not finite")
    return samples if own_rate == rate else _resampled(samples, own_rate, rate)


def _stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise ValueError("it holds no sound")
    stream = container.streams.audio[0]
    if not 1 <= stream.channels <= MOST_CHANNELS:
        raise ValueError(f"it has {stream.channels} channels; expected 1 to {MOST_CHANNELS}")
    if not 1 <= stream.rate <= MOST_RATE:
        raise ValueError(f"it has {stream.rate} samples a second; expected 1 to {MOST_RATE}")
    return stream


def _told_seconds(container: InputContainer, stream: AudioStream) -> float | None:
    """Return the duration that the file states; None if its format states none."""
    if stream.duration is None or stream.time_base is None or not container.format.name.startswith(_KNOW_THEIR_LENGTH):
        return None
    return float(stream.duration * stream.time_base)


def _check(seconds: float, stream: AudioStream, bounds: Bounds) -> None:
    if seconds > bounds.seconds:
        raise ValueError(
            f"it takes more than {bounds.seconds:g} seconds (media.max_audio_seconds); give a shorter one, or raise "
            "the bound"
        )
    if seconds * stream.rate * stream.channels > bounds.samples:
        raise ValueError(
            f"it has more than {bounds.samples} samples in its {stream.channels} channels (media.max_audio_samples); "
            "give a shorter one, or raise the bound"
        )
    bounds.fits(seconds)


def _frames(container: InputContainer, stream: AudioStream, bounds: Bounds) -> Iterator[NDArray[np.float32]]:
    """Yield the sound in parts of shape (channels, samples)."""
    import av

    to_float = av.AudioResampler(format="fltp")
    count = 0

    def arrays(frame: AudioFrame | None) -> Iterator[NDArray[np.float32]]:
        nonlocal count
        for part in to_float.resample(frame):
            count += part.samples
            _check(count / stream.rate, stream, bounds)
            yield np.asarray(part.to_ndarray(), dtype=np.float32)

    for packet in container.demux(stream):
        bounds.look()
        for frame in stream.decode(packet):
            yield from arrays(frame)
    if count:
        yield from arrays(None)


def _resampled(samples: NDArray[np.float32], own_rate: int, rate: int) -> NDArray[np.float32]:
    import av

    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = own_rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([np.asarray(part.to_ndarray()[0], dtype=np.float32) for part in parts])


def _check_whole_wav(data: bytes) -> None:
    """Raise if a WAV is truncated: FFmpeg reads it as a shorter sound."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    told = int.from_bytes(data[4:8], "little")
    if told not in _UNKNOWN_SIZES and len(data) < told + 8:
        raise ValueError(f"it ends after {len(data)} of {told + 8} bytes")
