"""Images and videos on their way to SGLang."""

from __future__ import annotations

from typing import Any

from drivetrain.media.qwen_vision import Seen


def image_data(seen: Seen) -> list[dict[str, Any]]:
    """Field ``image_data`` of SGLang's ``GenerateReqInput`` for a prompt that has room for these images and videos.

    Videos are in it, too: SGLang takes the shapes and seconds of all that it places from the first dictionary alone.
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
