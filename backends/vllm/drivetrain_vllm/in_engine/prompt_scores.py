# pyright: reportMissingImports=false
"""Scores given sequences from the states that vLLM computes of their tokens.

vLLM has two model runners: the first for CPUs and some models, the second for GPUs from 0.26 on. Each keeps the states
of all tokens of a step. Those of the positions that are scored are given to the model's head once more, part by part,
and their scores leave as tensors through vLLM's own field for prompt logprobs. If a request asks vLLM for prompt
logprobs too, the scores are further columns of their tensors, which are split off before vLLM reads these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch

from drivetrain_sampling.scores import LOGITS_AT_ONCE, ScoredPrompt
from drivetrain_vllm.translate import SCORES, SCORING

_STATE: Final = "_drivetrain_scored_prompts"


@dataclass(slots=True)
class ScoredPrompts:
    """The requests of one model runner that ask for scores, until these are complete."""

    waiting: dict[str, ScoredPrompt] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    """Encoded ``Scoring`` by request, until the first step of its prompt; the second runner alone uses it."""
    with_logprobs: set[str] = field(default_factory=set)
    """Requests that also ask vLLM for prompt logprobs; the second runner alone uses it."""
    vocabulary: int = 0
    """Number of logits of a position, for the second runner; 0: not known yet."""

    def note(self, scheduled: Any, device: torch.device) -> None:
        """Update the requests from a scheduler's output."""
        for request_id in scheduled.finished_req_ids:
            self.waiting.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if SCORING in extra and new.prompt_token_ids is not None:
                prompt = ScoredPrompt(extra[SCORING], list(new.prompt_token_ids), device)
                if not prompt.is_complete:
                    self.waiting[new.req_id] = prompt

    def score(
        self, request_id: str, token: int, states: torch.Tensor, head: Callable[[torch.Tensor], Any], vocabulary: int
    ) -> Any:
        """Score a part of a prompt; return the scores as vLLM's ``LogprobsTensors`` with the last.

        Args:
            request_id: A request of :attr:`waiting`.
            token: Place in the prompt of the first token of this step.
            states: States of the request's tokens of this step.
            head: Computes logits of states, as the model does.
            vocabulary: Number of logits of a position.
        """
        prompt = self.waiting[request_id]
        wanted, step = prompt.wanted(token, len(states)), max(1, LOGITS_AT_ONCE // vocabulary)
        for start in wanted[::step]:
            end = min(start + step, wanted.stop)
            part = prompt.part(start, head(states[start - token : end - token]))
            assert part is not None, "these positions are wanted"
            prompt.add(part)
        if not prompt.is_complete or token + len(states) < prompt.length:
            return None  # vLLM takes no results of a prompt before its last token
        del self.waiting[request_id]
        from vllm.v1.outputs import LogprobsTensors

        ranks = torch.zeros(len(prompt.given), dtype=torch.int32)
        return LogprobsTensors(prompt.top_ids.cpu(), torch.cat([prompt.given, prompt.top], dim=1).cpu(), ranks)


def register() -> None:
    """Hook both model runners, and the end of the way of their results."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if worker := _second_runners_worker():
        worker.add_request = _noting_one(worker.add_request)
        worker.remove_request = _dropping(worker.remove_request)
        worker.compute_prompt_logprobs = _scoring_rows(worker.compute_prompt_logprobs)

    GPUModelRunner._update_states = _noting(GPUModelRunner._update_states)
    GPUModelRunner._get_prompt_logprobs_dict = _scoring(GPUModelRunner._get_prompt_logprobs_dict)
    LogprobsProcessor._update_prompt_logprobs = _keeping(LogprobsProcessor._update_prompt_logprobs)


def _second_runners_worker() -> Any:
    """Return the class that computes prompt logprobs in the second model runner; None if this vLLM has none."""
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        return PromptLogprobsWorker
    return None


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_states(runner: Any, scheduler_output: Any) -> Any:
        scored: ScoredPrompts = runner.__dict__.setdefault(_STATE, ScoredPrompts())
        scored.note(scheduler_output, runner.device)
        return original(runner, scheduler_output)

    return update_states


def _scoring(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_prompt_logprobs_dict(runner: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> Any:
        found = original(runner, hidden_states, scheduled)
        scored: ScoredPrompts | None = runner.__dict__.get(_STATE)
        for request_id in list(scored.waiting if scored is not None else ()):
            count = scheduled.get(request_id)
            if scored is None or count is None:
                continue
            row = runner.input_batch.req_id_to_index[request_id]
            start = int(runner.query_start_loc.np[row])
            token = int(runner.requests[request_id].num_computed_tokens)
            states, vocabulary = hidden_states[start : start + count], runner.model_config.get_vocab_size()
            scores = scored.score(request_id, token, states, runner.model.compute_logits, vocabulary)
            if scores is not None:
                found = _with_scores(found, request_id, scores)
        return found

    return get_prompt_logprobs_dict


def _with_scores(found: dict[str, Any], request_id: str, scores: Any) -> dict[str, Any]:
    """Add a request's scores to vLLM's results of a step, beside its prompt logprobs if it asked for these."""
    own = found.get(request_id)
    return {**found, request_id: scores if own is None else _beside(own, scores)}


def _beside(own: Any, scores: Any) -> Any:
    """Return prompt logprobs with scores in further columns of the last rows."""
    columns = []
    for mine, added in ((own.logprob_token_ids, scores.logprob_token_ids), (own.logprobs, scores.logprobs)):
        rows = mine.new_zeros(len(mine), added.shape[1])
        rows[len(mine) - len(added) :] = added
        columns.append(torch.cat([mine, rows], dim=1))
    return own._replace(logprob_token_ids=columns[0], logprobs=columns[1])


def _noting_one(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_request(worker: Any, req_id: str, req_idx: int, sampling_params: Any) -> Any:
        extra = getattr(sampling_params, "extra_args", None) or {}
        if SCORING in extra:
            scored: ScoredPrompts = worker.__dict__.setdefault(_STATE, ScoredPrompts())
            scored.asked[req_id] = extra[SCORING]
            if sampling_params.prompt_logprobs is not None:
                scored.with_logprobs.add(req_id)
        return original(worker, req_id, req_idx, sampling_params)

    return add_request


def _dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def remove_request(worker: Any, req_id: str) -> Any:
        scored: ScoredPrompts | None = worker.__dict__.get(_STATE)
        if scored is not None:
            scored.asked.pop(req_id, None)
            scored.with_logprobs.discard(req_id)
            scored.waiting.pop(req_id, None)
        return original(worker, req_id)

    return remove_request


def _scoring_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def compute_prompt_logprobs(
        worker: Any, logits_fn: Any, hidden_states: Any, batch: Any, all_token_ids: Any, computed: Any, lengths: Any
    ) -> Any:
        found = original(worker, logits_fn, hidden_states, batch, all_token_ids, computed, lengths)
        scored: ScoredPrompts | None = worker.__dict__.get(_STATE)
        if scored is None or not (scored.asked or scored.waiting):
            return found
        scored.vocabulary = scored.vocabulary or logits_fn(hidden_states[:1]).shape[-1]
        for row, request_id in enumerate(batch.req_ids):
            place = batch.idx_mapping_np[row]
            if request_id in scored.asked:
                tokens = all_token_ids[place, : lengths[place]].tolist()
                prompt = ScoredPrompt(scored.asked.pop(request_id), tokens, hidden_states.device)
                if not prompt.is_complete:
                    scored.waiting[request_id] = prompt
            if request_id in scored.waiting:
                states = hidden_states[batch.query_start_loc_np[row] : batch.query_start_loc_np[row + 1]]
                token = int(batch.num_computed_prefill_tokens_np[row])
                scores = scored.score(request_id, token, states, logits_fn, scored.vocabulary)
                # A preempted request reads its prompt again. vLLM does not repeat prompt logprobs then, nor may scores,
                # which came beside them, come in their place.
                if scores is not None and (request_id in found or request_id not in scored.with_logprobs):
                    found = _with_scores(found, request_id, scores)
        return found

    return compute_prompt_logprobs


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep scores as tensors: in place of prompt logprobs, or as their attribute if the request asked for both."""

    @wraps(original)
    def update_prompt_logprobs(processor: Any, tensors: Any) -> None:
        if processor.num_prompt_logprobs is None:
            processor.prompt_logprobs = tensors
            return
        ids, logprobs, own = tensors.logprob_token_ids, tensors.logprobs, processor.num_prompt_logprobs + 1
        if not 0 < own < logprobs.shape[1]:
            original(processor, tensors)
            return
        original(processor, tensors._replace(logprob_token_ids=ids[:, :own], logprobs=logprobs[:, :own]))
        setattr(processor.prompt_logprobs, SCORES, (ids[:, own:], logprobs[:, own:]))

    return update_prompt_logprobs
