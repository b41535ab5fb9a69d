# pyright: reportMissingImports=false
"""Scores given sequences from the logits that SGLang computes for input logprobs.

Such a request asks SGLang for its input logprobs from the first position on that is scored, so that SGLang computes
the logits of these positions and reuses no cached prefix beyond. They are scored where they are made, part by part, and
returned once all positions are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from drivetrain_sampling.scores import Part, ScoredPrompt
from drivetrain_sglang.in_engine.sampler import requests_of
from drivetrain_sglang.translate import SCORES, SCORING, carries_scores

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_SCORED: Final = "_drivetrain_scored"
"""Attribute of a step's ``LogitsMetadata``, and of its ``LogprobResult``."""
_PROMPT: Final = "_drivetrain_scored_prompt"
"""Attribute of a request."""
_LAYERS: Final = "sglang.srt.layers"
_MANAGERS: Final = "sglang.srt.managers"


@dataclass(frozen=True, slots=True)
class _Row:
    """A request of a step that asks for scores."""

    req: Req
    start: int
    """First of its rows among the states from which logits are computed."""
    token: int
    """Place in the prompt of the token of that row."""
    count: int
    """Number of its rows."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A part of a request's scores."""

    req: Req
    part: Part


def register() -> None:
    """Hook the computation of input logprobs and the way of its results."""
    if not carries_scores():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_LAYERS}.logits_processor.LogitsMetadata.from_forward_batch", _find, HookType.AROUND)
    HookRegistry.register(f"{_LAYERS}.logprob_processor.InputLogprobProcessor.forward", _score, HookType.AROUND)
    HookRegistry.register(f"{_LAYERS}.logprob_processor.LogprobResult.write_input_to", _attach, HookType.AFTER)
    HookRegistry.register(f"{_MANAGERS}.scheduler.Scheduler.process_batch_result", _deliver, HookType.BEFORE)
    streamer = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
    HookRegistry.register(f"{streamer}.is_request_level_customized_info_key", _is_sent_once, HookType.AFTER)


def _scoring_of(req: Req) -> str | None:
    params = req.sampling_params.custom_params
    return params.get(SCORING) if params else None


def _prompt_of(req: Req) -> ScoredPrompt:
    prompt: ScoredPrompt | None = getattr(req, _PROMPT, None)
    if prompt is None:
        scoring = _scoring_of(req)
        assert scoring is not None, "only requests that ask for scores come here"
        prompt = ScoredPrompt(scoring, list(req.origin_input_ids_unpadded))
        setattr(req, _PROMPT, prompt)
    return prompt


# Places of the logits -----------------------------------------------------------------------------------------------


def _find(original: Callable[..., Any], kind: type[Any], forward_batch: Any, *more: Any, **newer: Any) -> Any:
    """Mark on a step's metadata which of its rows to score."""
    metadata = original(kind, forward_batch, *more, **newer)
    reqs = requests_of(getattr(forward_batch, "sampling_info", None))
    if not metadata.extend_return_logprob or not any(_scoring_of(req) for req in reqs):
        return metadata
    rows: list[_Row] = []
    start = 0
    lengths = zip(
        forward_batch.extend_prefix_lens_cpu,
        metadata.extend_seq_lens_cpu,
        metadata.extend_logprob_start_lens_cpu,
        strict=True,
    )
    for req, (prefix, length, skipped) in zip(reqs, lengths, strict=False):
        count = max(int(length) - int(skipped), 1)  # the last token's is there in any case
        if _scoring_of(req):
            rows.append(_Row(req, start, int(prefix) + int(length) - count, count))
        start += count
    setattr(metadata, _SCORED, rows)
    return metadata


def _score(original: Callable[..., Any], processor: Any, *positional: Any, **named: Any) -> Any:
    """Score the logits that SGLang computes, each part when it is there."""
    rows: list[_Row] | None = getattr(named.get("logits_metadata"), _SCORED, None)
    if not rows:
        return original(processor, *positional, **named)
    logits_of, scored, seen = named["get_logits_fn"], list[_Scored](), 0

    def get_logits(states: torch.Tensor, *more: Any, **newer: Any) -> torch.Tensor:
        nonlocal seen
        logits: torch.Tensor = logits_of(states, *more, **newer)
        for row in rows:
            low, high = max(row.start, seen), min(row.start + row.count, seen + len(logits))
            if low < high:
                part = _prompt_of(row.req).part(row.token + low - row.start, logits[low - seen : high - seen])
                if part is not None:
                    # To the host at once: on a GPU this memory may be lent by a graph, which is run again later.
                    scored.append(_Scored(row.req, part.on_host()))
        seen += len(logits)
        return logits

    result, sampled = original(processor, *positional, **{**named, "get_logits_fn": get_logits})
    setattr(result, _SCORED, scored)
    return result, sampled


def _attach(_: None, result: Any, logits_output: Any) -> None:
    """Attach the parts to the attribute in which SGLang keeps a model's additions to a step's results."""
    scored: list[_Scored] | None = getattr(result, _SCORED, None)
    if scored:
        logits_output.customized_info = {**(logits_output.customized_info or {}), SCORES: scored}


# In the scheduler ---------------------------------------------------------------------------------------------------


def _scored_of(result: Any) -> list[_Scored] | None:
    info = getattr(getattr(result, "logits_output", None), "customized_info", None) or {}
    scored: list[_Scored] | None = info.get(SCORES)
    return scored


def _deliver(_: Any, __: Any, result: Any, *more: object, **newer: object) -> None:
    """Give each request its parts, and have SGLang return its scores once they are complete."""
    scored = _scored_of(result)
    if scored is None:
        return
    info = {name: values for name, values in result.logits_output.customized_info.items() if name != SCORES}
    result.logits_output.customized_info = info or None
    for one in scored:
        prompt = _prompt_of(one.req)
        prompt.add(one.part)
        if prompt.is_complete:
            one.req.customized_info = {**(one.req.customized_info or {}), SCORES: [prompt.packed()]}


def _is_sent_once(result: bool, _: Any, key: str) -> bool:
    """Have the scores sent whole, not token by token."""
    return result or key == SCORES
