"""Checks that hold for the answer to any valid call, with any mixture of fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import regex

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason, TopLogprobs
from drivetrain.types.prompts import Prompt
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    JsonSchema,
    LogprobsMode,
    RegexGrammar,
    SamplingParams,
    StructuredOutput,
    TemperatureSchedule,
)
from drivetrain_conformance.engine_model.live_requests import Live, proceed, settle
from drivetrain_conformance.engine_model.strategies import EBNF_AS_REGEX, SCHEMA_AS_REGEX, Batch
from drivetrain_conformance.harness.testbench import Bench, NoOracle
from drivetrain_conformance.references.oracle import HiddenStatesOracle, check_prompt_ranks, check_top, log_softmax
from drivetrain_conformance.references.reference_masks import check_mask
from drivetrain_conformance.references.reference_sampling import FLAT, steps
from drivetrain_conformance.references.reference_stops import Ending, expected_ending

_LAST: Final = 16
"""Tokens at the end of two samples of which half are never alike by chance."""


@dataclass(slots=True)
class Repeats:
    """Counts requests with a fixed outcome that were repeated, and how many repeated alike."""

    alike: int = 0
    total: int = 0


class OtherTokens(AssertionError):
    """A greedy or seeded request, asked again, was answered with other tokens.

    A retracted request computes its tokens again in one pass, which rounds differently. One of thousands of draws may
    lie within that rounding of the border between two tokens, also in float32. In a second call, the retraction comes
    at another token.
    """


async def check_honoured(
    bench: Bench,
    batch: Batch,
    repeats: Repeats,
    *,
    streamed: bool,
    pause: PauseMode | None = None,
    lora: str | None = None,
    model: Path | None = None,
) -> None:
    """Make a call and check everything that comes back; repeat the requests whose outcome is fixed.

    Args:
        bench: The workplace.
        batch: The prompts, and the params of each.
        repeats: Counts the repeated requests.
        streamed: Make the call as a stream.
        pause: Pause in this mode while the call runs, and continue. No field may lose its effect by that.
        lora: The call's adapter.
        model: Folder of the model that must have answered; None: the engine's own.

    Raises:
        OtherTokens: A repeated request had other tokens.
        AssertionError: A field was not honoured.
    """
    engine = bench.engine
    call = engine.generate_stream if streamed else engine.generate
    live = Live(call(batch.prompts, batch.params, lora=lora))
    if pause is not None:
        await settle(engine, live)
        if streamed:
            await proceed(live, tokens=len(batch.prompts))
        await engine.pause_generation(pause)
        await engine.continue_generation()
    completions = await live.result()
    expected = [(p, s) for p, params in enumerate(batch.params) for s in range(params.n)]
    assert [(c.prompt_index, c.sample_index) for c in completions] == expected, (
        "completions are missing or out of order"
    )
    assert len({c.request_id for c in completions}) == len(completions), "two completions have one request id"
    for completion in completions:
        prompt, params = batch.prompts[completion.prompt_index], batch.params[completion.prompt_index]
        _check_prompt(bench, prompt, params, completion)
        _check_ids(bench, params, completion, may_be_aborted=pause is PauseMode.ABORT)
        _check_text(bench, params, completion)
        _check_logprobs(params, completion)
        _check_extras(bench, params, completion)
        _check_against_oracle(bench, params, completion, model)
    _check_seeds(batch, completions)
    await _check_repeats(bench, batch, completions, repeats, lora)


def _check_prompt(bench: Bench, prompt: Prompt, params: SamplingParams, completion: Completion) -> None:
    ids = completion.prompt_token_ids
    assert ids == bench.engine.tokenizer.encode(prompt), "the model saw another prompt"
    assert 0 <= completion.cached_tokens < len(ids), (
        f"{completion.cached_tokens} of {len(ids)} prompt tokens were cached"
    )
    # A request that was aborted before the model read its prompt has no logprobs of it.
    unread = completion.finish_reason is FinishReason.ABORT and not completion.token_ids
    if params.prompt_logprobs is None or (unread and completion.prompt_logprobs is None):
        assert completion.prompt_logprobs is None
        assert completion.prompt_top_logprobs is None
        assert completion.prompt_ranks is None
        return
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(ids)
    assert [value is None for value in completion.prompt_logprobs] == [True] + [False] * (len(ids) - 1)
    assert (completion.prompt_ranks is not None) is params.return_prompt_ranks
    if completion.prompt_ranks is not None:
        assert [rank is None for rank in completion.prompt_ranks] == [True] + [False] * (len(ids) - 1)
    if params.prompt_logprobs:
        assert completion.prompt_top_logprobs is not None
        assert len(completion.prompt_top_logprobs) == len(ids)
        for top, token, value in zip(completion.prompt_top_logprobs, ids, completion.prompt_logprobs, strict=True):
            assert (top is None) is (value is None)
            if top is not None and value is not None:
                _check_top(top, params.prompt_logprobs, token, value)
                assert len(top) == params.prompt_logprobs, f"prompt token {token} has {len(top)} alternatives"


def _check_ids(bench: Bench, params: SamplingParams, completion: Completion, *, may_be_aborted: bool) -> None:
    """Check that the ids could be drawn, and that they end where and for the reason stated."""
    info, ids, reason = bench.engine.model_info, completion.token_ids, completion.finish_reason
    assert params.max_new_tokens is not None
    assert all(0 <= token < info.vocab_size for token in ids), f"ids outside the vocabulary: {ids}"
    assert len(ids) <= params.max_new_tokens
    aborted = reason is FinishReason.ABORT
    assert may_be_aborted or not aborted, "it was aborted, and nobody asked for that"
    stops = set(_stop_ids(bench, params))
    assert not stops.intersection(ids[:-1]), f"it went on past a stop id: {ids}, stops {sorted(stops)}"
    match completion.matched_stop:
        case None if aborted:
            assert len(ids) <= params.max_new_tokens
        case None:
            assert reason is FinishReason.LENGTH, "it stopped, and nothing is named that it stopped at"
            assert len(ids) == params.max_new_tokens
        case int(token):
            assert token in stops
            assert ids[-1:] == [token], f"it stopped at id {token}, its last id is {ids[-1:]}"
        case str(text):
            assert text in params.stop or text in params.stop_regex, f"it stopped at {text!r}, which is no stop"
    if not isinstance(completion.matched_stop, int):
        assert not stops.intersection(ids), f"the last id is a stop, and is not named: {ids}"
    if completion.matched_stop is not None:
        assert reason is FinishReason.STOP
    if not aborted and not isinstance(completion.matched_stop, str):
        # A text stop cuts ids off, so fewer may remain.
        assert len(ids) >= params.min_new_tokens
    for processor in params.logit_processors:
        match processor:
            case ActionMask():
                assert set(ids) <= set(processor.allowed_token_ids), f"{ids} leaves the mask"
            case DisallowedTokens():
                assert not set(ids) & set(processor.token_ids), f"{ids} holds a disallowed id"
            case TemperatureSchedule():
                pass


def _stop_ids(bench: Bench, params: SamplingParams) -> list[int]:
    """Return the ids that end a request with these params."""
    eos = () if params.ignore_eos else bench.engine.model_info.eos_token_ids
    return [*params.stop_token_ids, *eos]


def _check_text(bench: Bench, params: SamplingParams, completion: Completion) -> None:
    """Check that the text is the decoding of the ids, and contains no stop that should have ended it."""
    text, matched = completion.text, completion.matched_stop
    shown = completion.token_ids[:-1] if isinstance(matched, int) else completion.token_ids
    decoded = bench.engine.decode(shown, skip_special_tokens=params.skip_special_tokens) if shown else ""
    if isinstance(matched, str):
        assert decoded.startswith(text), f"the ids decode to {decoded!r}, the text is {text!r}"
    else:
        assert text == decoded, f"the ids decode to {decoded!r}, the text is {text!r}"
    kept = isinstance(matched, str) and params.include_stop_str_in_output
    if kept and matched in params.stop:
        assert text.endswith(matched), f"{matched!r} ended it and was to be kept; the text is {text!r}"
    if params.min_new_tokens == 0:
        before = text[:-1] if kept else text
        for stop in params.stop:
            assert stop not in before, f"{text!r} went on past {stop!r}"
        for pattern in params.stop_regex:
            assert not re.search(pattern, before), f"{text!r} went on past {pattern!r}"
    elif not isinstance(matched, str):
        expected = expected_ending(completion, params, bench.engine.tokenizer)
        assert Ending.of(completion) == expected, f"{text!r} went on past a stop; it must be {expected}"
    if params.structured_output is not None:
        _check_grammar(params.structured_output, text, is_whole=completion.finish_reason is FinishReason.STOP)


def _check_grammar(grammar: StructuredOutput, text: str, *, is_whole: bool) -> None:
    """Check that a text matches the grammar, or begins a match if it was cut short."""
    match grammar:
        case JsonSchema():
            pattern = SCHEMA_AS_REGEX
        case RegexGrammar(regex=pattern):
            pass
        case _:
            pattern = EBNF_AS_REGEX
    assert regex.fullmatch(pattern, text, partial=not is_whole), (
        f"{text!r} {'does not match' if is_whole else 'begins no match of'} {pattern!r}"
    )


def _check_logprobs(params: SamplingParams, completion: Completion) -> None:
    ids, found = completion.token_ids, completion.logprobs
    if params.logprobs is None:
        assert (found, completion.logprobs_mode, completion.top_logprobs) == (None, None, None)
        return
    assert found is not None
    assert len(found) == len(ids), f"{len(ids)} ids and {len(found)} logprobs"
    assert all(value <= 1e-4 for value in found), f"a logprob is above 0: {found}"
    assert completion.logprobs_mode is params.logprobs_mode
    if params.logprobs == 0:
        assert completion.top_logprobs is None
        return
    assert completion.top_logprobs is not None
    for top, token, value in zip(completion.top_logprobs, ids, found, strict=True):
        _check_top(top, params.logprobs, token, value)
        # The processed distribution leaves out tokens of probability zero.
        few = params.logprobs_mode is LogprobsMode.PROCESSED
        assert few or len(top) == params.logprobs, f"token {token} has {len(top)} alternatives"


def _check_top(top: TopLogprobs, count: int, token: int, value: float) -> None:
    assert len(top) <= count, f"{len(top)} alternatives, where {count} were asked for"
    values = [one for _, one in top]
    assert values == sorted(values, reverse=True), f"the most likely is not first: {top}"
    named = dict(top)
    assert len(named) == len(top), f"a token comes twice: {top}"
    if token in named:
        assert abs(named[token] - value) < 1e-3, f"token {token} has logprobs {value} and {named[token]}"


def _check_extras(bench: Bench, params: SamplingParams, completion: Completion) -> None:
    count, version = len(completion.token_ids), bench.engine.get_weight_version()
    spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
    if spans or bench.claims(Capability.VERSION_SPANS):
        # A prompt that was only scored has no token, and an empty span that names the weights, unless it was aborted
        # before the model read it.
        expected = [(version, 0, count)] if count or params.max_new_tokens == 0 else []
        unread = completion.finish_reason is FinishReason.ABORT and not count
        assert spans == expected or (unread and not spans), f"{count} tokens of version {version!r}, spans {spans}"
    for asked, rows in (
        (params.return_hidden_states, completion.hidden_states),
        (params.return_routed_experts, completion.routed_experts),
        (params.return_sampling_mask, completion.sampling_mask),
    ):
        assert (rows is not None) is asked
        assert rows is None or len(rows) == count
    prompt = completion.prompt_routed_experts
    assert (prompt is not None) is params.return_prompt_routed_experts
    assert prompt is None or len(prompt) == len(completion.prompt_token_ids)


def _check_against_oracle(
    bench: Bench, params: SamplingParams, completion: Completion, model: Path | None = None
) -> None:
    """Check that each token could be drawn, and that each logprob is that of an independent forward pass."""
    try:
        rows = bench.output_logits(completion, model)
        prompt_rows = log_softmax(bench.oracle(model).logits(completion.prompt_token_ids))
    except NoOracle:
        return
    tolerance = bench.tolerance()
    # Penalties and low temperatures magnify errors of logits; high ones make them smaller.
    penalty = max(params.repetition_penalty, 1 / params.repetition_penalty)
    slack = max(tolerance, max(4.0, penalty) * tolerance / (params.temperature or 1.0))
    prompt = completion.prompt_token_ids
    for at, value in enumerate(completion.prompt_logprobs or ()):
        if value is not None:
            expected = prompt_rows[at - 1][prompt[at]]
            assert abs(value - expected) <= slack, f"prompt token {at} has logprob {value:.5f}, not {expected:.5f}"
    if completion.prompt_ranks is not None:
        check_prompt_ranks(completion.prompt_ranks, prompt, prompt_rows, slack)
    for at, top in enumerate(completion.prompt_top_logprobs or ()):
        if top is not None and params.prompt_logprobs:
            check_top(top, prompt_rows[at - 1], params.prompt_logprobs, slack, f"prompt token {at}")
    _check_states(bench, completion, model)
    # The reference does not cover grammars.
    known = params.structured_output is None
    for at, step in enumerate(steps(completion, rows, params, tolerance, _stop_ids(bench, params))):
        token = completion.token_ids[at]
        if known:
            step.check_drawn(token, params, slack, f"token {at} ({token})")
            if completion.sampling_mask is not None:
                check_mask(completion.sampling_mask, at, step, token, params)
        mode = completion.logprobs_mode
        if completion.logprobs is None or mode is None or (mode is LogprobsMode.PROCESSED and not known):
            continue
        value = completion.logprobs[at]
        is_certain = mode is not LogprobsMode.PROCESSED or (params.temperature > 0 and step.is_clear)
        if completion.top_logprobs is not None and params.logprobs and is_certain:
            top, of = completion.top_logprobs[at], f"token {at} ({token})"
            check_top(top, step.logprobs(mode), params.logprobs, slack, of)
        if mode is LogprobsMode.PROCESSED and params.temperature == 0:
            assert value == 0, f"the logprob of a greedy choice is {value}, not 0"
            continue
        least, most = step.bounds(mode, token)
        assert least - slack <= value <= most + slack, (
            f"token {at} ({token}) has logprob {value:.5f} in mode {mode.value}, not {least:.5f} to {most:.5f}"
        )


def _check_seeds(batch: Batch, completions: Sequence[Completion]) -> None:
    """Check that requests that differ in their seed alone drew other tokens up to the last, where none is likelier."""
    for first, second in combinations(completions, 2):
        one, other = batch.params[first.prompt_index], batch.params[second.prompt_index]
        if one.temperature == FLAT and one.seed != other.seed and other.temperature == FLAT:
            check_draws_differ(first.token_ids, second.token_ids, f"seeds {one.seed} and {other.seed}")


def check_draws_differ(one: Sequence[int], other: Sequence[int], of: str) -> None:
    """Raise if the last tokens of two samples, which any context leaves equally likely, are alike."""
    count = min(len(one), len(other))
    last = slice(max(0, count - _LAST), count)
    alike = sum(a == b for a, b in zip(one[last], other[last], strict=True))
    assert count < _LAST or alike < _LAST // 2, (
        f"{of} draw alike: of {count} tokens the last are {one[last]} and {other[last]}"
    )


def _check_states(bench: Bench, completion: Completion, model: Path | None) -> None:
    """Check that hidden states are those of an independent forward pass."""
    oracle = bench.oracle(model)
    if not completion.hidden_states or not isinstance(oracle, HiddenStatesOracle):
        return
    found, before = np.array(completion.hidden_states), len(completion.prompt_token_ids)
    rows = oracle.hidden_states([*completion.prompt_token_ids, *completion.token_ids])
    expected = rows[before - 1 : before - 1 + len(found)]
    # A logprob's tolerance suits numbers around one; hidden states can be of any size.
    allowed = bench.tolerance() * max(1.0, float(np.abs(expected).max()))
    off = float(np.abs(found - expected).max())
    assert off <= allowed, f"a hidden state is off by {off:.3g}; {allowed:.3g} is allowed"


async def _check_repeats(
    bench: Bench, batch: Batch, completions: Sequence[Completion], repeats: Repeats, lora: str | None
) -> None:
    """Repeat greedy and seeded requests without stops; the result shows where stops must have ended the first ones.

    They are repeated in the opposite order: no request's place in the batch may matter.
    """
    fixed = [
        index
        for index, params in reversed(list(enumerate(batch.params)))
        if (params.temperature == 0 or params.seed is not None) and params.max_new_tokens
    ]
    if not fixed:
        return
    free = [_without_stops(batch.params[index]) for index in fixed]
    again = (await bench.engine.generate([batch.prompts[index] for index in fixed], free, lora=lora)).completions
    before = [completion for index in fixed for completion in completions if completion.prompt_index == index]
    # A coarse dtype rounds differently in another batch, which may flip a token; also one that a stop cut off.
    is_coarse = bench.tolerance() > 1e-2
    for first, second in zip(before, again, strict=True):
        repeats.total += 1
        if second.token_ids[: len(first.token_ids)] != first.token_ids:
            if not is_coarse:
                raise OtherTokens(f"asked again, {first.token_ids} became {second.token_ids}")
            continue
        if first.finish_reason is not FinishReason.ABORT:
            params = batch.params[first.prompt_index]
            expected, got = expected_ending(second, params, bench.engine.tokenizer), Ending.of(first)
            if is_coarse and got != expected and first.finish_reason is FinishReason.STOP:
                continue
            assert got == expected, f"of {second.text!r} ({second.token_ids}) came {got}, where it must be {expected}"
        repeats.alike += 1


def _without_stops(params: SamplingParams) -> SamplingParams:
    fields = params.model_dump(include=params.model_fields_set)
    # Before min_new_tokens a stop id is never drawn, so it affects more than the end.
    named = (
        "stop",
        "stop_regex",
        "include_stop_str_in_output",
        *(() if params.min_new_tokens else ("stop_token_ids",)),
    )
    return SamplingParams.model_validate({name: value for name, value in fields.items() if name not in named})
