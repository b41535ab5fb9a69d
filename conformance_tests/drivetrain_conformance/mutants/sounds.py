"""Sounds that are dropped, mixed up, kept from older weights, or heard at another speed."""

from __future__ import annotations

import dataclasses
import io
import wave
from collections.abc import Callable, Mapping
from typing import Final

from drivetrain.backend.base import GenerateRequest, GenerateResult, ReadMedium
from drivetrain.types.config import EngineConfig, MediaLimits
from drivetrain.types.prompts import AudioInput, MediaInput
from drivetrain_conformance.mutants.images import keeps_what_old_weights_saw
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingMedia,
    MixingMedia,
    config_mutant,
    request_mutant,
)

_BELOW: Final = ("nats below the most likely", "from those of the model")
_RATE: Final = 16_000


@request_mutant("multimodal/a_sound_is_heard_as_the_model_hears_it", says=_BELOW)
def hears_silence(request: GenerateRequest) -> GenerateRequest:
    """The sounds are dropped: the model hears silence of their length."""
    return dataclasses.replace(request, media=tuple(map(_silent, request.media)))


@request_mutant("multimodal/a_sound_is_heard_as_the_model_hears_it", says=_BELOW)
def hears_only_the_beginning(request: GenerateRequest) -> GenerateRequest:
    """The end of a long sound is cut off and replaced by silence."""
    return dataclasses.replace(request, media=tuple(map(_faded, request.media)))


@mutant("multimodal/sounds_stay_with_their_prompts", says=_BELOW)
class hears_the_sounds_of_another_row(MixingMedia):
    """Each request hears the sounds of the first one in flight that has the same ids."""

    def is_like(self, request: GenerateRequest, other: GenerateRequest) -> bool:
        """Return whether two prompts have the same ids."""
        return request.prompt_token_ids == other.prompt_token_ids


@mutant("multimodal/a_cached_sound_is_no_other", says=_BELOW)
class knows_sounds_by_their_ids(KnowingMedia):
    """A prompt whose ids were seen before is answered with the sounds that it had then."""


@mutant("multimodal/a_sound_of_another_rate_is_resampled", says="takes other tokens")
class ignores_the_sampling_rate(CorrectBackend):
    """The samples of every sound are taken for samples at the model's own rate."""

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        return await super().read_media(tuple(map(_at_the_models_rate, media)))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        media = tuple(map(_at_the_models_rate, request.media))
        return await super().generate(dataclasses.replace(request, media=media))


@mutant("multimodal/new_weights_hear_a_sound_anew", says=_BELOW)
class keeps_what_old_weights_heard(keeps_what_old_weights_saw):
    """The answer about a sound that old weights gave is given after an update."""


@config_mutant("multimodal/what_is_no_sound_is_refused", says="expected InvalidRequest for prompts, but nothing was")
def drops_the_bound_on_seconds(config: EngineConfig) -> Mapping[str, object]:
    """Sounds may be longer than the configuration says."""
    default = MediaLimits().max_audio_seconds
    return {"media": config.media.model_copy(update={"max_audio_seconds": default})}


@config_mutant("multimodal/what_is_no_sound_is_refused", says="expected InvalidRequest for prompts, but nothing was")
def drops_the_bound_on_samples(config: EngineConfig) -> Mapping[str, object]:
    """Sounds may have more samples than the configuration says."""
    default = MediaLimits().max_audio_samples
    return {"media": config.media.model_copy(update={"max_audio_samples": default})}


def _silent(medium: MediaInput) -> MediaInput:
    return _rewritten(medium, lambda frames: bytes(len(frames)))


def _faded(medium: MediaInput) -> MediaInput:
    return _rewritten(medium, lambda frames: frames[: len(frames) // 2] + bytes(len(frames) - len(frames) // 2))


def _at_the_models_rate(medium: MediaInput) -> MediaInput:
    return _rewritten(medium, lambda frames: frames, _RATE)


def _rewritten(medium: MediaInput, change: Callable[[bytes], bytes], rate: int | None = None) -> MediaInput:
    """Return a WAV with other samples, or another sampling rate in its header; media of other kinds as they are."""
    if not isinstance(medium, AudioInput) or medium.data is None:
        return medium
    file = io.BytesIO()
    with wave.open(io.BytesIO(medium.data)) as read, wave.open(file, "wb") as written:
        written.setparams(read.getparams())
        written.setframerate(rate or read.getframerate())
        written.writeframes(change(read.readframes(read.getnframes())))
    return AudioInput(data=file.getvalue())
