"""Preprocessing of sounds for Qwen2-Audio: reading, decoding, log-mel spectrograms.

For backends, in the engine's process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from drivetrain.backend.toolkit.model_folder import model_file
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.media.reader import MediaReader, Place
from drivetrain.media.sound import Bounds, decoded
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.prompts import AudioInput, MediaInput

AUDIO_MODELS: Final = frozenset({"qwen2_audio"})
"""Model types whose sounds were compared with the processor of transformers."""

_SOUNDS: Final = 4
"""Maximum sounds that are decoded at a time."""

_LEAST_TOKENS: Final = 2
"""Minimum tokens of a sound: if a prompt has one placeholder, transformers expands it once more."""


def audio_capabilities(config: EngineConfig) -> frozenset[Capability]:
    """Return :attr:`Capability.AUDIO` if the configured model takes sounds, and PyAV, which reads them, is installed.

    Reads only the model's ``config.json``.
    """
    fields = model_file(config, "config.json") if config.task is Task.GENERATE else {}
    takes = fields.get("model_type") in AUDIO_MODELS and importlib.util.find_spec("av") is not None
    return frozenset({Capability.AUDIO}) if takes else frozenset()


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """The log-mel spectrogram of one sound, padded to the model's window."""

    name: str
    """Digest of the kind and the file's bytes; unique to this sound."""
    features: Any
    """float32 tensor of shape (1, mel bins, frames of the window)."""
    mask: Any
    """int32 tensor of shape (1, frames of the window): 1 for frames of the sound, 0 for padding."""
    count: int
    """Number of tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of the spectrogram and its mask."""
        return int(self.features.nbytes + self.mask.nbytes)


def tokens_of(frames: int) -> int:
    """Return the number of tokens that Qwen2-Audio makes of so many frames: a convolution and a pooling halve them."""
    return max(0, ((frames - 1) // 2 + 1 - 2) // 2 + 1)


class SoundReader(MediaReader[Spectrogram]):
    """Reads sounds with the feature extractor named by the model's folder, within ``config.media``."""

    says: ClassVar[str] = "sounds"

    def __init__(self, config: EngineConfig, model_config: Any, context_length: int) -> None:
        super().__init__(config, context_length)
        self.audio_token_id = int(model_config.audio_token_id)
        """Placeholder token id of a sound, repeated once per token."""
        self._sounds = ThreadPoolExecutor(min(_SOUNDS, os.cpu_count() or 1), "drivetrain-sounds")

    def place(self, medium: MediaInput) -> Place:
        """Return the token id that stands for a sound."""
        if not isinstance(medium, AudioInput):
            raise InvalidRequest(f"this model takes sounds, and no {type(medium).__name__}", field="prompts")
        return Place(self.audio_token_id, None)

    async def example(self) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt of one second of a rising tone, and the sound."""
        rate = int(self._extractor.sampling_rate)
        at = np.arange(rate, dtype=np.float32) / rate
        media = (AudioInput.from_array(np.sin(2 * np.pi * (200 + 400 * at) * at) / 2, rate),)
        (sound,) = await self.read(media)
        return [self.audio_token_id] * sound.count, media

    @cached_property
    def _extractor(self) -> Any:
        from transformers import AutoFeatureExtractor

        config = self._config
        return AutoFeatureExtractor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    def _threads(self, medium: MediaInput) -> ThreadPoolExecutor:
        return self._sounds

    def _prepare(self, medium: MediaInput, data: bytes, name: str, look: Callable[[], None]) -> Spectrogram:
        extractor = self._extractor
        rate, window = int(extractor.sampling_rate), float(extractor.n_samples / extractor.sampling_rate)

        def fits(seconds: float) -> None:
            if seconds > window:
                raise ValueError(
                    f"it takes more than the {window:g} seconds that the model hears at once; cut it into several"
                )

        media = self._config.media
        try:
            samples = decoded(data, Bounds(media.max_audio_seconds, media.max_audio_samples, fits, look), rate)
        except ImportError as error:
            raise UnsupportedCapability(
                f"sounds need PyAV (pip install 'drivetrain[audio]'): {error}", capability=Capability.AUDIO.value
            ) from error
        # Resampling may add some samples at the end.
        samples = samples[: extractor.n_samples]
        made = extractor(samples, sampling_rate=rate, return_attention_mask=True, return_tensors="pt")
        count = tokens_of(int(made["attention_mask"].sum()))
        if count < _LEAST_TOKENS:
            raise ValueError(f"it takes {len(samples) / rate:.3f} seconds, of which the model hears nothing; give 0.1")
        return Spectrogram(name, made["input_features"], made["attention_mask"], count)
