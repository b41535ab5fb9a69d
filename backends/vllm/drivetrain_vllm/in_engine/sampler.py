# pyright: reportMissingImports=false
"""Sampling by :class:`~drivetrain.types.sampling.SamplingParams` where vLLM's own sampler differs.

Requests that vLLM samples exactly right (temperature, one of top-k, top-p and min-p, raw logprobs) carry nothing extra,
and a batch of only such requests uses vLLM's sampler. Any other request carries its sampling parameters under
:data:`~drivetrain_vllm.translate.KEY`, and neutral ones for vLLM; a batch that holds one is sampled by
:mod:`drivetrain_sampling`.

vLLM has two model runners, either of which may serve a model. State of requests comes from the scheduler's output,
which is the same for both; sampling is hooked in each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch

from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sampling import Choice, Row, Sampler, drawable
from drivetrain_sampling.encoded_params import row_of
from drivetrain_vllm.in_engine.failed_requests import clean, tell
from drivetrain_vllm.in_engine.sampling_masks import attach
from drivetrain_vllm.translate import KEY, SECOND_RUNNER, STOPS

_STATE: Final = "_drivetrain_sampling"
_DRAWN: Final = "_drivetrain_drawn"


@dataclass(slots=True)
class _Request:
    """State of one request, from the scheduler's output."""

    request_id: str
    params: Any
    prompt_token_ids: list[int]
    known: list[int]
    """Output tokens that it had when it was first scheduled, or resumed."""
    row: Row | None = None

    @property
    def own(self) -> str | None:
        """Encoded sampling parameters; None if vLLM's sampler is right for the request."""
        return (self.params.extra_args or {}).get(KEY)

    def make_row(self) -> Row:
        """Return the request as a row for the sampler."""
        native, prompt, generated = self.params, self.prompt_token_ids, list(self.known)
        stops = sorted(native.stop_token_ids or ())
        if self.own is not None:
            return row_of(self.own, prompt, stops, generated)
        greedy = native.temperature == 0
        params = SamplingParams(
            temperature=native.temperature,
            top_k=0 if greedy else max(native.top_k, 0),
            top_p=native.top_p,
            min_p=native.min_p,
            logprobs=0 if native.logprobs is not None else None,
        )
        # The request id is random, and the same on every rank.
        seed = int.from_bytes(hashlib.blake2b(self.request_id.encode(), digest_size=8).digest()) >> 1
        return Row(params, LogprobsMode.RAW, prompt, stops, seed, generated)


@dataclass(slots=True)
class Requests:
    """The requests of one model runner."""

    _requests: dict[str, _Request] = field(default_factory=dict)
    _ours: set[str] = field(default_factory=set)
    _sampler: Sampler | None = None
    _made_for: tuple[object, ...] = ()
    lengths: Sequence[int] = ()
    """For the step being sampled: tokens that each request of the batch has computed, this step included."""
    raw: torch.Tensor | None = None
    """The model's logits of this step, kept if a grammar is about to mask them."""
    checked: tuple[list[str], torch.Tensor] | None = None
    """Requests of this step with their largest logits, which are being copied to the host."""
    masks: dict[str, bytes] = field(default_factory=dict)
    """For this step: the ids that each token was drawn from, for the requests that ask for them."""

    def note(self, scheduled: Any) -> None:
        """Update the requests from a scheduler's output."""
        for request_id in scheduled.finished_req_ids:
            self._requests.pop(request_id, None)
            self._ours.discard(request_id)
        for new in scheduled.scheduled_new_reqs:
            if new.sampling_params is not None and new.prompt_token_ids is not None:
                prompt = list(new.prompt_token_ids)
                known = list(new.prefill_token_ids or prompt)[len(prompt) :]
                request = _Request(new.req_id, new.sampling_params, prompt, known)
                self._requests[new.req_id] = request
                if request.own is not None:
                    self._ours.add(new.req_id)
        again = scheduled.scheduled_cached_reqs
        for request_id in again.resumed_req_ids:
            resumed = self._requests.get(request_id)
            if resumed is not None and request_id in again.all_token_ids:
                resumed.known = list(again.all_token_ids[request_id])[len(resumed.prompt_token_ids) :]
                resumed.row = None

    def check(self, request_ids: Sequence[str], top: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a step's ids with zeros where no token can be drawn, since the device continues to compute with them.

        Args:
            request_ids: In the batch's order.
            top: Largest logit of each request.
            token_ids: Shape (requests, 1).
        """
        # Copied before the ids, so that whoever waited for the ids has these, too.
        self.checked = list(request_ids), top.to("cpu", non_blocking=True)
        return torch.where(drawable(top)[:, None], token_ids, 0)

    def take_checked(self) -> tuple[list[str], torch.Tensor] | None:
        """Return the values recorded by :meth:`check`, and forget them."""
        checked, self.checked = self.checked, None
        return checked

    def take_masks(self) -> dict[str, bytes]:
        """Return the step's masks, and forget them."""
        masks, self.masks = self.masks, {}
        return masks

    def are_ours(self, request_ids: Iterable[str]) -> bool:
        """Return whether any of these requests must not be sampled by vLLM."""
        return bool(self._ours) and not self._ours.isdisjoint(request_ids)

    def draw(self, request_ids: Sequence[str], logits: torch.Tensor) -> tuple[Choice, torch.Tensor]:
        """Draw a token for each request; return it with the logprobs of all tokens, in each row's mode.

        Args:
            request_ids: In the batch's order.
            logits: Shape (requests, vocabulary), masked by a grammar where there is one.
        """
        rows = [self._row(request_id, length) for request_id, length in zip(request_ids, self.lengths, strict=True)]
        key = tuple((id(row), len(row.generated)) for row in rows)
        if self._sampler is None or key != self._made_for:
            self._sampler = Sampler(rows, logits.device)
        choice = self._sampler.choose(logits, self.raw)
        logprobs = self._sampler.logprobs(choice)
        self.masks = {request_ids[row]: mask for row, mask in self._sampler.masks(choice).items()}
        all_drew = True
        for row, token_id, length in zip(rows, choice.token_ids.tolist(), self.lengths, strict=True):
            if length == len(row.prompt_token_ids) + len(row.generated):
                row.generated.append(token_id)
            else:
                all_drew = False  # still in prefill
        self._made_for = tuple((id(row), len(row.generated)) for row in rows)
        if not all_drew:
            self._sampler = None
        return choice, logprobs

    def _row(self, request_id: str, length: int) -> Row:
        request = self._requests[request_id]
        row = request.row
        if row is None:
            row = request.row = request.make_row()
        if request.own is None:
            # vLLM may have drawn tokens of this row; only their number matters for its next draw.
            had = max(length - len(row.prompt_token_ids), len(request.known))
            if len(row.generated) != had:
                row.generated[:] = [*row.generated[:had], *[0] * (had - len(row.generated))]
        return row


def register() -> None:
    """Hook the sampler into vLLM's model runners."""
    from vllm.sampling_params import SamplingParams as Native
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    Native.all_stop_token_ids = property(_ends_of_a_grammar)
    GPUModelRunner._update_states = _noting(GPUModelRunner._update_states)
    GPUModelRunner.sample_tokens = _telling(_first_sample_tokens(GPUModelRunner.sample_tokens))
    GPUModelRunner._sample = _first_sample(GPUModelRunner._sample)
    if not HAS_TRITON:  # then vLLM has no second runner
        return
    try:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner
        from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
    except ImportError:
        if os.environ.get(SECOND_RUNNER) == "0":
            return
        raise
    SecondModelRunner.add_requests = _noting(SecondModelRunner.add_requests)
    SecondModelRunner.sample_tokens = _telling(SecondModelRunner.sample_tokens)
    StructuredOutputsWorker.apply_grammar_bitmask = _second_mask(StructuredOutputsWorker.apply_grammar_bitmask)
    SecondSampler.__call__ = _second_call(SecondSampler.__call__)
    SecondSampler.sample = _second_sample(SecondSampler.sample)


def _ends_of_a_grammar(params: Any) -> set[int]:
    """Return ids allowed only once a grammar is complete; newer releases would include a request's own stops."""
    ends: set[int] = params._all_stop_token_ids
    return ends - set((params.extra_args or {}).get(STOPS, ()))


def settle(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's largest logit; rows that failed get zeros, as sampling kernels cannot handle NaN."""
    top = logits.amax(-1)
    logits.masked_fill_(~drawable(top)[:, None], 0.0)
    return top


def _requests_of(holder: Any) -> Requests | None:
    requests: Requests | None = holder.__dict__.get(_STATE)
    return requests


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def noting(runner: Any, scheduler_output: Any) -> Any:
        requests = _requests_of(runner)
        if requests is None:
            requests = runner.__dict__[_STATE] = Requests()
            for part in ("sampler", "structured_outputs_worker"):
                if getattr(runner, part, None) is not None:
                    getattr(runner, part).__dict__[_STATE] = requests
        requests.note(scheduler_output)
        clean(runner, scheduler_output)
        return original(runner, scheduler_output)

    return noting


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Report failed requests and sampling masks in a step's output, as soon as it has arrived."""

    @wraps(original)
    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        requests = _requests_of(runner)
        if requests is None:
            return original(runner, grammar_output)
        requests.take_checked()  # left over from a warm-up run
        output, checked, masks = original(runner, grammar_output), requests.take_checked(), requests.take_masks()
        if checked is None:
            return output
        request_ids, top = checked

        def add(output: Any) -> None:
            tell(output, request_ids, top)
            if masks:
                attach(output, masks)

        if not hasattr(output, "get_output"):
            add(output)
            return output
        arrived: Callable[[], Any] = output.get_output

        def get_output() -> Any:
            told = arrived()
            add(told)
            return told

        output.get_output = get_output
        return output

    return sample_tokens


# The first model runner ---------------------------------------------------------------------------------------------


def _first_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        pending, requests, batch = runner.execute_model_state, _requests_of(runner), runner.input_batch
        if pending is None or requests is None or not requests.are_ours(batch.req_ids):
            return original(runner, grammar_output)
        scheduled = pending.scheduler_output.num_scheduled_tokens
        requests.lengths = [
            int(batch.num_computed_tokens_cpu[index]) + scheduled[request_id]
            for index, request_id in enumerate(batch.req_ids)
        ]
        requests.raw = pending.logits.clone() if grammar_output is not None else None
        try:
            return original(runner, grammar_output)
        finally:
            requests.raw = None

    return sample_tokens


def _first_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample(runner: Any, logits: torch.Tensor, *more: Any, **newer: Any) -> Any:
        requests, ids = _requests_of(runner), list(runner.input_batch.req_ids)
        if requests is None or logits is None:
            return original(runner, logits, *more, **newer)
        if not requests.are_ours(ids):
            if len(logits) != len(ids):  # with speculative drafts there are more rows
                return original(runner, logits, *more, **newer)
            top = settle(logits)
            drawn = original(runner, logits, *more, **newer)
            drawn.sampled_token_ids = requests.check(ids, top, drawn.sampled_token_ids)
            return drawn
        from vllm.v1.outputs import SamplerOutput
        from vllm.v1.sample.sampler import Sampler as Native

        choice, logprobs = requests.draw(ids, logits)
        wanted = runner.input_batch.sampling_metadata.max_num_logprobs
        gathered = None if wanted is None else Native.gather_logprobs(logprobs, wanted, choice.token_ids)
        token_ids = choice.token_ids.to(torch.int32).unsqueeze(-1)
        return SamplerOutput(requests.check(ids, choice.top, token_ids), gathered)

    return sample


# The second model runner --------------------------------------------------------------------------------------------


def _second_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply_grammar_bitmask(worker: Any, logits: torch.Tensor, input_batch: Any, *more: Any, **newer: Any) -> Any:
        requests = _requests_of(worker)
        if requests is not None and requests.are_ours(input_batch.req_ids):
            requests.raw = logits.clone()
        return original(worker, logits, input_batch, *more, **newer)

    return apply_grammar_bitmask


def _second_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(sampler: Any, logits: torch.Tensor, input_batch: Any, *more: Any, **newer: Any) -> Any:
        requests, ids = _requests_of(sampler), list(input_batch.req_ids)
        if requests is None:
            return original(sampler, logits, input_batch, *more, **newer)
        if not requests.are_ours(ids):
            if len(logits) != len(ids):
                return original(sampler, logits, input_batch, *more, **newer)
            top = settle(logits)
            drawn = original(sampler, logits, input_batch, *more, **newer)
            drawn.sampled_token_ids = requests.check(ids, top, drawn.sampled_token_ids)
            return drawn
        requests.lengths = (input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens).tolist()
        try:
            choice, logprobs = requests.draw(ids, logits)
        finally:
            requests.raw = None
        # It computes logprobs as the log-softmax of its input, which leaves logprobs unchanged.
        sampler.__dict__[_DRAWN] = choice.token_ids, logprobs
        try:
            drawn = original(sampler, logprobs, input_batch, *more, **newer)
        finally:
            del sampler.__dict__[_DRAWN]
        drawn.sampled_token_ids = requests.check(ids, choice.top, drawn.sampled_token_ids)
        return drawn

    return call


def _second_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample(sampler: Any, *arguments: Any, **named: Any) -> Any:
        drawn = sampler.__dict__.get(_DRAWN)
        return drawn if drawn is not None else original(sampler, *arguments, **named)

    return sample
