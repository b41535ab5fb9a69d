# pyright: reportMissingImports=false
"""Images on their way to vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.images import Patches


def multimodal_input(
    prompt_token_ids: Sequence[int], images: Sequence[Patches], token_id: int, cache_salt: str
) -> dict[str, Any]:
    """What vLLM's own processor would make of a prompt: its ``MultiModalInput``.

    Args:
        prompt_token_ids: With ``token_id`` as often as each image has tokens.
        images: In the order in which they stand in the prompt.
        token_id: Of an image.
        cache_salt: What cached prefixes are found by, beside their tokens and the images' names.
    """
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    grids = torch.tensor([image.grid for image in images])
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": torch.cat([image.pixels for image in images]), "image_grid_thw": grids},
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    places = places_of(prompt_token_ids, [image.count for image in images], token_id)
    return {
        "type": "multimodal",
        "prompt_token_ids": list(prompt_token_ids),
        "mm_kwargs": items,
        "mm_hashes": {"image": [image.name for image in images]},
        "mm_placeholders": {
            "image": [
                PlaceholderRange(offset=place, length=image.count) for place, image in zip(places, images, strict=True)
            ]
        },
        "cache_salt": cache_salt,
    }


def places_of(prompt_token_ids: Sequence[int], counts: Sequence[int], token_id: int) -> list[int]:
    """Where the tokens of each image begin; ``counts`` says how many there are."""
    ids = list(prompt_token_ids)
    places: list[int] = []
    begin = 0
    for count in counts:
        begin = ids.index(token_id, begin)
        places.append(begin)
        begin += count
    return places
