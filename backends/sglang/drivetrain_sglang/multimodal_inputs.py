"""Convert images, videos and sounds to SGLang's input format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.media.qwen_audio import Spectrogram
from drivetrain.media.qwen_vision import Seen


def image_data(seen: Seen) -> list[dict[str, Any]]:
    """Return SGLang's ``GenerateReqInput.image_data`` for a prompt that has placeholders for this media.

    It includes videos, as SGLang reads shapes and seconds of all media from the first dictionary only.
    """
    import torch

    fields: dict[str, Any] = {"format": "processor_output"}
    if seen.images:
        fields["pixel_values"] = torch.cat([image.pixels for image in seen.images])
        fields["image_grid_thw"] = torch.tensor([image.grid for image in seen.images])
    if seen.videos:
        fields["pixel_values_videos"] = torch.cat([video.pixels for video in seen.videos])
        fields["video_grid_thw"] = torch.tensor([video.grid for video in seen.videos])
        seconds = [video.seconds for video in seen.videos if video.seconds is not None]
        if seconds:
            fields["second_per_grid_ts"] = torch.tensor(seconds)
    return [fields]


def audio_data(sounds: Sequence[Spectrogram]) -> list[dict[str, Any]]:
    """Return SGLang's ``GenerateReqInput.audio_data`` for a prompt that has placeholders for these sounds."""
    import torch

    return [
        {
            "format": "processor_output",
            "input_features": torch.cat([one.features for one in sounds]),
            "feature_attention_mask": torch.cat([one.mask for one in sounds]),
        }
    ]


def keep_token_ids(processor: Any) -> None:
    """Let SGLang's processor of Qwen2-Audio take a prompt's ids as given: it would decode and tokenise them again."""
    if hasattr(processor, "_build_transcription_prompt"):
        processor._build_transcription_prompt = _as_given


def _as_given(prompt: list[int]) -> list[int]:
    return prompt
