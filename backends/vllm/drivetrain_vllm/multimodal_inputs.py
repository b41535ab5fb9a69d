# pyright: reportMissingImports=false
"""Convert images, videos and sounds to vLLM's input format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.media.qwen_audio import Spectrogram
from drivetrain.media.qwen_vision import Patches, Seen
from drivetrain.media.reader import Prepared


def of_vision(
    prompt_token_ids: Sequence[int], seen: Seen, token_ids: tuple[int, int], cache_salt: str
) -> dict[str, Any]:
    """Return the ``MultiModalInput`` of a prompt with images and videos, as vLLM's own processor would make it.

    Args:
        prompt_token_ids: Ids with the placeholder token of each image and video repeated once per token.
        seen: Images and videos, each in the order of the prompt.
        token_ids: Placeholder token ids of an image and of a video.
        cache_salt: Prefix-cache key, used beside tokens and media hashes.
    """
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig

    values: dict[str, torch.Tensor] = {}
    fields: dict[str, MultiModalFieldConfig] = {}
    kinds: dict[str, tuple[Sequence[Patches], int]] = {}
    for kind, pixels, all_of_kind, token_id in (
        ("image", "pixel_values", seen.images, token_ids[0]),
        ("video", "pixel_values_videos", seen.videos, token_ids[1]),
    ):
        if not all_of_kind:
            continue
        kinds[kind] = all_of_kind, token_id
        grids = torch.tensor([one.grid for one in all_of_kind])
        values[pixels] = torch.cat([one.pixels for one in all_of_kind])
        fields[pixels] = MultiModalFieldConfig.flat_from_sizes(kind, grids.prod(-1))
        values[f"{kind}_grid_thw"] = grids
        fields[f"{kind}_grid_thw"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    seconds = [video.seconds for video in seen.videos if video.seconds is not None]
    if seconds:
        # float64, as vLLM multiplies and rounds down: rounding errors could make whole products one less.
        values["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float64)
        fields["second_per_grid_ts"] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
    return _input(prompt_token_ids, values, fields, kinds, cache_salt)


def of_sounds(
    prompt_token_ids: Sequence[int], sounds: Sequence[Spectrogram], token_id: int, cache_salt: str
) -> dict[str, Any]:
    """Return the ``MultiModalInput`` of a prompt with sounds, as vLLM's own processor would make it.

    Args:
        prompt_token_ids: Ids with the placeholder token of each sound repeated once per token.
        sounds: The sounds, in the order of the prompt.
        token_id: Placeholder token id of a sound.
        cache_salt: Prefix-cache key, used beside tokens and media hashes.
    """
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig

    values = {
        "input_features": torch.cat([one.features for one in sounds]),
        "feature_attention_mask": torch.cat([one.mask for one in sounds]),
    }
    fields = {name: MultiModalFieldConfig.batched("audio") for name in values}
    return _input(prompt_token_ids, values, fields, {"audio": (sounds, token_id)}, cache_salt)


def _input(
    prompt_token_ids: Sequence[int],
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
    kinds: Mapping[str, tuple[Sequence[Prepared], int]],
    cache_salt: str,
) -> dict[str, Any]:
    """Return a ``MultiModalInput``.

    Args:
        prompt_token_ids: Ids with all placeholders.
        values: Inputs of the model, by name.
        fields: The ``MultiModalFieldConfig`` of each.
        kinds: Media in the order of the prompt, and their placeholder token id, by kind.
        cache_salt: Prefix-cache key.
    """
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    return {
        "type": "multimodal",
        "prompt_token_ids": list(prompt_token_ids),
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(values, fields),
        "mm_hashes": {kind: [one.name for one in all_of_kind] for kind, (all_of_kind, _) in kinds.items()},
        "mm_placeholders": {
            kind: [
                PlaceholderRange(offset=place, length=one.count)
                for place, one in zip(
                    places_of(prompt_token_ids, [one.count for one in all_of_kind], token_id), all_of_kind, strict=True
                )
            ]
            for kind, (all_of_kind, token_id) in kinds.items()
        },
        "cache_salt": cache_salt,
    }


def places_of(prompt_token_ids: Sequence[int], counts: Sequence[int], token_id: int) -> list[int]:
    """Return the begin of each medium's tokens in the prompt; ``counts`` are their numbers of tokens."""
    ids = list(prompt_token_ids)
    places: list[int] = []
    begin = 0
    for count in counts:
        begin = ids.index(token_id, begin)
        places.append(begin)
        begin += count
    return places
