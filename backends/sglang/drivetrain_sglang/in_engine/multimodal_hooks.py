# pyright: reportMissingImports=false
"""What SGLang does with images and videos otherwise than with text, made right."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

import torch

_ITEM: Final = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_CACHES: Final = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Where releases keep the model's view of images and videos that it has seen."""
_SHAPES: Final = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""What says how the model is to see the pixels beside it."""


def register() -> None:
    """Hook what makes keys of images and videos, what scores prompts, and what sees videos."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ITEM}.set_pad_value", _shape_too, HookType.BEFORE)
    HookRegistry.register(f"{_BATCH}.prepare_for_extend", _score_unpadded, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", _part_frames, HookType.AFTER)


def forget_embeddings() -> None:
    """Let go of what the vision model made of images and videos: with other weights it makes something else."""
    for name in _CACHES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)  # what was not imported keeps nothing
        if cache is not None:
            cache.clear()


def _shape_too(item: Any, *_: object, **__: object) -> None:
    """SGLang's key of an image says nothing of its shape: one black image would be served another's cache.

    That of a video says nothing of its speed either.
    """
    shapes = [item.model_specific_data.get(name) for name in _SHAPES]
    if item.hash is not None or not isinstance(item.feature, torch.Tensor) or all(shape is None for shape in shapes):
        return
    said = [None if shape is None else torch.as_tensor(shape).tolist() for shape in shapes]
    digest = hashlib.blake2b(repr(said).encode(), digest_size=8)
    digest.update(item.feature.cpu().float().numpy().tobytes())
    item.hash = int.from_bytes(digest.digest())


def _score_unpadded(_: None, batch: Any) -> None:
    """In a prompt SGLang puts an image's or a video's key in place of its token id, and would score that."""
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
    """In SGLang's Qwen2.5-VL each pair of a video's frames attends to all others, in the model itself to none."""
    visual: Any = getattr(scheduler.tp_worker.model_runner.model, "visual", None)
    if type(visual).__name__ == "Qwen2_5_VisionTransformer":
        visual.register_forward_pre_hook(_as_images, with_kwargs=True)


def _as_images(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pixels, grids = (*args, kwargs["grid_thw"]) if "grid_thw" in kwargs else args
    apart = torch.repeat_interleave(grids, grids[:, 0], dim=0)
    apart[:, 0] = 1
    return (pixels, apart), {}
