# pyright: reportMissingImports=false
"""Ends requests whose logits allow no token, without affecting the other requests of the batch.

The sampler marks failed rows on the device. SGLang's copy of a step's results brings the marks along, and the scheduler
reads them before it takes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from drivetrain_sampling import NO_TOKEN, failures_of
from drivetrain_sglang.translate import RowFailure

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_FAILURES: Final = "_drivetrain_failures"
"""Attribute of a step's ``LogitsProcessorOutput``: one number per row, as returned by :func:`failures_of`."""
_CHUNK_FAILED: Final = "_drivetrain_chunk_failed"
"""Attribute of a request that failed in a chunk of its prompt before the last."""
_RESULT: Final = "sglang.srt.managers.utils.GenerationBatchResult"


def register() -> None:
    """Have the marks copied to the host with the tokens."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RESULT}.copy_to_cpu", _copy, HookType.AROUND)


def note(logits_output: Any, top: torch.Tensor) -> torch.Tensor:
    """Mark the failed rows of a step, given each row's largest logit after masks; return True for those rows."""
    failures = failures_of(top)
    setattr(logits_output, _FAILURES, failures)
    return failures != 0


def _copy(original: Callable[..., Any], result: Any, *arguments: object, **named: object) -> Any:
    from sglang.srt.managers import utils

    failures: torch.Tensor | None = getattr(result.logits_output, _FAILURES, None)
    if failures is not None:
        setattr(result.logits_output, _FAILURES, utils._async_d2h(failures))
    return original(result, *arguments, **named)


def end_failed(batch: Any, result: Any) -> list[Req]:
    """Make SGLang end each request whose row failed, when it takes the step's results.

    Returns:
        The requests that end; the cache that they wrote must not be reused.
    """
    failures: torch.Tensor | None = getattr(getattr(result, "logits_output", None), _FAILURES, None)
    if failures is None:
        return []
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    rows: list[int] = failures.tolist()
    ended: list[Req] = []
    for req, failure in zip(batch.reqs, rows, strict=False):
        if req.finished() or req.is_retracted:
            continue
        if req.inflight_middle_chunks > 0:
            if failure:
                setattr(req, _CHUNK_FAILED, failure)
            continue
        in_chunk: int = getattr(req, _CHUNK_FAILED, 0)
        if failure or in_chunk:
            _end(req, failure or in_chunk, is_cached=bool(in_chunk))
            ended.append(req)
    return ended


def _end(req: Req, failure: int, *, is_cached: bool) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    # The placeholder for the failed token is appended after these.
    said = RowFailure(failure == NO_TOKEN, len(req.output_ids), is_cached)
    req.to_finish = FINISH_ABORT(said.message())
    req.skip_radix_cache_insert = True
    if req.grammar is not None:
        # A step that was already launched may use the grammar, too.
        req.grammar.finished = True
        req.grammar = None
