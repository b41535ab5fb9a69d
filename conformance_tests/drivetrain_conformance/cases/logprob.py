"""Logprobs: they are correct, and of the documented distribution, beside any other field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from drivetrain.engine.validation import MODE_CAPABILITY
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.assertions.common_checks import ending_prompt
from drivetrain_conformance.assertions.same_answers import check_prefix, check_prompt_logprobs, check_same
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.oracle import check_prompt_ranks, check_top, log_softmax
from drivetrain_conformance.references.reference_sampling import steps, with_effective_filters

_TEMPERATURES: Final = (0.0, 0.5, 1.0, 1.7, 0.03)
_HOT: Final = (4.0, 20.0, 100.0, 1000.0, 10_000.0)
"""Temperatures at which the model's own logits hardly matter."""
_COLD: Final = 0.004
"""So near to greedy that an engine may take it for 0."""
_TRANSFORMS: Final[Mapping[str, tuple[Capability, object]]] = {
    "top_k": (Capability.TOP_K, 5),
    "top_p": (Capability.TOP_P, 0.6),
    "min_p": (Capability.MIN_P, 0.3),
    "repetition_penalty": (Capability.REPETITION_PENALTY, 1.5),
    "frequency_penalty": (Capability.FREQUENCY_PENALTY, -1.5),
    "presence_penalty": (Capability.PRESENCE_PENALTY, -1.5),
    "logit_bias": (Capability.LOGIT_BIAS, {40: 4.0, 41: 2.0, 42: -100.0}),
}
"""Fields that change the sampling distribution: the capability of each, and a value that changes much."""


_WHOLE_CONTEXT: Final = 4096
"""Longest context, in tokens, that is scored as a whole."""


# Modes ------------------------------------------------------------------------------------------------------------


@case(Capability.LOGPROBS_RAW)
async def raw_is_the_models_own_distribution(bench: Bench) -> None:
    """Raw logprobs are those of the model's logits, whatever the temperature."""
    await _check_mode(bench, LogprobsMode.RAW)


@case(Capability.LOGPROBS_TEMPERATURE)
async def temperature_is_what_a_trainer_recomputes(bench: Bench) -> None:
    """Logprobs in mode temperature are log_softmax(logits / temperature), and raw when greedy."""
    await _check_mode(bench, LogprobsMode.TEMPERATURE)


@case(Capability.LOGPROBS_PROCESSED)
async def processed_is_the_distribution_drawn_from(bench: Bench) -> None:
    """Processed logprobs are those after temperature; when greedy they are 0, as the distribution is a point mass."""
    await _check_mode(bench, LogprobsMode.PROCESSED)


async def _check_mode(bench: Bench, mode: LogprobsMode) -> None:
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=12, n=2, logprobs=0, logprobs_mode=mode)
        for temperature in (*_TEMPERATURES, _COLD, *_HOT)
    ]
    if mode is LogprobsMode.PROCESSED and bench.claims(Capability.LOGIT_BIAS):
        # As large as the temperature, a bias shows how hot it is.
        (token,) = bench.prompt(1)
        params += [one.model_copy(update={"logit_bias": {token: 4 * one.temperature}}) for one in params[-len(_HOT) :]]
    output = await bench.engine.generate(bench.prompts(len(params)), params)
    _assert_not_rounded([value for completion in output.completions for value in completion.logprobs or ()])
    for completion in output.completions:
        _assert_logprobs(bench, completion, params[completion.prompt_index], mode)
    if bench.claims(Capability.MIN_NEW_TOKENS):
        await _check_before_min_new_tokens(bench, mode)


async def _check_before_min_new_tokens(bench: Bench, mode: LogprobsMode) -> None:
    """Check that a likely EOS held back by min_new_tokens counts in raw and temperature mode, but not in processed."""
    asked = SamplingParams(temperature=0.8, max_new_tokens=3, min_new_tokens=3, n=4, logprobs=0, logprobs_mode=mode)
    held_back = DisallowedTokens(token_ids=bench.engine.model_info.eos_token_ids)
    output = await bench.engine.generate([ending_prompt(bench).token_ids], asked)
    for completion in output.completions:
        _assert_logprobs(bench, completion, asked.model_copy(update={"logit_processors": (held_back,)}), mode)


def _assert_not_rounded(logprobs: Sequence[float]) -> None:
    """Assert that logprobs were computed in float32: a bfloat16 model's tolerance would hide rounded ones."""
    bits = np.asarray([value for value in logprobs if value], dtype=np.float32).view(np.uint32)
    rounded = int((bits & 0xFFFF == 0).sum())
    assert rounded <= len(bits) / 2, f"{rounded} of {len(bits)} logprobs are bfloat16 numbers, so they were rounded"


def _make_transform_case(mode: LogprobsMode, field: str, capability: Capability, value: object) -> None:
    async def body(bench: Bench) -> None:
        fields = {"temperature": 0.7, "max_new_tokens": 10, "n": 2, "logprobs": 0, "logprobs_mode": mode, field: value}
        params = SamplingParams.model_validate(fields)
        output = await bench.engine.generate(bench.prompts(3), params)
        for completion in output.completions:
            _assert_logprobs(bench, completion, params, mode)

    if mode is LogprobsMode.PROCESSED:
        body.__name__ = f"processed_follows_{field}"
        body.__doc__ = f"Processed logprobs are those of the distribution that {field} leaves, renormalised."
    else:
        body.__name__ = f"{mode.value}_is_unmoved_by_{field}"
        body.__doc__ = f"Logprobs in mode {mode.value} are those before {field} is applied."
    case(MODE_CAPABILITY[mode], capability)(body)


for _mode in LogprobsMode:
    for _field, (_capability, _value) in _TRANSFORMS.items():
        _make_transform_case(_mode, _field, _capability, _value)


@case(Capability.LOGPROBS_PROCESSED, *(capability for capability, _ in _TRANSFORMS.values()))
async def processed_follows_everything_at_once(bench: Bench) -> None:
    """Processed logprobs follow penalties, bias, temperature, top-k, top-p and min-p in the documented order.

    Before ``min_new_tokens`` they leave out the ids that would end the request, and no others.
    """
    schedules = bench.engine.supports(Capability.LOGIT_PROCESSORS)
    params = SamplingParams(
        # Its end is reached early, and holds for the later tokens.
        logit_processors=(TemperatureSchedule(start=1.5, end=0.8, steps=4),) if schedules else (),
        temperature=1.4,
        max_new_tokens=12,
        n=2,
        repetition_penalty=1.3,
        frequency_penalty=0.6,
        presence_penalty=-0.4,
        logit_bias={40: 2.0, 41: -2.0},
        logprobs=0,
        logprobs_mode=LogprobsMode.PROCESSED,
    )
    prompts = bench.prompts(12)  # in few answers a filter may change no token's logprob
    rows = np.stack([bench.oracle().logits(prompt)[-1] for prompt in prompts])
    variants = [with_effective_filters(params, prompts, rows), *_held_back(bench)]
    for one in variants:
        output = await bench.engine.generate(prompts, one)
        for completion in output.completions:
            _assert_logprobs(bench, completion, one, LogprobsMode.PROCESSED)


def _held_back(bench: Bench) -> list[SamplingParams]:
    """Return params whose EOS ids and stop id are likely, without an end before the last token; some ignore EOS."""
    engine = bench.engine
    if not all(map(engine.supports, (Capability.MIN_NEW_TOKENS, Capability.STOP_TOKEN_IDS))):
        return []
    (stop,) = bench.prompt(1)
    return [
        SamplingParams(
            max_new_tokens=8,
            min_new_tokens=8,
            stop_token_ids=(stop,),
            ignore_eos=ignore_eos,
            logit_bias=dict.fromkeys({stop, *engine.model_info.eos_token_ids}, 4.0),
            logprobs=0,
            logprobs_mode=LogprobsMode.PROCESSED,
        )
        for ignore_eos in (False, True)
        if not ignore_eos or engine.supports(Capability.IGNORE_EOS)
    ]


@case(Capability.LOGPROBS_TEMPERATURE)
async def temperature_is_the_mode_unless_another_is_asked_for(bench: Bench) -> None:
    """Logprobs requested without a mode are in mode temperature, and say so."""
    params = SamplingParams(temperature=0.5, max_new_tokens=8, logprobs=0)
    output = await bench.engine.generate(bench.prompts(2), params)
    for completion in output.completions:
        _assert_logprobs(bench, completion, params, LogprobsMode.TEMPERATURE)


@case(Capability.LOGPROBS_RAW, config={"logprobs_mode": "raw"}, slow=True)
async def the_configured_mode_is_the_default(bench: Bench) -> None:
    """Logprobs requested without a mode are in the engine's configured mode, and say so."""
    params = SamplingParams(temperature=0.5, max_new_tokens=8, logprobs=0)
    output = await bench.engine.generate(bench.prompts(2), params)
    for completion in output.completions:
        _assert_logprobs(bench, completion, params, LogprobsMode.RAW)


@case(Capability.LOGPROBS_RAW, Capability.LOGPROBS_TEMPERATURE, config={"logprobs_mode": "raw"})
async def requests_of_one_batch_have_modes_of_their_own(bench: Bench) -> None:
    """Each request of a batch gets the mode that it asked for, and the configured one if it asked for none."""
    modes = (LogprobsMode.RAW, LogprobsMode.TEMPERATURE, None, LogprobsMode.TEMPERATURE)
    params = [SamplingParams(temperature=0.6, max_new_tokens=8, logprobs=0, logprobs_mode=mode) for mode in modes]
    output = await bench.engine.generate([bench.prompt()] * len(params), params)
    for completion, one, mode in zip(output.completions, params, modes, strict=True):
        _assert_logprobs(bench, completion, one, mode or LogprobsMode.RAW)


@case()
async def nothing_is_returned_unasked(bench: Bench) -> None:
    """A request that asks for no logprobs gets none, and no mode."""
    (completion,) = (await bench.engine.generate(bench.prompt(), SamplingParams(max_new_tokens=3))).completions
    assert completion.logprobs is None
    assert completion.logprobs_mode is None
    assert completion.top_logprobs is None
    assert completion.prompt_logprobs is None
    assert completion.prompt_top_logprobs is None
    assert completion.prompt_ranks is None


# Alignment --------------------------------------------------------------------------------------------------------


@case(Capability.LOGPROBS_TEMPERATURE)
async def the_end_of_sequence_has_its_logprob(bench: Bench) -> None:
    """An EOS was sampled like any other token, so it stays in the ids and has a logprob."""
    ending = ending_prompt(bench)
    params = SamplingParams(temperature=0, max_new_tokens=8, logprobs=0)
    (completion,) = (await bench.engine.generate(ending.token_ids, params)).completions
    assert completion.token_ids[-1:] == [ending.eos]
    assert completion.finish_reason is FinishReason.STOP
    _assert_logprobs(bench, completion, params, LogprobsMode.TEMPERATURE)


@case(Capability.STOP_TOKEN_IDS, Capability.LOGPROBS_TEMPERATURE)
async def a_stop_token_has_its_logprob(bench: Bench) -> None:
    """A stop token stays in the ids with its logprob, and nothing comes after it."""
    prompts = bench.prompts(3)
    free = await bench.greedy(prompts)
    params = [
        SamplingParams(
            temperature=0, max_new_tokens=12, logprobs=0, stop_token_ids=(one.token_ids[len(one.token_ids) // 2],)
        )
        for one in free
    ]
    output = await bench.engine.generate(prompts, params)
    for completion, one, before in zip(output.completions, params, free, strict=True):
        stop = one.stop_token_ids[0]
        check_prefix(bench, completion, before)
        if stop in completion.token_ids:
            assert completion.finish_reason is FinishReason.STOP
            assert completion.token_ids.index(stop) == len(completion.token_ids) - 1
        else:
            same = before.token_ids[: len(completion.token_ids)]
            assert completion.token_ids != same, "it did not reach the stop token, though it was on the way there"
        _assert_logprobs(bench, completion, one, LogprobsMode.TEMPERATURE)


@case(Capability.STREAMING, Capability.LOGPROBS_TEMPERATURE)
async def a_streams_logprobs_are_the_completions(bench: Bench) -> None:
    """Each chunk has as many logprobs as tokens, and together they are the completion's."""
    params = SamplingParams(max_new_tokens=10, n=2, logprobs=0)
    streamed: dict[int, list[float]] = {0: [], 1: []}
    async for chunk in bench.engine.generate_stream(bench.prompt(), params):
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.token_ids)
        streamed[chunk.sample_index] += chunk.logprobs
        if chunk.completion is not None:
            assert streamed[chunk.sample_index] == chunk.completion.logprobs
            _assert_logprobs(bench, chunk.completion, params, LogprobsMode.TEMPERATURE)


@case(Capability.LOGPROBS_TEMPERATURE)
async def what_else_runs_changes_no_logprob(bench: Bench) -> None:
    """Greedy tokens and their logprobs are the same alone, in a batch and in another order, within rounding."""
    prompts = [bench.prompt(length) for length in (3, 9, 17, 30, 6, 6)]
    params = SamplingParams(temperature=0, max_new_tokens=12, logprobs=0)
    alone = [(await bench.engine.generate(prompt, params)).completions[0] for prompt in prompts]
    together = (await bench.engine.generate(prompts, params)).completions
    reversed_ = (await bench.engine.generate(prompts[::-1], params)).completions[::-1]
    for when, completions in (("in a batch", together), ("in another order", reversed_)):
        check_same(bench, completions, alone)
        for one, other in zip(alone, completions, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            common = _common(one.token_ids, other.token_ids)
            worst = _worst(one.logprobs[:common], other.logprobs[:common])
            assert worst <= bench.tolerance(), f"{when} a logprob is {worst:.3g} nats off"


@case(Capability.LOGPROBS_TEMPERATURE)
async def a_rollout_agrees_with_the_trainer(bench: Bench) -> None:
    """For sampled rollouts, the ratio of the trainer's probability of each token to the engine's is one."""
    params = SamplingParams(temperature=0.8, max_new_tokens=32, n=2, logprobs=0)
    output = await bench.engine.generate(bench.prompts(4, length=12), params)
    for completion in output.completions:
        assert completion.logprobs is not None
        trainers = bench.output_logprobs(completion, temperature=0.8)
        worst = _worst(completion.logprobs, trainers)
        assert worst <= bench.tolerance() / 0.8, f"a token's ratio is exp({worst:.3g})"


# The most likely tokens -------------------------------------------------------------------------------------------


@case(Capability.TOP_LOGPROBS, Capability.LOGPROBS_RAW)
async def top_logprobs_raw(bench: Bench) -> None:
    """In mode raw the top k tokens at each step are the model's, most likely first, each once."""
    await _check_top(bench, LogprobsMode.RAW)


@case(Capability.TOP_LOGPROBS, Capability.LOGPROBS_TEMPERATURE)
async def top_logprobs_after_temperature(bench: Bench) -> None:
    """In mode temperature the top k tokens at each step have their logprobs after temperature."""
    await _check_top(bench, LogprobsMode.TEMPERATURE)


@case(Capability.TOP_LOGPROBS, Capability.LOGPROBS_PROCESSED)
async def top_logprobs_processed(bench: Bench) -> None:
    """In mode processed the top k tokens are those of the sampling distribution: one when greedy."""
    await _check_top(bench, LogprobsMode.PROCESSED)


@case(Capability.TOP_LOGPROBS, Capability.LOGPROBS_PROCESSED, Capability.TOP_K)
async def tokens_that_cannot_be_drawn_are_not_among_the_likely(bench: Bench) -> None:
    """With top_k=3 the top five tokens of the processed distribution are only three."""
    params = SamplingParams(
        temperature=1.2, top_k=3, max_new_tokens=6, logprobs=5, logprobs_mode=LogprobsMode.PROCESSED
    )
    output = await bench.engine.generate(bench.prompts(3), params)
    for completion in output.completions:
        _assert_logprobs(bench, completion, params, LogprobsMode.PROCESSED)
        assert completion.top_logprobs is not None
        assert [len(top) for top in completion.top_logprobs] == [3] * len(completion.token_ids)
        for token, top in zip(completion.token_ids, completion.top_logprobs, strict=True):
            assert token in dict(top), f"token {token} was drawn, and is not among those that can be: {top}"


async def _check_top(bench: Bench, mode: LogprobsMode) -> None:
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=8, logprobs=count, logprobs_mode=mode)
        for temperature, count in zip((*_TEMPERATURES, _COLD), (4, 1, 5, 2, 3, 2), strict=True)
    ]
    if bench.claims(Capability.REPETITION_PENALTY):
        params += [one.model_copy(update={"repetition_penalty": 1.3}) for one in params]
    output = await bench.engine.generate(bench.prompts(len(params)), params)
    for completion, one in zip(output.completions, params, strict=True):
        _assert_logprobs(bench, completion, one, mode)
        assert completion.top_logprobs is not None
        assert len(completion.top_logprobs) == len(completion.token_ids)
        assert completion.logprobs is not None
        assert one.logprobs is not None
        tolerance = _tolerance(bench, one)
        rows = steps(completion, bench.output_logits(completion), one, bench.tolerance())
        for step, top, token, own in zip(
            rows, completion.top_logprobs, completion.token_ids, completion.logprobs, strict=True
        ):
            point_mass = mode is LogprobsMode.PROCESSED and one.temperature == 0
            if point_mass:
                assert top == [(token, 0.0)]
                continue
            check_top(top, step.logprobs(mode), one.logprobs, tolerance)
            if token in dict(top):
                assert abs(dict(top)[token] - own) <= tolerance, "a token has two logprobs"


# Prompts ----------------------------------------------------------------------------------------------------------


@case(Capability.PROMPT_LOGPROBS)
async def prompt_logprobs_are_raw(bench: Bench) -> None:
    """A prompt's logprobs are the model's own whatever the temperature, one per token; the first token has none."""
    prompts = [bench.prompt(length) for length in (1, 2, 7, 9, 40)]
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=2, prompt_logprobs=0) for temperature in _TEMPERATURES
    ]
    output = await bench.engine.generate(prompts, params)
    for completion in output.completions:
        check_prompt_logprobs(bench, completion)
        assert completion.prompt_top_logprobs is None


@case(Capability.PROMPT_LOGPROBS)
async def prompt_logprobs_name_the_likely_tokens(bench: Bench) -> None:
    """With prompt_logprobs=3 each prompt token but the first comes with the three most likely tokens."""
    # The output's tokens have their own number of alternatives.
    own = 1 if bench.claims(Capability.TOP_LOGPROBS) and bench.claims(Capability.LOGPROBS_TEMPERATURE) else None
    params = SamplingParams(temperature=0.5, max_new_tokens=2, prompt_logprobs=3, logprobs=own)
    output = await bench.engine.generate([bench.prompt(9), bench.prompt(20)], params)
    for completion in output.completions:
        assert own is None or [len(found) for found in completion.top_logprobs or ()] == [1] * len(completion.token_ids)
        check_prompt_logprobs(bench, completion)
        top = completion.prompt_top_logprobs
        assert top is not None
        assert top[0] is None
        assert len(top) == len(completion.prompt_token_ids)
        rows = log_softmax(bench.oracle().logits(completion.prompt_token_ids))
        for found, row in zip(top[1:], rows, strict=False):
            assert found is not None
            check_top(found, row, 3, bench.tolerance())


@case(Capability.PROMPT_RANKS, Capability.PROMPT_LOGPROBS)
async def prompt_ranks_count_the_tokens_that_are_as_likely(bench: Bench) -> None:
    """With return_prompt_ranks each prompt token but the first has its rank, which is 1 for the most likely token.

    The prompts are cached and end with greedy tokens, whose ranks are 1. A request that asks for no ranks gets none,
    also beside requests that do.
    """
    prompts = bench.prompts(3, length=20)
    scored = [one.prompt_token_ids + one.token_ids for one in await bench.greedy(prompts)]
    asked = [
        SamplingParams(temperature=temperature, max_new_tokens=2, prompt_logprobs=count, return_prompt_ranks=True)
        for temperature, count in ((0.0, 0), (0.5, 2), (1.0, 0))
    ]
    unasked = SamplingParams(max_new_tokens=2, prompt_logprobs=1)
    *ranked, plain = (await bench.engine.generate([*scored, prompts[0]], [*asked, unasked])).completions
    assert plain.prompt_ranks is None
    for completion in ranked:
        check_prompt_logprobs(bench, completion)
        rows = log_softmax(bench.oracle().logits(completion.prompt_token_ids))
        check_prompt_ranks(completion.prompt_ranks, completion.prompt_token_ids, rows, bench.tolerance())


@case(Capability.PROMPT_LOGPROBS)
async def a_cached_prefix_changes_no_prompt_logprob(bench: Bench) -> None:
    """Prompt logprobs are complete and correct when the prompt's prefix is cached, also on a second request."""
    prompt = bench.prompt(min(400, bench.engine.model_info.context_length // 2))
    await bench.greedy([prompt])
    params = SamplingParams(temperature=0, max_new_tokens=2, prompt_logprobs=0)
    for _ in range(2):
        for completion in (await bench.engine.generate([prompt, prompt[:-3]], params)).completions:
            check_prompt_logprobs(bench, completion)


@case(Capability.PROMPT_LOGPROBS, Capability.LOGPROBS_RAW)
async def prompt_and_output_logprobs_are_one_sequence(bench: Bench) -> None:
    """Raw logprobs of a prompt and its completion are those of one forward pass over both."""
    params = SamplingParams(max_new_tokens=10, logprobs=0, prompt_logprobs=0, logprobs_mode=LogprobsMode.RAW)
    output = await bench.engine.generate([bench.prompt(5), bench.prompt(25)], params)
    for completion in output.completions:
        check_prompt_logprobs(bench, completion)
        _assert_logprobs(bench, completion, params, LogprobsMode.RAW)


@case(Capability.SCORE_TOKENS, Capability.PROMPT_LOGPROBS)
async def given_tokens_are_scored_and_none_is_sampled(bench: Bench) -> None:
    """compute_logprobs() returns each given token's logprob, even if they fill the context, and samples none."""
    context = bench.engine.model_info.context_length
    lengths = (2, 11, 30, context) if context <= _WHOLE_CONTEXT else (2, 11, 30)
    sequences = [bench.prompt(length) for length in lengths]
    output = await bench.engine.compute_logprobs(sequences)
    for completion, sequence in zip(output.completions, sequences, strict=True):
        assert completion.prompt_token_ids == sequence
        assert completion.token_ids == []
        assert completion.text == ""
        check_prompt_logprobs(bench, completion)


@case(Capability.SCORE_TOKENS, Capability.PROMPT_LOGPROBS)
async def scoring_names_the_likely_tokens(bench: Bench) -> None:
    """compute_logprobs(top_k=4) also returns the four most likely tokens at each position."""
    sequence = bench.prompt(12)
    (completion,) = (await bench.engine.compute_logprobs([sequence], top_k=4)).completions
    check_prompt_logprobs(bench, completion)
    assert completion.prompt_top_logprobs is not None
    for found, row in zip(
        completion.prompt_top_logprobs[1:], log_softmax(bench.oracle().logits(sequence)), strict=False
    ):
        assert found is not None
        check_top(found, row, 4, bench.tolerance())


@case(Capability.SCORE_TOKENS, Capability.PROMPT_LOGPROBS, Capability.LOGPROBS_RAW)
async def a_rollout_can_be_replayed(bench: Bench) -> None:
    """Scoring a rollout's own tokens gives the logprobs that they had when they were sampled."""
    params = SamplingParams(max_new_tokens=16, n=2, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    rollouts = (await bench.engine.generate(bench.prompts(3), params)).completions
    replayed = await bench.engine.compute_logprobs([one.prompt_token_ids + one.token_ids for one in rollouts])
    for rollout, replay in zip(rollouts, replayed.completions, strict=True):
        assert replay.prompt_logprobs is not None
        scored = [value for value in replay.prompt_logprobs[len(rollout.prompt_token_ids) :] if value is not None]
        assert rollout.logprobs is not None
        assert len(scored) == len(rollout.logprobs)
        worst = _worst(scored, rollout.logprobs)
        assert worst <= 2 * bench.tolerance(), f"a replayed logprob is {worst:.3g} nats off"


# ------------------------------------------------------------------------------------------------------------------


def _tolerance(bench: Bench, params: SamplingParams) -> float:
    return bench.tolerance() / min(1.0, params.temperature or 1.0)


def _assert_logprobs(bench: Bench, completion: Completion, params: SamplingParams, mode: LogprobsMode) -> None:
    """Assert that a completion has one logprob for each token, and the right one."""
    assert completion.logprobs_mode is mode, f"asked for {mode.value}, got {completion.logprobs_mode}"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    tolerance = _tolerance(bench, params)
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else bench.engine.model_info.eos_token_ids)]
    rows = steps(completion, bench.output_logits(completion), params, bench.tolerance(), stops)
    for at, (step, token, value) in enumerate(zip(rows, completion.token_ids, completion.logprobs, strict=True)):
        if mode is LogprobsMode.PROCESSED and params.temperature > 0:
            assert step.possibly[token], f"token {at}, {token}, has probability zero and was drawn"
        least, most = step.bounds(mode, token)
        assert least - tolerance <= value <= most + tolerance, (
            f"the logprob of token {at} in mode {mode.value} at temperature {params.temperature:g} is {value:.5f}; "
            f"the reference says {most:.5f}"
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _worst(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
