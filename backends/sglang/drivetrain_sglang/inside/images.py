# pyright: reportMissingImports=false
"""What SGLang does with images otherwise than with text, made right."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

import torch

_ITEM: Final = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_CACHES: Final = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Where releases keep the model's view of images that it has seen."""


def register() -> None:
    """Hook what makes keys of images, and what scores prompts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ITEM}.set_pad_value", _shape_too, HookType.BEFORE)
    HookRegistry.register(f"{_BATCH}.prepare_for_extend", _score_unpadded, HookType.AFTER)


def forget_embeddings() -> None:
    """Let go of what the vision model made of images: with other weights it makes something else."""
    for name in _CACHES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)  # what was not imported keeps nothing
        if cache is not None:
            cache.clear()


def _shape_too(item: Any, *_: object, **__: object) -> None:
    """SGLang's key of an image says nothing of its shape: one black image would be served another's cache."""
    grid = item.model_specific_data.get("image_grid_thw")
    if item.hash is not None or grid is None or not isinstance(item.feature, torch.Tensor):
        return
    digest = hashlib.blake2b(repr(grid.tolist()).encode(), digest_size=8)
    digest.update(item.feature.cpu().float().numpy().tobytes())
    item.hash = int.from_bytes(digest.digest())


def _score_unpadded(_: None, batch: Any) -> None:
    """In a prompt SGLang puts an image's key in place of its token id, and would score that."""
    if batch.extend_input_logprob_token_ids is None or all(req.multimodal_inputs is None for req in batch.reqs):
        return
    ids: list[int] = []
    for req, prefix, extend, skipped in zip(
        batch.reqs, batch.prefix_lens, batch.extend_lens, batch.extend_logprob_start_lens, strict=True
    ):
        scored = list(req.origin_input_ids_unpadded[prefix + skipped + 1 : prefix + extend + 1])
        ids += scored + [0] * (extend - skipped - len(scored))
    batch.extend_input_logprob_token_ids = torch.tensor(ids, dtype=batch.extend_input_logprob_token_ids.dtype)
