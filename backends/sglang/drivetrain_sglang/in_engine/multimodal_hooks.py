# pyright: reportMissingImports=false
"""Hooks that correct SGLang's handling of images and videos."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

import torch

_ITEM: Final = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_CACHES: Final = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules in which releases cache embeddings of images and videos."""
_SHAPES: Final = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Fields that describe the shape of the pixels beside them."""


def register() -> None:
    """Hook the keys of images and videos, the scoring of prompts, and the vision model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ITEM}.set_pad_value", _shape_too, HookType.BEFORE)
    HookRegistry.register(f"{_BATCH}.prepare_for_extend", _score_unpadded, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", _part_frames, HookType.AFTER)


def forget_embeddings() -> None:
    """Clear cached embeddings of images and videos: they were made with other weights."""
    for name in _CACHES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)  # a module that was not imported has no cache
        if cache is not None:
            cache.clear()


def _shape_too(item: Any, *_: object, **__: object) -> None:
    """Include shapes in the key of an image or video.

    SGLang's own key covers pixels only: a black image would be served the cache of one of another shape, and a video
    that of one at another speed.
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


def _part_frames(_: None, scheduler: Any) -> None:
    """Separate a video's frame pairs in Qwen2.5-VL: SGLang lets them attend to each other, the original does not."""
    visual: Any = getattr(scheduler.tp_worker.model_runner.model, "visual", None)
    if type(visual).__name__ == "Qwen2_5_VisionTransformer":
        visual.register_forward_pre_hook(_as_images, with_kwargs=True)


def _as_images(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pixels, grids = (*args, kwargs["grid_thw"]) if "grid_thw" in kwargs else args
    apart = torch.repeat_interleave(grids, grids[:, 0], dim=0)
    apart[:, 0] = 1
    return (pixels, apart), {}
