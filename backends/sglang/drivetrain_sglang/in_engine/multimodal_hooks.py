# pyright: reportMissingImports=false
"""Hooks that correct SGLang's handling of images, videos and sounds."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

_ITEM: Final = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_CACHES: Final = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules in which releases cache embeddings of media."""
_SHAPES: Final = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "feature_attention_mask")
"""Fields that describe the shape of the pixels, or the length of the sound, beside them."""


def register() -> None:
    """Hook the keys of media, the scoring of prompts, and the vision and audio models."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ITEM}.set_pad_value", _shape_too, HookType.BEFORE)
    HookRegistry.register(f"{_BATCH}.prepare_for_extend", _score_unpadded, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", _correct_model, HookType.AFTER)


def forget_embeddings() -> None:
    """Clear cached embeddings of media: they were made with other weights."""
    for name in _CACHES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)  # a module that was not imported has no cache
        if cache is not None:
            cache.clear()


def _shape_too(item: Any, *_: object, **__: object) -> None:
    """Include shapes in the key of a medium.

    SGLang's own key covers pixels only: a black image would be served the cache of one of another shape, a video that
    of one at another speed, and silence that of a longer silence.
    """
    shapes = [item.model_specific_data.get(name) for name in _SHAPES]
    if item.hash is not None or not isinstance(item.feature, torch.Tensor) or all(shape is None for shape in shapes):
        return
    said = [None if shape is None else torch.as_tensor(shape).tolist() for shape in shapes]
    digest = hashlib.blake2b(repr(said).encode(), digest_size=8)
    digest.update(item.feature.cpu().float().numpy().tobytes())
    item.hash = int.from_bytes(digest.digest())


def _score_unpadded(_: None, batch: Any) -> None:
    """Score a prompt's token ids where SGLang has replaced them by keys of images or videos."""
    if batch.extend_input_logprob_token_ids is None or all(req.multimodal_inputs is None for req in batch.reqs):
        return
    ids: list[int] = []
    for req, prefix, extend, skipped in zip(
        batch.reqs, batch.prefix_lens, batch.extend_lens, batch.extend_logprob_start_lens, strict=True
    ):
        scored = list(req.origin_input_ids_unpadded[prefix + skipped + 1 : prefix + extend + 1])
        ids += scored + [0] * (extend - skipped - len(scored))
    batch.extend_input_logprob_token_ids = torch.tensor(ids, dtype=batch.extend_input_logprob_token_ids.dtype)


def _correct_model(_: None, scheduler: Any) -> None:
    """Let the model see and hear as the original does.

    SGLang lets the frame pairs of a video attend to each other in Qwen2.5-VL, and a sound to the padding after it in
    Qwen2-Audio.
    """
    model: Any = scheduler.tp_worker.model_runner.model
    visual: Any = getattr(model, "visual", None)
    if type(visual).__name__ == "Qwen2_5_VisionTransformer":
        visual.register_forward_pre_hook(_as_images, with_kwargs=True)
    if type(model).__name__ == "Qwen2AudioForConditionalGeneration":
        model.get_audio_feature = partial(_heard, model)


def _heard(model: Any, items: Sequence[Any]) -> torch.Tensor:
    """Return the embeddings of sounds, shape (tokens, hidden size), without their padding."""
    tower = model.audio_tower
    features = torch.cat([item.feature for item in items]).to(tower.device, tower.dtype)
    frames = torch.cat([item.feature_attention_mask for item in items]).sum(-1).to(tower.device)
    halved, tokens = tower._get_feat_extract_output_lengths(frames)
    length = features.shape[-1] // 2
    is_padding = torch.arange(length, device=tower.device) >= halved[:, None]
    mask = torch.zeros(len(features), 1, length, length, dtype=tower.dtype, device=tower.device)
    mask.masked_fill_(is_padding[:, None, None], float("-inf"))
    states = model.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
    return torch.cat([own[:count] for own, count in zip(states, tokens.tolist(), strict=True)])


def _as_images(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pixels, grids = (*args, kwargs["grid_thw"]) if "grid_thw" in kwargs else args
    apart = torch.repeat_interleave(grids, grids[:, 0], dim=0)
    apart[:, 0] = 1
    return (pixels, apart), {}
