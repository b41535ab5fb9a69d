"""Images on their way to SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.images import Patches


def image_data(images: Sequence[Patches]) -> list[dict[str, Any]]:
    """Field ``image_data`` of SGLang's ``GenerateReqInput`` for a prompt that has room for these images."""
    import torch

    return [
        {
            "format": "processor_output",
            "pixel_values": torch.cat([image.pixels for image in images]),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
        }
    ]
