# pyright: reportMissingImports=false
"""Ends requests whose logits allow no token, and clears cache blocks that may hold their NaN.

The model runner reports failed rows, and the scheduler ends their requests. Attention multiplies masked positions by
zero, and zero times NaN is NaN: a block with NaN would spoil the next request that gets it, so it is zeroed in the
first step that may hand it out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch

from drivetrain_sampling import NOT_FINITE, failures_of

_STATE: Final = "_drivetrain_failures"
_UNCLEAN: Final = "_drivetrain_unclean"
"""Attribute of a scheduler's output: ids of the blocks to zero before the step."""
_STEPS_UNDER_WAY: Final = 4
"""Most steps that are computed or scheduled when a step's output is processed."""


# In the model runner ------------------------------------------------------------------------------------------------


def tell(output: Any, request_ids: Iterable[str], top: torch.Tensor) -> None:
    """Record in a step's output which of its requests failed.

    Args:
        output: vLLM's ``ModelRunnerOutput``. The codes use its field for counts of NaN.
        request_ids: In the batch's order.
        top: Largest logit of each request, in host memory.
    """
    failures = failures_of(top).tolist()
    if any(failures):
        told = zip(request_ids, failures, strict=True)
        output.num_nans_in_logits = {request_id: failure for request_id, failure in told if failure}


def clean(runner: Any, scheduled: Any) -> None:
    """Zero the cache blocks that a scheduler's output names."""
    unclean: list[int] | None = getattr(scheduled, _UNCLEAN, None)
    if unclean:
        zero_blocks(runner.kv_caches, runner.kv_cache_config.num_blocks, unclean)


def zero_blocks(caches: Iterable[Any], blocks: int, ids: list[int]) -> None:
    """Zero some blocks of all caches.

    Args:
        caches: Tensors, or lists of them. Blocks are the first dimension, or the second if keys and values are the
            first; a kernel may divide each block into several.
        blocks: Number of blocks.
        ids: Blocks to zero.
    """
    for cache in caches:
        if not isinstance(cache, torch.Tensor):
            zero_blocks(cache, blocks, ids)
            continue
        at = next((at for at, size in enumerate(cache.shape) if size >= blocks and size % blocks == 0), None)
        if at is None:
            continue  # not made of blocks
        parts = cache.shape[at] // blocks
        index = torch.tensor([block * parts + part for block in ids for part in range(parts)], device=cache.device)
        plain = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        plain.index_fill_(at, index, 0)


# In the scheduler ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Failures:
    """The requests and cache blocks of one scheduler in which NaN was found."""

    ending: Mapping[str, int] = field(default_factory=dict)
    """Failure codes of the step whose output is being processed, by request."""
    unclean: set[int] = field(default_factory=set)
    """Blocks to zero in the next step."""
    discarded: deque[set[str]] = field(default_factory=lambda: deque([set()], maxlen=_STEPS_UNDER_WAY))
    """Requests whose blocks were recorded, by step. Steps under way may compute them once more."""
    spoilt: set[str] = field(default_factory=set)
    """Requests that gave NaN during prefill; the step that draws their first token ends them."""
    suspicious: bool = False
    """True once the current weights or adapters gave NaN: the cache of any request that ends early may hold NaN too."""

    def may_hold_nan(self, request: Any) -> bool:
        from vllm.v1.request import RequestStatus

        if self.ending.get(request.request_id) == NOT_FINITE or request.request_id in self.spoilt:
            return True
        whole = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self.suspicious and request.status not in whole

    def discard(self, manager: Any, request_id: str) -> None:
        """Record a request's blocks before they are freed; requests that share a block keep it valid or clear it."""
        self.spoilt.discard(request_id)
        blocks = [block for group in manager.get_blocks(request_id).blocks for block in group if not block.is_null]
        if blocks:
            self.discarded[-1].add(request_id)
            self.unclean.update(block.block_id for block in blocks if block.ref_cnt == 1)
            manager.evict_blocks({block.block_id for block in blocks})

    def discard_free(self, manager: Any) -> None:
        """Record all free blocks, because a request was freed before its NaN became known."""
        free = {block.block_id for block in manager.block_pool.blocks if block.ref_cnt == 0 and not block.is_null}
        self.unclean |= free
        manager.evict_blocks(free)


def trust(scheduler: Any) -> None:
    """Expect no more NaN, as other weights are served."""
    _of(scheduler).suspicious = False


def register() -> None:
    """Install the hooks in vLLM's scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    Scheduler.schedule = _schedule(Scheduler.schedule)
    Scheduler.update_from_output = _update(Scheduler.update_from_output)
    Scheduler._update_request_with_output = _update_request(Scheduler._update_request_with_output)
    Scheduler._free_request_blocks = _free(Scheduler._free_request_blocks)


def _of(scheduler: Any) -> _Failures:
    found: _Failures | None = scheduler.__dict__.get(_STATE)
    if found is None:
        found = scheduler.__dict__[_STATE] = _Failures()
    return found


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def schedule(scheduler: Any, *arguments: Any, **named: Any) -> Any:
        scheduled, state = original(scheduler, *arguments, **named), _of(scheduler)
        if state.unclean and scheduled.total_num_scheduled_tokens:
            setattr(scheduled, _UNCLEAN, sorted(state.unclean))
            state.unclean.clear()
        return scheduled

    return schedule


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        state, failures = _of(scheduler), _failures_in(output)
        state.discarded.append(set())
        if not failures:
            return original(scheduler, scheduled, output)
        output.num_nans_in_logits = None
        nan = {request_id for request_id, failure in failures.items() if failure == NOT_FINITE}
        state.suspicious = state.suspicious or bool(nan)
        state.ending = failures
        try:
            return original(scheduler, scheduled, output)
        finally:
            state.ending = {}
            manager = scheduler.kv_cache_manager
            alive = {request_id for request_id in nan if any(map(len, manager.get_blocks(request_id).blocks))}
            state.spoilt |= alive
            if not nan <= alive.union(*state.discarded):
                state.discard_free(manager)

    return update_from_output


def _failures_in(output: Any) -> dict[str, int]:
    """Return failure codes of a step: those recorded by :func:`tell`, and pooled vectors with NaN."""
    failures = {name: count for name, count in (output.num_nans_in_logits or {}).items() if count < 0}
    for request_id, vector in zip(output.req_ids, output.pooler_output or (), strict=False):
        if isinstance(vector, torch.Tensor) and not bool(vector.isfinite().all()):
            failures[request_id] = NOT_FINITE
    return failures


def _update_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_request_with_output(scheduler: Any, request: Any, ids: list[int], *more: Any, **newer: Any) -> Any:
        failure = _of(scheduler).ending.get(request.request_id)
        if failure is None:
            return original(scheduler, request, ids, *more, **newer)
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_ABORTED
        request.stop_reason = failure  # not a token id: the backend maps it to an error
        return [], True

    return update_request_with_output


def _free(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def free_request_blocks(scheduler: Any, request: Any) -> Any:
        state = _of(scheduler)
        if state.may_hold_nan(request):
            state.discard(scheduler.kv_cache_manager, request.request_id)
        return original(scheduler, request)

    return free_request_blocks
