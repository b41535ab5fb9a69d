# pyright: reportMissingImports=false
"""Carries the ids that tokens were drawn from to the backend, through vLLM's own fields for sampling masks.

vLLM fills these fields only for an engine that returns a mask with every token, with lists of ids. Here they hold, for
each token whose request asks for it, the bytes of :func:`drivetrain_sampling.packed_masks.pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

from drivetrain_vllm.translate import carries_masks


def attach(output: Any, masks: Mapping[str, bytes]) -> None:
    """Add masks to a step's ``ModelRunnerOutput``, by request id."""
    from vllm.v1.outputs import SamplingMaskLists

    parts = [masks.get(request_id, b"") for request_id in output.req_ids]
    offsets = np.cumsum([0, *map(len, parts)])
    output.sampling_masks = SamplingMaskLists(np.frombuffer(b"".join(parts), dtype=np.uint8), offsets)


def register() -> None:
    """Let the scheduler pass the masks on, and leave them packed in the outputs."""
    if not carries_masks():
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import SamplingMaskLists

    Scheduler.update_from_output = _update(Scheduler.update_from_output)
    SamplingMaskLists.to_nested_list = _to_nested_list(SamplingMaskLists.to_nested_list)


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        scheduler.return_sampling_mask = getattr(output, "sampling_masks", None) is not None
        return original(scheduler, scheduled, output)

    return update_from_output


def _to_nested_list(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to_nested_list(lists: Any) -> list[Any]:
        return [lists.token_ids] if lists.token_ids.dtype == np.uint8 else original(lists)

    return to_nested_list
