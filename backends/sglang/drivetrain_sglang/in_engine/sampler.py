# pyright: reportMissingImports=false
"""Sampling by :class:`~drivetrain.types.sampling.SamplingParams` where SGLang's own sampler differs.

Requests that SGLang samples exactly right (temperature, one of top-k, top-p and min-p, logprobs after temperature)
carry nothing extra, and a batch of only such requests uses SGLang's sampler. Any other request carries its sampling
parameters under :data:`~drivetrain_sglang.translate.KEY`, and neutral ones for SGLang; a batch that holds one is
sampled by :mod:`drivetrain_sampling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sampling import Row
from drivetrain_sampling import Sampler as RowSampler
from drivetrain_sampling.encoded_params import row_of
from drivetrain_sampling.packed_masks import Packing
from drivetrain_sglang.in_engine.failed_requests import note
from drivetrain_sglang.translate import KEY, MASK

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_BATCH: Final = "_drivetrain_batch"
_ROW: Final = "_drivetrain_row"
_INFO: Final = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_TOP_K_ALL: Final = 1 << 30


class Batch:
    """The requests of a ``SamplingBatchInfo``, in its order."""

    def __init__(self, reqs: Sequence[Req]) -> None:
        self.reqs = list(reqs)
        self.is_ours = any(_own(req) is not None for req in reqs)
        """True if any request must not be sampled by SGLang."""
        self.raw: torch.Tensor | None = None
        """The model's logits, kept if a grammar is about to mask them."""
        self._sampler: RowSampler | None = None

    def sampler(self, device: torch.device) -> RowSampler:
        """Return the sampler with the parameters of all rows; made once."""
        if self._sampler is None:
            self._sampler = RowSampler([_row(req) for req in self.reqs], device)
        return self._sampler

    def take(self, token_ids: list[int]) -> None:
        """Record the sampled tokens: SGLang itself may learn of them a step later."""
        for req, token_id in zip(self.reqs, token_ids, strict=True):
            _row(req).generated.append(token_id)


class _Masks:
    """A step's masks by row of the batch, packed when SGLang reads the first: it has queued the next step by then."""

    def __init__(self, packing: Packing, rows: Sequence[int]) -> None:
        self._packing = packing
        self._places = {row: place for place, row in enumerate(rows)}

    def __getitem__(self, row: int) -> bytes | None:
        place = self._places.get(row)
        return None if place is None else self._packing.rows()[place]


def requests_of(info: Any) -> Sequence[Req]:
    """Return the requests of a ``SamplingBatchInfo``, in its order; none if it is unknown."""
    batch: Batch | None = getattr(info, _BATCH, None)
    return () if batch is None else batch.reqs


def _own(req: Req) -> str | None:
    params = req.sampling_params.custom_params
    return params.get(KEY) if params else None


def _row(req: Req) -> Row:
    row: Row | None = getattr(req, _ROW, None)
    if row is None:
        row = _make_row(req)
        setattr(req, _ROW, row)
    return row


def _make_row(req: Req) -> Row:
    native = req.sampling_params
    # Unpadded, so that media have their token ids rather than SGLang's keys.
    prompt, generated = list(req.origin_input_ids_unpadded), list(req.output_ids)
    stops = sorted(native.stop_token_ids or ())
    own = _own(req)
    if own is not None:
        return row_of(own, prompt, stops, generated)
    greedy = native.top_k == 1
    params = SamplingParams(
        temperature=0.0 if greedy else native.temperature,
        top_k=0 if greedy or native.top_k == _TOP_K_ALL else native.top_k,
        top_p=native.top_p,
        min_p=native.min_p,
        logprobs=0 if req.return_logprob else None,
    )
    # The request id is random, and the same on every rank.
    seed = int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest()) >> 1
    return Row(params, LogprobsMode.TEMPERATURE, prompt, stops, seed, generated)


def register() -> None:
    """Register the sampler and its hooks in SGLang."""
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    class DrivetrainSampler(Sampler):
        """Samples with SGLang's sampler where it agrees with ``SamplingParams``, and with drivetrain's elsewhere."""

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: torch.Tensor,
            **newer: Any,
        ) -> torch.Tensor:
            batch: Batch | None = getattr(sampling_info, _BATCH, None)
            logits = logits_output.next_token_logits
            if batch is None or not batch.is_ours:
                failed = note(logits_output, logits.amax(-1))
                if not sampling_info.is_all_greedy:
                    # SGLang's sampling kernels read out of bounds, or crash, on a row with NaN.
                    logits.masked_fill_(failed[:, None], 0.0)
                drawn: torch.Tensor = super().forward(
                    logits_output,
                    sampling_info,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    positions,
                    **newer,
                )
                return drawn
            sampler = batch.sampler(logits.device)
            choice = sampler.choose(logits, batch.raw)
            note(logits_output, choice.top)
            batch.raw = None
            kept = sampler.kept(choice)
            if return_logprob:
                self.output_logprob_processor.compute_logprobs(
                    sampler.logprobs(choice), top_logprobs_nums, token_ids_logprobs, choice.token_ids
                ).write_output_to(logits_output)
            self._sync_token_ids_across_tp(choice.token_ids, sampling_info)
            if kept is None:
                batch.take(choice.token_ids.tolist())
                return choice.token_ids
            # A single wait for the GPU brings the tokens and how many ids each was drawn from.
            numbers = torch.cat([choice.token_ids, kept.sum(-1)]).tolist()
            count = len(batch.reqs)
            batch.take(numbers[:count])
            masks = _Masks(Packing(kept, np.array(numbers[count:], dtype=np.int32)), sampler.masked)
            info: dict[str, Any] = logits_output.customized_info or {}
            logits_output.customized_info = {**info, MASK: masks}
            return choice.token_ids

    for backend in ("pytorch", "flashinfer"):
        register_sampler_backend(backend, DrivetrainSampler)
    HookRegistry.register(f"{_INFO}.adjusted_from_schedule_batch", _begin, HookType.AFTER)
    HookRegistry.register(f"{_INFO}.adjusted_filter_batch", _filter, HookType.AFTER)
    HookRegistry.register(f"{_INFO}.adjusted_merge_batch", _merge, HookType.AFTER)
    HookRegistry.register(f"{_INFO}.copy_for_forward", _copy, HookType.AFTER)
    HookRegistry.register(f"{_INFO}.apply_logits_bias", _keep_raw, HookType.AROUND)


def _begin(_: None, info: Any, batch: Any, vocab_size: int) -> None:
    for req in batch.reqs:
        # The row is recomputed from the prompt and all known tokens.
        setattr(req, _ROW, None)
    setattr(info, _BATCH, Batch(batch.reqs))


def _filter(_: None, info: Any, keep_indices: Sequence[int], keep_indices_device: object) -> None:
    batch: Batch = getattr(info, _BATCH)
    setattr(info, _BATCH, Batch([batch.reqs[int(index)] for index in keep_indices]))


def _merge(_: None, info: Any, other: Any) -> None:
    setattr(info, _BATCH, Batch([*getattr(info, _BATCH).reqs, *getattr(other, _BATCH).reqs]))


def _copy(copied: Any, info: Any) -> Any:
    setattr(copied, _BATCH, getattr(info, _BATCH, None))
    return copied


def _keep_raw(original: Callable[..., Any], info: Any, logits: torch.Tensor, *more: Any, **newer: Any) -> Any:
    batch: Batch | None = getattr(info, _BATCH, None)
    if batch is not None and batch.is_ours and _has_grammar(info):
        batch.raw = logits.clone()
    return original(info, logits, *more, **newer)


def _has_grammar(info: Any) -> bool:
    return getattr(info, "grammar_mask", None) is not None or getattr(info, "vocab_mask", None) is not None
