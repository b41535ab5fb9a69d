"""Sampling masks: they allow the ids that the sampling params leave of an independent forward pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Final

import numpy as np

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    LogprobsMode,
    RegexGrammar,
    SamplingParams,
    TemperatureSchedule,
)
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_conformance.assertions.stop_texts import TOKENS, free_samples, pieces
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, in_time, ordinary_ids
from drivetrain_conformance.harness.time_limits import within
from drivetrain_conformance.references.oracle import log_softmax
from drivetrain_conformance.references.reference_masks import check_mask
from drivetrain_conformance.references.reference_sampling import steps, with_effective_filters

_FILTERS: Final[Mapping[str, tuple[Capability, object, object]]] = {
    "top_k": (Capability.TOP_K, 7, 150),
    "top_p": (Capability.TOP_P, 0.6, 0.97),
    "min_p": (Capability.MIN_P, 0.3, 0.02),
}
"""Fields: the capability of each, a value that leaves few ids, and one that leaves many if the temperature is high."""
_EVERY_FIELD: Final = (
    *(Capability.TOP_K, Capability.TOP_P, Capability.MIN_P, Capability.REPETITION_PENALTY, Capability.LOGIT_BIAS),
    *(Capability.FREQUENCY_PENALTY, Capability.PRESENCE_PENALTY, Capability.LOGIT_PROCESSORS),
    Capability.MIN_NEW_TOKENS,
)


def _asking(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"max_new_tokens": 10, "return_sampling_mask": True, **fields})


async def _generate(bench: Bench, params: SamplingParams | Sequence[SamplingParams], prompts: int) -> list[Completion]:
    asked = list(params) if not isinstance(params, SamplingParams) else params
    return (await bench.engine.generate(bench.prompts(prompts), asked)).completions


def _mask(completion: Completion) -> SamplingMask:
    mask, count = completion.sampling_mask, len(completion.token_ids)
    assert mask is not None, "a completion came without its sampling mask"
    assert len(mask) == count, f"{count} ids came with a sampling mask of {len(mask)}"
    return mask


def _check(bench: Bench, completion: Completion, params: SamplingParams) -> None:
    """Check a completion's mask against the numpy reference, position by position."""
    mask, rows = _mask(completion), bench.output_logits(completion)
    assert not len(mask) or mask.vocab_size == rows.shape[-1]
    stops = (*params.stop_token_ids, *bench.engine.model_info.eos_token_ids)
    for at, step in enumerate(steps(completion, rows, params, bench.tolerance(), stops)):
        check_mask(mask, at, step, completion.token_ids[at], params)


# The sets ------------------------------------------------------------------------------------------------------------


def _make_filter_case(field: str, capability: Capability, few: object, many: object) -> None:
    async def body(bench: Bench) -> None:
        # Coarse sums of probabilities show only where many small ones are left.
        for temperature, value in ((0.8, few), (2.0, many)):
            params = _asking(temperature=temperature, n=2, **{field: value})
            for completion in await _generate(bench, params, 3):
                _check(bench, completion, params)

    body.__name__ = f"a_mask_holds_what_{field}_leaves"
    body.__doc__ = f"Each token's mask holds the ids that {field} leaves, as an independent forward pass computes them."
    case(Capability.SAMPLING_MASK, capability)(body)


for _field, (_capability, _few, _many) in _FILTERS.items():
    _make_filter_case(_field, _capability, _few, _many)


@case(Capability.SAMPLING_MASK, *_EVERY_FIELD)
async def a_mask_holds_what_all_fields_leave_together(bench: Bench) -> None:
    """An action mask, disallowed ids, penalties, a bias, min_new_tokens, top-k, top-p and min-p together shape a mask.

    The same fields in greedy requests leave the drawn id alone.
    """
    ids = ordinary_ids(bench.engine)
    allowed = (*bench.rng.sample(ids, len(ids) * 2 // 3), *bench.engine.model_info.eos_token_ids)
    banned = tuple(bench.rng.sample(allowed, 9))
    processors = (
        ActionMask(allowed_token_ids=allowed),
        DisallowedTokens(token_ids=banned),
        TemperatureSchedule(start=1.5, end=0.7, steps=5),
    )
    params = _asking(
        n=2,
        temperature=1.2,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={token: 2.0 for token in allowed[:5]},
        min_new_tokens=4,
        stop_token_ids=bench.rng.sample(allowed, 3),
        logit_processors=processors,
    )
    prompts = bench.prompts(4)
    rows = np.stack([bench.oracle().logits(prompt)[-1] for prompt in prompts])
    filtered = with_effective_filters(params, prompts, rows)
    greedy = filtered.model_copy(update={"temperature": 0.0})
    each = [params, filtered, filtered, greedy]
    for completion in (await bench.engine.generate(prompts, each)).completions:
        _check(bench, completion, each[completion.prompt_index])


@case(Capability.SAMPLING_MASK)
async def unrestricted_sampling_says_so(bench: Bench) -> None:
    """Without restrictions every id of the vocabulary is left; a greedy token's only id is its own."""
    free, greedy = _asking(n=2), _asking(temperature=0)
    for completion in await _generate(bench, [free, greedy], 2):
        mask = _mask(completion)
        assert mask.vocab_size == bench.engine.model_info.vocab_size
        if completion.prompt_index == 0:
            assert all(map(mask.is_unrestricted, range(len(mask)))), f"only {mask.count(0)} ids were left"
            # An unrestricted position is packed as its count alone.
            assert len(mask.packed) == 4 * len(mask)
        else:
            assert [mask.ids(at) for at in range(len(mask))] == [[token] for token in completion.token_ids]


@case(Capability.SAMPLING_MASK, Capability.LOGPROBS_PROCESSED, Capability.TOP_K, Capability.TOP_P, Capability.MIN_P)
async def a_trainer_can_renormalise_over_a_mask(bench: Bench) -> None:
    """A trainer's own logits, renormalised over the mask, give the processed logprobs that the engine returned."""
    params = _asking(n=2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, logprobs=0, logprobs_mode="processed")
    for completion in await _generate(bench, params, 4):
        left = _mask(completion).to_numpy()
        assert left.shape[0] == len(completion.token_ids)
        logits = bench.output_logits(completion) / 0.9
        own = log_softmax(np.where(left, logits, -np.inf))
        assert completion.logprobs_mode is LogprobsMode.PROCESSED
        for at, (token, value) in enumerate(zip(completion.token_ids, completion.logprobs or (), strict=True)):
            expected = float(own[at, token])
            assert abs(value - expected) <= 4 * bench.tolerance(), (
                f"token {at} has the processed logprob {value:.5f}; renormalised over its mask it is {expected:.5f}"
            )


@case(Capability.SAMPLING_MASK, Capability.STRUCTURED_REGEX)
async def a_mask_holds_what_a_grammar_leaves(bench: Bench) -> None:
    """Where output is constrained to a regular expression, a mask holds only ids that the expression allows."""
    params = _asking(max_new_tokens=16, n=2, structured_output=RegexGrammar(regex="[x-z]{5}"))
    decode, ends = bench.engine.decode, bench.engine.model_info.eos_token_ids
    for completion in await _generate(bench, params, 2):
        mask = _mask(completion)
        for at, token in enumerate(completion.token_ids):
            assert token in mask.ids(at), f"token {at} ({token}) is not among the ids that it was drawn from"
            texts = {decode([one]) for one in mask.ids(at) if one not in ends}
            wrong = sorted(text for text in texts if not re.fullmatch("[x-z]{1,5}", text))
            assert not wrong, f"the mask of token {at} holds {wrong}, which the expression rules out"


# Whole completions ---------------------------------------------------------------------------------------------------


@case(Capability.SAMPLING_MASK)
async def only_requests_that_ask_get_masks(bench: Bench) -> None:
    """In a mixed batch each sample of a request that asks has its own mask, and other requests have none."""
    asked, plain = _asking(n=3), SamplingParams(max_new_tokens=10, n=2)
    each = [asked, plain, asked.model_copy(update={"temperature": 0.0, "n": 1}), plain]
    for completion in await _generate(bench, each, len(each)):
        params = each[completion.prompt_index]
        if params.return_sampling_mask:
            _check(bench, completion, params)
        else:
            assert completion.sampling_mask is None, "a mask came that nobody asked for"


@case(Capability.SAMPLING_MASK, Capability.STREAMING, Capability.TOP_P, Capability.STOP_STRINGS)
async def streamed_masks_are_the_whole_one(bench: Bench) -> None:
    """The masks of a sample's chunks, put together, equal its completion's mask, with stop strings and without."""
    params = _asking(top_p=0.8, n=2, max_new_tokens=TOKENS)
    each = [params, params.model_copy(update={"stop": ("e", "~")})]
    parts: dict[tuple[int, int], list[SamplingMask]] = {}
    last: list[Completion] = []
    stream = bench.engine.generate_stream(bench.prompts(2), each)
    async with aclosing(stream):
        async for chunk in stream:
            part, count = chunk.sampling_mask, len(chunk.token_ids)
            assert part is not None, f"a chunk of {count} ids came without its sampling mask"
            assert len(part) == count, f"a chunk of {count} ids came with a mask of {len(part)}"
            parts.setdefault((chunk.prompt_index, chunk.sample_index), []).append(part)
            last += [chunk.completion] if chunk.completion is not None else []
    assert len(last) == 4
    for completion in last:
        shown = parts[completion.prompt_index, completion.sample_index]
        whole = SamplingMask.join(_mask(completion).vocab_size, shown)
        assert whole == completion.sampling_mask, f"the chunks' masks are {whole}, not {completion.sampling_mask}"
        _check(bench, completion, params)


@case(Capability.SAMPLING_MASK, Capability.STOP_STRINGS)
async def stops_cut_masks_with_their_tokens(bench: Bench) -> None:
    """Where a stop string takes tokens away, their positions of the mask go too, and with no token there is none."""
    free = await free_samples(bench, 4)
    each = [_asking(temperature=0, max_new_tokens=TOKENS, stop=bench.rng.choice(pieces(run.text, 2))) for run in free]
    output = await bench.engine.generate([run.prompt_token_ids for run in free], each)
    assert any(completion.finish_reason is FinishReason.STOP for completion in output.completions)
    for completion in output.completions:
        mask = _mask(completion)
        assert [mask.ids(at) for at in range(len(mask))] == [[token] for token in completion.token_ids]


@case(Capability.SAMPLING_MASK, Capability.SCORE_TOKENS)
async def scoring_alone_gives_an_empty_mask(bench: Bench) -> None:
    """A request that samples nothing has a mask without positions."""
    (completion,) = await _generate(bench, _asking(max_new_tokens=0), 1)
    assert _mask(completion).vocab_size == bench.engine.model_info.vocab_size


@case(Capability.SAMPLING_MASK, Capability.ABORT)
async def an_aborted_sample_keeps_the_mask_of_its_tokens(bench: Bench) -> None:
    """An aborted request returns the mask of exactly the tokens that it returns."""
    params = bench.long(250, temperature=1.0, return_sampling_mask=True)
    async with bench.in_flight(bench.prompts(2), params, request_ids=["a", "b"]) as task:
        await bench.engine.abort("a")
        async with within():
            completions = (await task).completions
    with in_time(completions[0]):
        assert completions[0].finish_reason is FinishReason.ABORT
    for completion in completions:
        _check(bench, completion, params)


@case(Capability.SAMPLING_MASK, Capability.PAUSE_RETRACT, Capability.TOP_P)
async def masks_outlast_a_retraction(bench: Bench) -> None:
    """Requests that were retracted and went on have the masks of all their tokens."""
    engine, params = bench.engine, bench.long(250, temperature=0.9, top_p=0.7, return_sampling_mask=True)
    async with bench.in_flight(bench.prompts(3), params) as task:
        for _ in range(2):
            await engine.pause_generation(PauseMode.RETRACT)
            await engine.continue_generation()
        async with within():
            completions = (await task).completions
    for completion in completions:
        _check(bench, completion, params)
