# pyright: reportMissingImports=false
"""Draws as :class:`~drivetrain.sampling.SamplingParams` says where vLLM's own sampler does otherwise.

A request that vLLM draws exactly right (temperature, one of top-k, top-p and min-p, raw logprobs) carries nothing
extra, and a batch of such requests goes vLLM's own way. Any other request carries how to draw it under
:data:`~drivetrain_vllm.translate.KEY`, and neutral params for vLLM; a batch that holds one is drawn by
:mod:`drivetrain_sampling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import torch

from drivetrain.sampling import LogprobsMode, SamplingParams
from drivetrain_sampling import Row, Sampler
from drivetrain_sampling.carried import row_of
from drivetrain_vllm.translate import KEY

_STATE: Final = "_drivetrain_sampling"


@dataclass(slots=True)
class _Step:
    """What is being sampled."""

    lengths: list[int]
    """Tokens that each row has with this step's, prompt included."""
    raw: torch.Tensor | None
    """The model's logits, where a grammar is about to mask them."""


class _State:
    """The rows of one model runner."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._sampler: Sampler | None = None
        self._made_for: tuple[object, ...] = ()
        self.step: _Step | None = None

    def rows(self, runner: Any, lengths: list[int]) -> list[Row]:
        """One for each request of the batch, with the tokens that it has before this step's."""
        ids = list(runner.input_batch.req_ids)
        rows = {request_id: self._rows.get(request_id) or _make_row(runner.requests[request_id]) for request_id in ids}
        self._rows = {**{name: row for name, row in self._rows.items() if name in runner.requests}, **rows}
        for row, length in zip(rows.values(), lengths, strict=True):
            # A request that lost its place may have lost its last token as well.
            del row.generated[max(length - len(row.prompt_token_ids), 0) :]
        return list(rows.values())

    def sampler(self, rows: list[Row], device: torch.device) -> Sampler:
        """The params of all rows as tensors; made anew when the batch is another than that of the last step."""
        key = tuple((id(row), len(row.generated)) for row in rows)
        if self._sampler is None or key != self._made_for:
            self._sampler = Sampler(rows, device)
        return self._sampler

    def took(self, rows: list[Row], token_ids: list[int], lengths: list[int]) -> None:
        """Note what was drawn, but for prompts that are not yet through."""
        for row, token_id, length in zip(rows, token_ids, lengths, strict=True):
            if length == len(row.prompt_token_ids) + len(row.generated):
                row.generated.append(token_id)
            else:
                self._sampler = None
        self._made_for = tuple((id(row), len(row.generated)) for row in rows)


def _own(params: Any) -> str | None:
    return (params.extra_args or {}).get(KEY) if params is not None else None


def _is_ours(runner: Any) -> bool:
    return any(_own(runner.requests[request_id].sampling_params) for request_id in runner.input_batch.req_ids)


def _make_row(request: Any) -> Row:
    native = request.sampling_params
    prompt, generated = list(request.prompt_token_ids), list(request.output_token_ids)
    stops = sorted(native.stop_token_ids or ())
    own = _own(native)
    if own is not None:
        return row_of(own, prompt, stops, generated)
    greedy = native.temperature == 0
    params = SamplingParams(
        temperature=native.temperature,
        top_k=0 if greedy else max(native.top_k, 0),
        top_p=native.top_p,
        min_p=native.min_p,
        logprobs=0 if native.logprobs is not None else None,
    )
    # Its id is random, and the same on every rank.
    seed = int.from_bytes(hashlib.blake2b(request.req_id.encode(), digest_size=8).digest()) >> 1
    return Row(params, LogprobsMode.RAW, prompt, stops, seed, generated)


def register() -> None:
    """Put the sampler into vLLM's model runner."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.sample_tokens = _sample_tokens(GPUModelRunner.sample_tokens)
    GPUModelRunner._sample = _sample(GPUModelRunner._sample)


def _sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        pending = runner.execute_model_state
        if pending is None or not _is_ours(runner):
            return original(runner, grammar_output)
        state: _State = runner.__dict__.setdefault(_STATE, _State())
        batch = runner.input_batch
        scheduled = pending.scheduler_output.num_scheduled_tokens
        lengths = [
            int(batch.num_computed_tokens_cpu[index]) + scheduled[request_id]
            for index, request_id in enumerate(batch.req_ids)
        ]
        state.step = _Step(lengths, pending.logits.clone() if grammar_output is not None else None)
        try:
            return original(runner, grammar_output)
        finally:
            state.step = None

    return sample_tokens


def _sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sample(runner: Any, logits: torch.Tensor, *more: Any, **newer: Any) -> Any:
        state: _State | None = runner.__dict__.get(_STATE)
        step = state.step if state is not None else None
        if state is None or step is None:
            return original(runner, logits, *more, **newer)
        from vllm.v1.outputs import SamplerOutput
        from vllm.v1.sample.sampler import Sampler as Native

        rows = state.rows(runner, step.lengths)
        sampler = state.sampler(rows, logits.device)
        choice = sampler.choose(logits, step.raw)
        logprobs = None
        wanted = runner.input_batch.sampling_metadata.max_num_logprobs
        if wanted is not None:
            logprobs = Native.gather_logprobs(sampler.logprobs(choice), wanted, choice.token_ids)
        state.took(rows, choice.token_ids.tolist(), step.lengths)
        return SamplerOutput(choice.token_ids.to(torch.int32).unsqueeze(-1), logprobs)

    return sample
