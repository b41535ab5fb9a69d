"""Sampling masks of another token, of another distribution, or lost on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, deltas_mutant, params_mutant, result_mutant

_Deltas = AsyncGenerator[TokenDelta, None]


@result_mutant("sampling_mask/a_mask_holds_what_top_k_leaves", says=("is not among the", "ids that could"))
def shifts_masks(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Each mask belongs to the token before."""
    mask = result.sampling_mask
    return dataclasses.replace(result, sampling_mask=mask and mask[:1] + mask[:-1])


@result_mutant("sampling_mask/a_mask_holds_what_top_p_leaves", says="ids that could not be drawn")
def gives_masks_of_the_unprocessed_logits(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """A mask holds the whole vocabulary, as the model's own logits leave it."""
    mask = result.sampling_mask
    if mask is None:
        return result
    whole = SamplingMask.of(mask.vocab_size, [range(mask.vocab_size)] * len(mask))
    return dataclasses.replace(result, sampling_mask=whole)


@result_mutant("sampling_mask/unrestricted_sampling_says_so", says="ids were left")
def drops_the_last_id_of_a_mask(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The vocabulary's last id is never in a mask."""
    mask = result.sampling_mask
    if mask is None:
        return result
    last = mask.vocab_size - 1
    positions = [[one for one in mask.ids(at) if one != last] for at in range(len(mask))]
    return dataclasses.replace(result, sampling_mask=SamplingMask.of(mask.vocab_size, positions))


@mutant("sampling_mask/a_mask_holds_what_min_p_leaves", says="ids that could not be drawn")
class forgets_min_p_in_masks(CorrectBackend):
    """The first token's mask is that of a request without min_p."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result, params = await super().generate(request), request.params
        if result.sampling_mask is None or params.min_p == 0:
            return result
        name, without = f"{request.request_id}-without", params.model_copy(update={"min_p": 0.0})
        other = await super().generate(dataclasses.replace(request, request_id=name, params=without))
        assert other.sampling_mask is not None
        return dataclasses.replace(result, sampling_mask=other.sampling_mask[:1] + result.sampling_mask[1:])


@params_mutant("sampling_mask/a_mask_holds_what_top_p_leaves", says="ids that could be drawn")
def sums_probabilities_coarsely(request: GenerateRequest) -> Mapping[str, object]:
    """A wide nucleus is half a percent too narrow, as a sum of probabilities in bfloat16 makes it."""
    top_p = request.params.top_p
    return {"top_p": top_p * 0.995} if 0.9 < top_p < 1 else {}


@deltas_mutant("sampling_mask/streamed_masks_are_the_whole_one", says="came without its sampling mask")
async def streams_without_masks(deltas: _Deltas) -> _Deltas:
    """While a stream runs, its tokens come without masks; the completion has them."""
    async for delta in deltas:
        yield dataclasses.replace(delta, sampling_mask=None)


@deltas_mutant("sampling_mask/streamed_masks_are_the_whole_one", says="the chunks' masks are")
async def streams_masks_of_the_token_before(deltas: _Deltas) -> _Deltas:
    """While a stream runs, each mask is that of the previous step."""
    before: SamplingMask | None = None
    async for delta in deltas:
        late, before = before or delta.sampling_mask, delta.sampling_mask
        yield dataclasses.replace(delta, sampling_mask=delta.sampling_mask and late)
