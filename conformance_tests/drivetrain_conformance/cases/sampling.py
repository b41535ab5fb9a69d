"""Sampling: the distribution of drawn tokens follows the reference, and draws repeat or differ as seeds say.

The statistical cases make about 25 checks, each of which fails by chance at most once in a million runs on a correct
engine; see :mod:`drivetrain_conformance.references.goodness_of_fit`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend.base import GenerateRequest
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, CompletionChunk, GenerationOutput
from drivetrain.types.sampling import ActionMask, DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.assertions.common_checks import check_flat_nucleus, fields_of_sampling
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_conformance.engine_model.mixed_fields import check_draws_differ
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, check_held, ordinary_ids
from drivetrain_conformance.references.goodness_of_fit import FALSE_ALARM, Tally
from drivetrain_conformance.references.oracle import Logits, log_softmax
from drivetrain_conformance.references.reference_sampling import FLAT, step, steps, with_effective_filters

_PROMPTS: Final = 4
"""Prompts over which the draws of a statistical case are spread."""
_AT_ONCE: Final = 1024
"""Maximum number of samples of one prompt in one call."""
_FAR_BACK: Final = 160
"""Length of a prompt or sample whose first tokens must still count for the penalties of the last ones."""
_VERY_FAR_BACK: Final = 640
"""The same for samples that are made once, together: more than twice any number that an engine's buffers suggest."""
_LONG_PROMPT: Final = 900
"""Length of a prompt whose end alone holds a token that must count for the repetition penalty."""
_CROWD: Final = 96
"""Samples in one batch whose draws must differ: three times as many as the parts into which an engine may split it."""
_HOT: Final = 8.0
_STREAM: Final = 20
"""Tokens of the samples whose random numbers are compared with each other."""
_SEED_BITS: Final = 63
_BITS: Final = (0, 9, 31, 62)
"""Bits of a seed that narrower numbers lose, low and high."""
_LIKELY: Final = 0.92
"""Probability of the most likely token where the others' are looked at, which ``_HOT`` makes nearly equal."""
_MOST_BIASES: Final = 4096
"""Maximum number of biases of one request."""
_SPARED: Final = 16
"""Ids that a logit processor with many ids does not name."""
_WAVE: Final = 640
"""Length of a sample that is compared with itself: more than twice any period that an engine's buffers suggest."""
_OVERLAP: Final = 40
"""Tokens of it, at least, that are compared with later ones."""
_SEQUENCES: Final = 256
"""Sampled sequences in a check of a token other than the first."""
_DETERMINISTIC: Final = {"deterministic": True}
_BITWISE: Final = (
    *(Capability.DETERMINISTIC, Capability.SEED, Capability.LOGPROBS_TEMPERATURE),
    Capability.TOP_LOGPROBS,
)
"""Capabilities of cases that compare bits of answers."""


# First tokens -----------------------------------------------------------------------------------------------------


@case()
async def temperature_one_draws_from_the_model(bench: Bench) -> None:
    """First tokens at temperature 1 follow the model's own distribution."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1))


@case()
async def a_low_temperature_sharpens(bench: Bench) -> None:
    """First tokens at temperature 0.5 follow softmax(logits / 0.5)."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, temperature=0.5))
    if bench.claims(Capability.LOGIT_BIAS):
        # Only tokens that are almost equally likely show that a very low temperature is not greedy.
        prompt, pair = bench.prompt(), bench.rng.sample(ordinary_ids(bench.engine), 2)
        row = bench.oracle().logits(prompt)[-1]
        bias = {token: float(row.max() - row[token]) + 8.0 for token in pair}
        bias[pair[0]] += 0.04
        params = SamplingParams(max_new_tokens=1, temperature=0.02, logit_bias=bias)
        await _check_first_tokens(bench, params, prompts=[prompt], marked=pair[:1])


@case()
async def a_high_temperature_flattens(bench: Bench) -> None:
    """First tokens at temperature 16 follow softmax(logits / 16)."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, temperature=16.0))


@case(Capability.TOP_K)
async def top_k_keeps_the_k_most_likely(bench: Bench) -> None:
    """With top_k=6 only the six most likely tokens are drawn, in their proportions; a large top_k keeps many."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, top_k=6))
    prompts = bench.prompts(_PROMPTS)
    drawn = await _draw(bench, prompts, SamplingParams(max_new_tokens=1, top_k=200, temperature=4.0))
    ranks: list[int] = []
    for prompt, completions in zip(prompts, drawn, strict=True):
        row = bench.oracle().logits(prompt)[-1]
        ranks += [int((row > row[completion.token_ids[0]]).sum()) for completion in completions]
    assert max(ranks) > 130, f"with top_k=200 no token beyond the {max(ranks) + 1} most likely was drawn"


@case(Capability.TOP_P)
async def top_p_keeps_the_nucleus(bench: Bench) -> None:
    """With top_p=0.5 only the smallest set of likely tokens with half the probability, after temperature, is drawn."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, top_p=0.5, temperature=0.7))


@case(Capability.MIN_P)
async def min_p_drops_the_unlikely(bench: Bench) -> None:
    """With min_p=0.3 only tokens with at least 0.3 of the top token's probability, after temperature, are drawn."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, min_p=0.3, temperature=1.7))


@case(Capability.LOGIT_BIAS)
async def logit_bias_is_added(bench: Bench) -> None:
    """Biased tokens are drawn as often as their changed logits say; with -100 practically never."""
    likely, less, never = bench.prompt(3)
    bias = {likely: 3.0, less: -3.0, never: -100.0}
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, logit_bias=bias), marked=[likely])
    await _check_unlikely_tokens(bench)


async def _check_unlikely_tokens(bench: Bench) -> None:
    """Check that many different tokens are drawn beside one that has nearly all of the probability.

    A random number of a few bits leaves out most of them, and gives their share to a few.
    """
    prompt, likely = bench.prompt(), bench.rng.choice(ordinary_ids(bench.engine))
    row = bench.oracle().logits(prompt)[-1] / _HOT
    rest = np.exp(np.delete(row, likely))
    bias = _HOT * float(np.log(rest.sum() * _LIKELY / (1 - _LIKELY)) - row[likely])
    params = SamplingParams(max_new_tokens=1, temperature=_HOT, logit_bias={likely: bias})
    (completions,) = await _draw(bench, [prompt], params)
    drawn = {completion.token_ids[0] for completion in completions} - {likely}
    expected = float(np.sum(1 - (1 - rest / rest.sum() * (1 - _LIKELY)) ** len(completions)))
    # Chernoff's bound: whether one token was drawn makes it no likelier that another one was.
    fewest = expected - math.sqrt(2 * expected * math.log(1 / FALSE_ALARM))
    assert len(drawn) >= fewest, (
        f"beside a token with a probability of {_LIKELY}, {len(completions)} draws found {len(drawn)} others; "
        f"expected about {expected:.0f}, and at least {fewest:.0f}"
    )


@case(Capability.REPETITION_PENALTY)
async def repetition_penalty_counts_the_prompt(bench: Bench) -> None:
    """With repetition_penalty=2 tokens of the prompt are drawn less often, as their penalised logits say."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, repetition_penalty=2.0), prompt_length=120)


@case(Capability.REPETITION_PENALTY)
async def a_repetition_penalty_below_one_rewards(bench: Bench) -> None:
    """With repetition_penalty=0.6 tokens of the prompt are drawn more often."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, repetition_penalty=0.6), prompt_length=48)


@case(Capability.TOP_K, Capability.TOP_P)
async def top_p_is_a_share_of_what_top_k_left(bench: Bench) -> None:
    """With top_k=8 and top_p=0.6 the nucleus is taken from the distribution of the eight tokens."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, top_k=8, top_p=0.6))


@case(Capability.TOP_P, Capability.MIN_P)
async def min_p_comes_after_top_p(bench: Bench) -> None:
    """With min_p=0.4 and top_p=0.6 the nucleus is taken from all tokens, before min_p."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, top_p=0.6, min_p=0.4))


@case(Capability.LOGIT_BIAS, Capability.REPETITION_PENALTY)
async def logit_bias_is_added_after_the_penalties(bench: Bench) -> None:
    """A bias is added to a logit after the repetition penalty, and is itself not penalised."""
    prompts = bench.prompts(_PROMPTS, length=48)
    # A penalty applied after the bias would take much of the raised logit away again.
    bias = {token: 4.0 for prompt in prompts for token in prompt[:2]}
    params = SamplingParams(max_new_tokens=1, repetition_penalty=1.6, logit_bias=bias)
    await _check_first_tokens(bench, params, prompts=prompts, marked=bias)


@case(Capability.TOP_K, Capability.TOP_P, Capability.MIN_P, Capability.LOGIT_BIAS, Capability.REPETITION_PENALTY)
async def everything_at_once_follows_the_documented_order(bench: Bench) -> None:
    """Penalty, bias, temperature, top-k, top-p and min-p together give the reference's distribution."""
    bias = {token: 1.5 for token in bench.prompt(4)}
    params = SamplingParams(max_new_tokens=1, temperature=1.3, repetition_penalty=1.3, logit_bias=bias)
    prompts = bench.prompts(_PROMPTS, 16)
    rows = np.stack([bench.oracle().logits(prompt)[-1] for prompt in prompts])
    await _check_first_tokens(bench, with_effective_filters(params, prompts, rows), prompts=prompts)


@case(Capability.SEED)
async def seeded_draws_follow_the_model(bench: Bench) -> None:
    """The samples of one seed, drawn with consecutive seeds, follow the model's distribution."""
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, seed=1))


async def _check_first_tokens(
    bench: Bench,
    params: SamplingParams,
    *,
    prompt_length: int = 6,
    prompts: Sequence[list[int]] | None = None,
    marked: Collection[int] = (),
) -> None:
    prompts = prompts or bench.prompts(_PROMPTS, prompt_length)
    drawn = await _draw(bench, prompts, params)
    tally = Tally(_slack(bench, params))
    for prompt, completions in zip(prompts, drawn, strict=True):
        tokens = [completion.token_ids[0] for completion in completions]
        penalised = prompt if params.repetition_penalty != 1 else ()
        _count(bench, tally, tokens, bench.oracle().logits(prompt)[-1], params, prompt, [], {*marked, *penalised})
    tally.check()


async def _draw(bench: Bench, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[Completion]]:
    """Return completions of each prompt, ``profile.samples`` in all."""
    each = max(1, bench.profile.samples // len(prompts))
    params = params.model_copy(update={"n": min(each, _AT_ONCE)})
    drawn: list[list[Completion]] = [[] for _ in prompts]
    for turn in range(-(-each // _AT_ONCE)):
        if params.seed is not None:
            params = params.model_copy(update={"seed": params.seed + turn * _AT_ONCE})
        for group, found in zip(drawn, (await bench.engine.generate(list(prompts), params)).by_prompt(), strict=True):
            group += found
    return drawn


def _slack(bench: Bench, params: SamplingParams) -> float:
    """Return the tolerance of a logprob of the sampling distribution, in nats; a low temperature magnifies it."""
    coldest = params.temperature or 1.0
    for processor in params.logit_processors:
        if isinstance(processor, TemperatureSchedule):
            coldest *= min(processor.start, processor.end, 1.0)
    return 2 * bench.tolerance() / coldest


def _count(
    bench: Bench,
    tally: Tally,
    tokens: Sequence[int],
    logits: Logits,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    marked: Collection[int] = (),
) -> None:
    """Assert that the params allow each token. Count the tokens, unless rounding may change which are allowed."""
    reference = step(logits, params, prompt, generated, bench.tolerance())
    impossible = sorted({token for token in tokens if not reference.possibly[token]})
    assert not impossible, f"tokens {impossible} were drawn, which the params rule out"
    if reference.is_clear:
        tally.add(tokens, reference.probabilities, marked)


# Later tokens -----------------------------------------------------------------------------------------------------


@case()
async def later_tokens_follow_what_was_drawn(bench: Bench) -> None:
    """The eighth token of a sequence follows the model's distribution given the seven drawn before it."""
    await _check_later_token(bench, SamplingParams(max_new_tokens=8))


@case()
async def each_step_is_drawn_anew(bench: Bench) -> None:
    """A token's position within its distribution does not predict the next token's position.

    Nor do the draws of a long sample repeat earlier ones, with a seed or without.
    """
    params = SamplingParams(max_new_tokens=3, n=_SEQUENCES // 2)
    drawn = (await bench.engine.generate(bench.prompt(), params)).completions
    whole = [completion for completion in drawn if len(completion.token_ids) == 3]
    rows = [np.exp(log_softmax(bench.output_logits(completion)[-2:])) for completion in whole]
    # An engine that used a random number twice would draw from the same part of its ordered distribution again.
    for order in (_by_id, _by_rank):
        tally = Tally(_slack(bench, params))
        for completion, (before, after) in zip(whole, rows, strict=True):
            first, previous, last = completion.token_ids
            same_part = np.flatnonzero(_parts(after, order) == _parts(before, order)[previous])
            tally.add([last], after, {first, previous, *same_part.tolist()})
        tally.check()

    if bench.claims(Capability.IGNORE_EOS):
        await _check_draws_have_no_period(bench)


async def _check_draws_have_no_period(bench: Bench) -> None:
    """Check that long samples do not draw the same tokens again, where the context changes no draw."""
    seeds: list[int | None] = [None, 5] if bench.claims(Capability.SEED) else [None]
    length = min(_WAVE, bench.engine.model_info.context_length - 6)
    params = [SamplingParams(max_new_tokens=length, temperature=FLAT, seed=one, ignore_eos=True) for one in seeds]
    for ids in _ids(await bench.engine.generate([bench.prompt()] * len(seeds), params)):
        drawn = np.array(ids)
        for period in range(1, length - _OVERLAP):
            alike = float(np.mean(drawn[period:] == drawn[:-period]))
            assert alike < 0.5, f"after {period} tokens a sample draws the same ones again, {alike:.0%} of them"


def _by_id(probabilities: Logits) -> NDArray[np.intp]:
    return np.arange(len(probabilities))


def _by_rank(probabilities: Logits) -> NDArray[np.intp]:
    return np.argsort(-probabilities, kind="stable")


def _parts(probabilities: Logits, order: Callable[[Logits], NDArray[np.intp]]) -> NDArray[np.intp]:
    """Return, for each token, the eighth of the ordered distribution in which the middle of its share lies."""
    ranked = order(probabilities)
    middles = np.cumsum(probabilities[ranked]) - probabilities[ranked] / 2
    parts = np.empty(len(probabilities), dtype=np.intp)
    parts[ranked] = (middles * 8).astype(np.intp)
    return parts


@case(Capability.FREQUENCY_PENALTY)
async def frequency_penalty_counts_what_was_generated(bench: Bench) -> None:
    """With a frequency penalty of -2 a token recurs more often with each time that it was generated."""
    await _check_later_token(bench, SamplingParams(max_new_tokens=16, frequency_penalty=-2.0))


@case(Capability.PRESENCE_PENALTY)
async def presence_penalty_sees_what_was_generated(bench: Bench) -> None:
    """With a presence penalty of -2 a generated token recurs more often, regardless of how often it occurred."""
    await _check_later_token(bench, SamplingParams(max_new_tokens=12, presence_penalty=-2.0))


async def _check_later_token(bench: Bench, params: SamplingParams) -> None:
    """Check the last token of each sequence: given the tokens before them, these are independent draws."""
    params = params.model_copy(update={"n": _SEQUENCES})
    completions = (await bench.engine.generate(bench.prompt(), params)).completions
    tally = Tally(_slack(bench, params))
    for completion in completions:
        if len(completion.token_ids) == params.max_new_tokens:
            *before, last = completion.token_ids
            logits = bench.output_logits(completion)[-1]
            _count(bench, tally, [last], logits, params, completion.prompt_token_ids, before, set(before))
    tally.check()


# Greedy -----------------------------------------------------------------------------------------------------------


@case()
async def temperature_zero_repeats(bench: Bench) -> None:
    """At temperature 0 a prompt has one answer: in every call, and in every sample of one call."""
    prompt = bench.prompt()
    params = SamplingParams(temperature=0, max_new_tokens=16)
    answers = [(await bench.engine.generate(prompt, params)).completions[0].token_ids for _ in range(3)]
    samples = (await bench.engine.generate(prompt, params.model_copy(update={"n": 3}))).completions
    answers += [sample.token_ids for sample in samples]
    _assert_agree(bench, answers, [answers[0]] * len(answers))


@case(Capability.TOP_K)
async def top_k_of_one_is_greedy(bench: Bench) -> None:
    """With top_k=1 the most likely token is drawn at any temperature."""
    await _check_takes_the_best(bench, SamplingParams(temperature=1.7, top_k=1, max_new_tokens=12))


@case(Capability.TOP_P)
async def a_small_top_p_is_greedy(bench: Bench) -> None:
    """With a tiny top_p only the most likely token is drawn."""
    await _check_takes_the_best(bench, SamplingParams(top_p=1e-6, max_new_tokens=12))
    await check_flat_nucleus(bench)


@case(Capability.MIN_P)
async def min_p_of_one_is_greedy(bench: Bench) -> None:
    """With min_p=1 only the most likely token is drawn."""
    await _check_takes_the_best(bench, SamplingParams(min_p=1.0, max_new_tokens=12))


@case(Capability.REPETITION_PENALTY)
async def greedy_follows_the_repetition_penalty(bench: Bench) -> None:
    """At temperature 0 the token with the largest penalised logit is taken; prompt and output tokens count once."""
    await _check_takes_the_best(bench, bench.long(_FAR_BACK, repetition_penalty=1.4))
    await _check_takes_the_best(bench, bench.long(_FAR_BACK, repetition_penalty=9.0))
    params = SamplingParams(temperature=0, max_new_tokens=24, repetition_penalty=1.4)
    await _check_takes_the_best(bench, params, bench.prompts(3, _FAR_BACK))


@case(Capability.FREQUENCY_PENALTY)
async def greedy_follows_the_frequency_penalty(bench: Bench) -> None:
    """At temperature 0 each occurrence of a generated token lowers its logit by the frequency penalty."""
    await _check_takes_the_best(bench, SamplingParams(temperature=0, max_new_tokens=24, frequency_penalty=-0.3))
    await _check_takes_the_best(bench, bench.long(_FAR_BACK, frequency_penalty=0.7))
    if bench.claims(Capability.LOGIT_BIAS):
        # A favourite recurs a hundred times until its penalty outweighs its bias.
        params = bench.long(_FAR_BACK, frequency_penalty=0.3, logit_bias={bench.prompt(1)[0]: 30.0})
        await _check_takes_the_best(bench, params, bench.prompts(1))


@case(Capability.PRESENCE_PENALTY)
async def greedy_follows_the_presence_penalty(bench: Bench) -> None:
    """At temperature 0 the presence penalty lowers the logit of a generated token once."""
    await _check_takes_the_best(bench, bench.long(_FAR_BACK, presence_penalty=1.2))


@case(Capability.LOGIT_BIAS)
async def greedy_follows_the_logit_bias(bench: Bench) -> None:
    """At temperature 0 a large logit bias forces a token or rules it out."""
    free = await bench.greedy(bench.prompts(3))
    likely = {completion.token_ids[0] for completion in free}
    banned, forced = free[0].token_ids[0], next(token for token in bench.prompt(12) if token not in likely)
    params = SamplingParams(temperature=0, max_new_tokens=12, logit_bias={banned: -100.0})
    for completion in await _check_takes_the_best(bench, params, [free[0].prompt_token_ids]):
        assert banned not in completion.token_ids
    params = SamplingParams(temperature=0, max_new_tokens=5, logit_bias={forced: 100.0})
    for completion in await _check_takes_the_best(bench, params):
        assert completion.token_ids == [forced] * 5
    # Larger biases than the OpenAI API takes are not equal to its largest.
    larger = SamplingParams(temperature=0, max_new_tokens=5, logit_bias={forced: 300.0, **dict.fromkeys(likely, 200.0)})
    for completion in await _check_takes_the_best(bench, larger):
        assert completion.token_ids == [forced] * 5
    # Engines may support only a few dozen biases, or a few hundred.
    count = min(bench.engine.model_info.vocab_size, _MOST_BIASES)
    many = {token: bench.rng.uniform(-8.0, 8.0) for token in bench.rng.sample(range(count), count)}
    await _check_takes_the_best(bench, bench.long(12, logit_bias=many))


@case(
    Capability.REPETITION_PENALTY,
    Capability.FREQUENCY_PENALTY,
    Capability.PRESENCE_PENALTY,
    Capability.LOGIT_BIAS,
)
async def greedy_follows_penalties_and_bias_together(bench: Bench) -> None:
    """At temperature 0 penalties and bias together choose the reference's token at every step."""
    params = SamplingParams(
        temperature=0,
        max_new_tokens=24,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.4,
        logit_bias={token: 1.5 for token in bench.prompt(6)},
    )
    await _check_takes_the_best(bench, params)
    await _check_nothing_drawn_is_forgotten(bench)
    await _check_the_end_of_a_long_prompt_counts(bench)


async def _check_nothing_drawn_is_forgotten(bench: Bench) -> None:
    """Check strong penalties in long samples, where tokens that were drawn at the beginning alone decide."""
    length = min(_VERY_FAR_BACK, bench.engine.model_info.context_length - 6)
    penalties = ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0})
    params = [SamplingParams.model_validate({**bench.long(length).model_dump(), **fields}) for fields in penalties]
    output = await bench.engine.generate(bench.prompts(len(params)), params)
    for completion in output.completions:
        _assert_takes_the_best(bench, completion, params[completion.prompt_index])


async def _check_the_end_of_a_long_prompt_counts(bench: Bench) -> None:
    """Check a greedy choice that depends on the penalty of a token which only the end of a long prompt holds."""
    ids = ordinary_ids(bench.engine)
    length = min(_LONG_PROMPT, bench.engine.model_info.context_length * 3 // 4)
    late = bench.rng.sample(ids, 8)
    early = [token for token in ids if token not in late]
    for prompt in (
        [*(bench.rng.choice(early) for _ in range(length - len(late))), *late],
        [*late, *(bench.rng.choice(early) for _ in range(length - len(late)))],
    ):
        row = bench.oracle().logits(prompt)[-1]
        params = bench.long(4, repetition_penalty=2.0)
        penalised = step(row, params, prompt, [], bench.tolerance()).scaled
        token = max(late, key=lambda one: float(row[one] - penalised[one]))
        # With half of the penalty, this token would be the best.
        bias = float(np.delete(penalised, token).max() - (penalised[token] + row[token]) / 2)
        params = params.model_copy(update={"logit_bias": {token: bias}})
        await _check_takes_the_best(bench, params, [prompt])


async def _check_takes_the_best(
    bench: Bench, params: SamplingParams, prompts: Sequence[list[int]] | None = None
) -> list[Completion]:
    output = await bench.engine.generate(list(prompts or bench.prompts(3)), params)
    for completion in output.completions:
        _assert_takes_the_best(bench, completion, params)
    return output.completions


def _assert_takes_the_best(bench: Bench, completion: Completion, params: SamplingParams) -> None:
    rows = steps(completion, bench.output_logits(completion), params, bench.tolerance())
    for at, (reference, token) in enumerate(zip(rows, completion.token_ids, strict=True)):
        lag = reference.lag(token) * (params.temperature or 1.0)
        assert lag <= 2 * bench.tolerance(), (
            f"token {at} is {token}, {lag:.3g} below the best after penalties and bias, {reference.scaled.argmax()}"
        )


# Seeds ------------------------------------------------------------------------------------------------------------


@case(Capability.SEED)
async def a_seed_fixes_the_output(bench: Bench) -> None:
    """The same seed gives the same tokens alone, in a batch, in another order, and beside and after other requests.

    Nor does it matter that another engine has made the first of them, where the backend takes over such requests.
    """
    prompts = [bench.prompt(length) for length in (4, 7, 13, 21)]
    params = [SamplingParams(max_new_tokens=16, seed=seed) for seed in (11, 12, 2**62, 0)]
    alone = [_ids(await bench.engine.generate(prompt, one))[0] for prompt, one in zip(prompts, params, strict=True)]
    together = _ids(await bench.engine.generate(prompts, params))
    backwards = _ids(await bench.engine.generate(prompts[::-1], params[::-1]))[::-1]
    others = SamplingParams(max_new_tokens=24, n=4)
    beside, _ = await asyncio.gather(
        bench.engine.generate(prompts, params), bench.engine.generate(bench.prompts(5), others)
    )
    after = _ids(await bench.engine.generate(prompts, params))
    for again in (together, backwards, _ids(beside), after):
        _assert_agree(bench, again, alone)
    if bench.engine.parts.backend.counts_resumed_tokens:
        await _check_it_resumes(bench)


async def _check_it_resumes(bench: Bench) -> None:
    """Check that a request whose first tokens were made by an engine that was lost goes on as it would have there.

    A fleet hands such a request to another engine. Its tokens count for the seed, penalties and schedules.
    """
    fields: dict[str, object] = {
        "max_new_tokens": _STREAM,
        "seed": 23,
        "ignore_eos": bench.claims(Capability.IGNORE_EOS),
    }
    for needed, name, value in (
        (Capability.FREQUENCY_PENALTY, "frequency_penalty", 1.5),
        (Capability.LOGIT_PROCESSORS, "logit_processors", (TemperatureSchedule(start=0.5, end=3.0, steps=_STREAM),)),
    ):
        if bench.claims(needed):
            fields[name] = value
    params = SamplingParams.model_validate(fields)
    whole = (await bench.engine.generate(bench.prompts(3), params)).completions
    rest = [await _resumed(bench.engine, one, params, len(one.token_ids) // 2) for one in whole]
    _assert_agree(bench, rest, [one.token_ids[len(one.token_ids) // 2 :] for one in whole])


async def _resumed(engine: InferenceEngine, made: Completion, params: SamplingParams, count: int) -> list[int]:
    """Let the backend make the rest of a completion, of which ``count`` tokens were made elsewhere."""
    assert params.max_new_tokens is not None
    request = GenerateRequest(
        request_id=f"resumed-{made.request_id}",
        prompt_token_ids=[*made.prompt_token_ids, *made.token_ids[:count]],
        params=params,
        max_new_tokens=params.max_new_tokens - count,
        stop_token_ids=() if params.ignore_eos else engine.model_info.eos_token_ids,
        logprobs_mode=LogprobsMode.RAW,
        seed=params.seed,
        resumed_tokens=count,
    )
    return (await engine.parts.backend.generate(request)).token_ids


@case(Capability.SEED, slow=True)
async def another_seed_draws_otherwise(bench: Bench) -> None:
    """Requests that differ only by their seed draw different tokens. Samples of one seed differ from each other too."""
    prompts = bench.prompts(3)
    params = [SamplingParams(max_new_tokens=24, n=2, seed=seed) for seed in (1, 1001, 2**32 + 1, 2**53, 2**63 - 1)]
    drawn = [await bench.engine.generate(prompts, one) for one in params]
    _assert_differ([sample for output in drawn for sample in _by_sample(output)])
    await _check_a_crowd_differs(bench, seed=7)
    await _check_every_bit_of_a_seed_counts(bench)
    await _check_a_seed_counts_beside_each_field(bench)
    await _check_late_draws_differ(bench)
    await _check_streams_do_not_overlap(bench)


async def _check_every_bit_of_a_seed_counts(bench: Bench) -> None:
    """Check that seeds which differ in one bit alone draw differently, whichever bit it is."""
    seed = bench.rng.getrandbits(_SEED_BITS)
    fields = {"max_new_tokens": 16, "temperature": _HOT, "ignore_eos": bench.claims(Capability.IGNORE_EOS)}
    params = [
        SamplingParams.model_validate({**fields, "seed": each})
        for each in (seed, *(seed ^ 1 << bit for bit in range(_SEED_BITS)))
    ]
    samples = _ids(await bench.engine.generate([bench.prompt()] * len(params), params))
    _assert_differ([tuple(ids) for ids in samples if len(ids) == 16])


async def _check_a_seed_counts_beside_each_field(bench: Bench) -> None:
    """Check that low and high bits of a seed count in requests that set another field of sampling."""
    beside = fields_of_sampling(bench)
    fixed = {"max_new_tokens": 16, "temperature": FLAT, "ignore_eos": bench.claims(Capability.IGNORE_EOS)}
    seed = bench.rng.getrandbits(_SEED_BITS)
    seeds = [seed, *(seed ^ 1 << bit for bit in _BITS)]
    params = [SamplingParams.model_validate({**fixed, **field, "seed": one}) for field in beside for one in seeds]
    samples = iter(_ids(await bench.engine.generate([bench.prompt()] * len(params), params)))
    for field in beside:
        first, *others = [next(samples) for _ in seeds]
        for other, sample in zip(seeds[1:], others, strict=True):
            check_draws_differ(first, sample, f"with {field}, seeds {seed} and {other}")


async def _check_late_draws_differ(bench: Bench) -> None:
    """Check that each bit of a seed counts for the last tokens of long requests as well, and after a freeze."""
    seed = bench.rng.getrandbits(_SEED_BITS)
    seeds = [seed, *(seed ^ 1 << bit for bit in _BITS)]
    for mode in (None, *bench.freezes()):
        params = [bench.long(temperature=FLAT, seed=one) for one in seeds]
        async with bench.in_flight([bench.prompt()] * len(seeds), params) as task:
            if mode is not None:
                await bench.engine.pause_generation(mode)
                await check_held(bench.engine, task)
                await bench.engine.continue_generation()
            samples = _ids(await task)
        frozen = "" if mode is None else f", frozen {mode.value},"
        for other, sample in zip(seeds[1:], samples[1:], strict=True):
            check_draws_differ(samples[0], sample, f"seeds {seed} and {other}{frozen}")


async def _check_streams_do_not_overlap(bench: Bench) -> None:
    """Check that no sample draws as one of another seed does a few tokens later, where the context changes no draw."""
    params = SamplingParams(
        max_new_tokens=_STREAM, temperature=FLAT, n=4, seed=11, ignore_eos=bench.claims(Capability.IGNORE_EOS)
    )
    samples = _ids(await bench.engine.generate(bench.prompt(), params))
    for one, other in permutations([ids for ids in samples if len(ids) == _STREAM], 2):
        for later in range(1, 4):
            alike = sum(a == b for a, b in zip(one[later:], other, strict=False))
            assert alike < _STREAM // 2, (
                f"of two seeds, one draws {later} tokens later what the other does: {one} and {other}"
            )


@case(Capability.SEED)
async def sample_i_uses_seed_plus_i(bench: Bench) -> None:
    """Sample i of a request with seed s equals the single sample of a request with seed s + i."""
    prompt = bench.prompt()
    samples = _ids(await bench.engine.generate(prompt, SamplingParams(max_new_tokens=12, n=4, seed=77)))
    singles = [
        _ids(await bench.engine.generate(prompt, SamplingParams(max_new_tokens=12, seed=77 + index)))[0]
        for index in range(4)
    ]
    _assert_agree(bench, singles, samples)


@case(Capability.SEED)
async def a_seed_is_no_ones_elses(bench: Bench) -> None:
    """Requests without a seed, beside one that has one, are drawn anew each time."""
    seeds = (5, 6, 7, 8)
    params = [*(SamplingParams(max_new_tokens=24, seed=seed) for seed in seeds), SamplingParams(max_new_tokens=24, n=4)]
    prompts = [bench.prompt()] * len(params)
    first, second = [_ids(await bench.engine.generate(prompts, params)) for _ in range(2)]
    count = len(seeds)
    _assert_agree(bench, second[:count], first[:count])
    assert first[count:] != second[count:], f"what had no seed was drawn alike twice: {first[count:]}"


@case()
async def without_a_seed_nothing_repeats(bench: Bench) -> None:
    """Samples drawn without a seed differ, within a call and from call to call."""
    prompts = bench.prompts(3)
    params = SamplingParams(max_new_tokens=24, n=4)
    outputs = [await bench.engine.generate(prompts, params) for _ in range(2)]
    if bench.claims(Capability.STREAMING):
        for _ in range(2):
            chunks = [chunk async for chunk in bench.engine.generate_stream(prompts, params)]
            ended = [chunk.completion for chunk in chunks if chunk.completion is not None]
            outputs.append(GenerationOutput(sorted(ended, key=lambda one: (one.prompt_index, one.sample_index))))
    _assert_differ([sample for output in outputs for sample in _by_sample(output)])
    await _check_a_crowd_differs(bench)


async def _check_a_crowd_differs(bench: Bench, seed: int | None = None) -> None:
    """Check that no two of many samples of one prompt, drawn in one batch from a flat distribution, are alike."""
    length, ignore_eos = 16, bench.claims(Capability.IGNORE_EOS)
    params = SamplingParams(max_new_tokens=length, temperature=4.0, n=_CROWD, seed=seed, ignore_eos=ignore_eos)
    samples = _ids(await bench.engine.generate(bench.prompt(), params))
    # Several may end after a token or two by chance.
    _assert_differ([tuple(ids) for ids in samples if len(ids) == length])


@case(Capability.SEED, own_engine=True, slow=True)
async def a_configured_seed_repeats_a_run(bench: Bench) -> None:
    """Two engines with the same configured seed answer the same calls alike; repeated calls to one differ."""
    drawn = []
    for _ in range(2):
        async with bench.open(seed=7) as engine:
            drawn.append(await _two_calls(engine))
    first, again = drawn
    assert first == again
    half = len(first) // 2
    assert first[:half] != first[half:], "the second call repeats the first"


async def _two_calls(engine: InferenceEngine) -> list[list[int]]:
    prompt = ordinary_ids(engine)[:6]
    own = SamplingParams(max_new_tokens=16, seed=3)
    _ids(await engine.generate(prompt, own))  # a request's own seed must not advance the configured seed's stream
    params = SamplingParams(max_new_tokens=16, n=2)
    return [ids for _ in range(2) for ids in _ids(await engine.generate(prompt, params))]


def _assert_agree(bench: Bench, again: Sequence[list[int]], before: Sequence[list[int]]) -> None:
    """Assert that outputs repeat: all of them, or most if the weights' dtype rounds coarsely enough to flip a token."""
    same = sum(one == other for one, other in zip(again, before, strict=True))
    wanted = len(before) if bench.tolerance() < 1e-2 else (len(before) + 1) // 2
    assert same >= wanted, f"{len(before) - same} of {len(before)} outputs differ: {again} instead of {before}"


def _assert_differ(drawn: Sequence[object]) -> None:
    assert len(set(drawn)) == len(drawn), f"two of these were drawn alike: {drawn}"


def _by_sample(output: GenerationOutput) -> list[tuple[tuple[int, ...], ...]]:
    """Return the tokens of each sample index for all prompts: a single completion may equal another by chance."""
    return [
        tuple(map(tuple, ids))
        for ids in zip(*([c.token_ids for c in group] for group in output.by_prompt()), strict=True)
    ]


def _ids(output: GenerationOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


# Deterministic ----------------------------------------------------------------------------------------------------


@case(Capability.DETERMINISTIC, Capability.SEED, Capability.LOGPROBS_TEMPERATURE, config=_DETERMINISTIC)
async def deterministic_logprobs_are_bitwise_the_same(bench: Bench) -> None:
    """With deterministic=True greedy tokens and logprobs are bitwise the same alone and in any batch."""
    prompts = [bench.prompt(length) for length in (3, 9, 17, 40, 6, 6, 25, 12)]
    alternatives = 3 if bench.claims(Capability.TOP_LOGPROBS) else 0
    params = [SamplingParams(temperature=0, max_new_tokens=16, logprobs=alternatives)] * len(prompts)
    alone = await _alone(bench, prompts, params)
    for count in (2, 8, 24):
        order = [index % len(prompts) for index in range(count)]
        bench.rng.shuffle(order)
        batch = await bench.engine.generate([prompts[i] for i in order], [params[i] for i in order])
        _assert_same_bits(batch.completions, [alone[i] for i in order])
    backwards = await bench.engine.generate(prompts[::-1], params)
    _assert_same_bits(backwards.completions, alone[::-1])
    seeded = [SamplingParams(max_new_tokens=24, seed=seed, logprobs=0, n=2) for seed in range(2)]
    mixed = await bench.engine.generate([*prompts, *prompts[:2]], [*params, *seeded])
    _assert_same_bits(mixed.completions[: len(prompts)], alone)


@case(Capability.DETERMINISTIC, Capability.SEED, config={"deterministic": True})
async def deterministic_samples_are_the_same(bench: Bench) -> None:
    """With deterministic=True seeded samples are the same alone and in any batch, in any dtype."""
    prompts = bench.prompts(4, length=9)
    params = [SamplingParams(max_new_tokens=24, seed=seed) for seed in range(4)]
    alone = [_ids(await bench.engine.generate(prompt, one))[0] for prompt, one in zip(prompts, params, strict=True)]
    others = bench.engine.generate(bench.prompts(5), SamplingParams(max_new_tokens=24, n=2))
    together, _ = await asyncio.gather(bench.engine.generate(prompts[::-1], params[::-1]), others)
    assert _ids(together)[::-1] == alone


@case(*_BITWISE, Capability.PREFIX_CACHE, config=_DETERMINISTIC)
async def deterministic_results_are_the_same_after_cached_prefixes(bench: Bench) -> None:
    """With deterministic=True results are bitwise the same with an empty prefix cache and with any cached prefix."""
    length = min(320, bench.engine.model_info.context_length // 2)
    whole = bench.prompt(length)
    prompts = [whole, whole[: length // 2], [*whole[: length * 2 // 3], *bench.prompt(9)], whole[:33]]
    params = _mixed_params(len(prompts))
    cold = []
    for prompt, one in zip(prompts, params, strict=True):
        await bench.engine.reset_prefix_cache()
        cold += (await bench.engine.generate(prompt, one)).completions
    turns = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, cold, strict=True)]
    await bench.engine.reset_prefix_cache()
    cold += await _alone(bench, turns, params)
    for order in (range(8), range(7, -1, -1)):
        answers = await _alone(bench, [[*prompts, *turns][i] for i in order], [params[i % 4] for i in order])
        _assert_same_bits(answers, [cold[i] for i in order])
    batch = await bench.engine.generate([*prompts, *turns], params * 2)
    _assert_same_bits(batch.completions, cold)


@case(*_BITWISE, config=_DETERMINISTIC)
async def deterministic_results_are_the_same_beside_a_long_prompt(bench: Bench) -> None:
    """With deterministic=True a long prompt and short ones beside it give bitwise the same results as alone."""
    length = min(700, bench.engine.model_info.context_length // 2)
    prompts = [bench.prompt(5), bench.prompt(length), bench.prompt(130), bench.prompt(20), bench.prompt(length - 77)]
    params = _mixed_params(len(prompts))
    alone = await _alone(bench, prompts, params)
    calls = [bench.engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs = await asyncio.gather(*calls)
    _assert_same_bits([output.completions[0] for output in outputs], alone)
    async with bench.in_flight(bench.prompts(3), bench.long(250)):
        beside = await bench.engine.generate(prompts[::-1], params[::-1])
    _assert_same_bits(beside.completions, alone[::-1])


@case(*_BITWISE, Capability.PAUSE_IN_PLACE, config=_DETERMINISTIC)
async def deterministic_results_are_the_same_after_a_freeze(bench: Bench) -> None:
    """With deterministic=True requests that were frozen in place, some twice, end with the bits of an unbroken run."""
    await _check_freezes(bench, PauseMode.IN_PLACE)


@case(*_BITWISE, Capability.PAUSE_RETRACT, config=_DETERMINISTIC)
async def deterministic_results_are_the_same_after_a_retraction(bench: Bench) -> None:
    """With deterministic=True requests that were retracted, some twice, end with the bits of an unbroken run."""
    await _check_freezes(bench, PauseMode.RETRACT)


async def _check_freezes(bench: Bench, mode: PauseMode) -> None:
    prompts = [bench.prompt(4), bench.prompt(140)]
    params = [bench.long(250, logprobs=3), bench.long(250, logprobs=3, temperature=1.0, seed=5)]
    alone = await _alone(bench, prompts, params)
    async with bench.in_flight(prompts, params) as task:
        await bench.engine.pause_generation(mode)
        await check_held(bench.engine, task)
        await bench.engine.continue_generation()
        late = asyncio.create_task(bench.engine.generate(prompts[::-1], params[::-1]))
        await bench.engine.pause_generation(mode)
        await bench.engine.continue_generation()
        _assert_same_bits((await task).completions, alone)
        _assert_same_bits((await late).completions, alone[::-1])


@case(*_BITWISE, Capability.STREAMING, Capability.ABORT, config=_DETERMINISTIC)
async def deterministic_results_are_the_same_beside_aborts_and_streams(bench: Bench) -> None:
    """With deterministic=True results are bitwise the same streamed, and beside streams and aborted requests."""
    prompts = [bench.prompt(length) for length in (7, 150, 21)]
    params = _mixed_params(len(prompts))
    alone = await _alone(bench, prompts, params)
    async with bench.in_flight(bench.prompts(3), bench.long(250), request_ids=["a", "b", "c"]):
        batch = asyncio.create_task(bench.engine.generate(prompts[::-1], params[::-1]))
        chunks: list[CompletionChunk] = []
        async for chunk in bench.engine.generate_stream(prompts, params):
            if not chunks:
                await bench.engine.abort("b")
            chunks.append(chunk)
        _assert_same_bits((await batch).completions, alone[::-1])
    ended = [chunk.completion for chunk in chunks if chunk.completion is not None]
    _assert_same_bits(sorted(ended, key=lambda completion: completion.prompt_index), alone)


@case(*_BITWISE, Capability.LORA, config={**_DETERMINISTIC, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8})
async def deterministic_results_are_the_same_beside_adapters(bench: Bench) -> None:
    """With deterministic=True requests with an adapter and without one are bitwise the same alone and together."""
    engine, prompts = bench.engine, [bench.prompt(length) for length in (5, 18, 150)]
    params = _mixed_params(len(prompts))
    alone: dict[str | None, list[Completion]] = {None: await _alone(bench, prompts, params)}
    names = ("one", "other")
    for seed, name in enumerate(names, 1):
        adapter = make_adapter(bench.model, bench.folder("adapter"), seed=seed, rank=4)
        await engine.load_lora_adapter(name, str(adapter.path))
    try:
        for name in names:
            alone[name] = await _alone(bench, prompts, params, lora=name)
        order = (None, *names, None, *reversed(names))
        together = await asyncio.gather(*(engine.generate(prompts, params, lora=name) for name in order))
        for which, output in zip(order, together, strict=True):
            _assert_same_bits(output.completions, alone[which])
    finally:
        for name in names:
            await engine.unload_lora_adapter(name)
    _assert_same_bits(await _alone(bench, prompts, params), alone[None])


@case(Capability.DETERMINISTIC, Capability.SCORE_TOKENS, Capability.SCORE_AT, config=_DETERMINISTIC)
async def deterministic_scores_are_bitwise_the_same(bench: Bench) -> None:
    """With deterministic=True scores are bitwise the same alone, together, and beside requests that generate."""
    length = min(300, bench.engine.model_info.context_length // 2)
    sequences = [bench.prompt(count) for count in (4, 30, length, 131)]

    async def scored(some: Sequence[list[int]]) -> list[tuple[bytes, ...]]:
        output = await bench.engine.compute_logprobs(list(some), temperature=0.7, top_k=4)
        return [_packed(completion) for completion in output.completions]

    alone = [(await scored([sequence]))[0] for sequence in sequences]
    async with bench.in_flight(bench.prompts(3), bench.long(250)):
        for order in ([3, 2, 1, 0], [0, 1, 2, 3] * 2):
            found = await scored([sequences[i] for i in order])
            assert found == [alone[i] for i in order], "scores differ in their last bits"


@case(Capability.DETERMINISTIC, Capability.HIDDEN_STATES, config=_DETERMINISTIC)
async def deterministic_hidden_states_are_bitwise_the_same(bench: Bench) -> None:
    """With deterministic=True hidden states are bitwise the same alone and in any batch."""
    prompts = [bench.prompt(length) for length in (3, 9, 140, 40, 6)]
    params = [SamplingParams(temperature=0, max_new_tokens=8, return_hidden_states=True)] * len(prompts)
    alone = await _alone(bench, prompts, params)
    again = await bench.engine.generate([*prompts[::-1], *prompts], params * 2)
    _assert_same_bits(again.completions, [*alone[::-1], *alone])


def _mixed_params(count: int) -> list[SamplingParams]:
    """Return params of greedy and seeded requests in turn, with alternatives."""
    return [SamplingParams(max_new_tokens=12, temperature=i % 2, seed=i, logprobs=3) for i in range(count)]


async def _alone(
    bench: Bench, prompts: Sequence[list[int]], params: Sequence[SamplingParams], lora: str | None = None
) -> list[Completion]:
    """Return the completion of each prompt, with no other request in the engine."""
    return [
        (await bench.engine.generate(prompt, one, lora=lora)).completions[0]
        for prompt, one in zip(prompts, params, strict=True)
    ]


def _assert_same_bits(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.token_ids == other.token_ids, "other tokens than alone"
        assert one.logprobs == other.logprobs, "logprobs differ in their last bits"
        assert one.top_logprobs == other.top_logprobs, "alternatives differ in their last bits"
        assert one.hidden_states == other.hidden_states, "hidden states differ in their last bits"


def _packed(completion: Completion) -> tuple[bytes, ...]:
    """Return the bytes of a completion's scores: the first logprob is NaN, which equals nothing."""
    scores = completion.scores
    assert scores is not None
    return scores.token_logprobs.tobytes(), scores.top_logprobs.tobytes(), scores.top_ids.tobytes()


# Logit processors -------------------------------------------------------------------------------------------------


@case(Capability.LOGIT_PROCESSORS)
async def an_action_mask_allows_nothing_else(bench: Bench) -> None:
    """Under an action mask only allowed tokens are drawn, at every step, in the model's own proportions.

    Processors that leave no token, by themselves or with min_new_tokens, are refused by name.
    """
    allowed = sorted(set(bench.prompt(16)))
    mask = ActionMask(allowed_token_ids=tuple(allowed))
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, logit_processors=(mask,)))
    output = await bench.engine.generate(
        bench.prompts(2), SamplingParams(max_new_tokens=16, n=2, logit_processors=(mask,), temperature=1.7)
    )
    for completion in output.completions:
        assert len(completion.token_ids) == 16, "EOS is not allowed, so nothing ends before its length"
        assert set(completion.token_ids) <= set(allowed)
    # Engines may take only a few dozen ids.
    prompt = bench.prompt()
    many = ActionMask(allowed_token_ids=tuple(_many_ids(bench, prompt)))
    params = SamplingParams(temperature=0, max_new_tokens=12, logit_processors=(many,))
    await _check_takes_the_best(bench, params, [prompt, *bench.prompts(2)])
    await _check_what_leaves_no_token_is_refused(bench, allowed)


async def _check_what_leaves_no_token_is_refused(bench: Bench, allowed: Sequence[int]) -> None:
    field = "sampling_params.logit_processors"
    everything = list(range(bench.engine.model_info.vocab_size))
    with refused(InvalidRequest, field=field, naming="whole vocabulary"):
        ban = {"kind": "disallowed_tokens", "token_ids": everything}
        await bench.engine.generate(bench.prompt(), {"logit_processors": [ban], "max_new_tokens": 2})
    if bench.claims(Capability.MIN_NEW_TOKENS):
        mask = {"kind": "action_mask", "allowed_token_ids": list(allowed)}
        for stops in (list(allowed), everything):
            params = {"logit_processors": [mask], "min_new_tokens": 2, "stop_token_ids": stops, "max_new_tokens": 4}
            with refused(InvalidRequest, field=field, naming="min_new_tokens"):
                await bench.engine.generate(bench.prompt(), params)


@case(Capability.LOGIT_PROCESSORS)
async def disallowed_tokens_are_never_drawn(bench: Bench) -> None:
    """Disallowed tokens are not drawn, however likely they are; the others keep their proportions."""
    free = await bench.greedy(bench.prompts(4))
    disallowed = tuple(sorted({token for completion in free for token in completion.token_ids}))
    processor = DisallowedTokens(token_ids=disallowed)
    params = SamplingParams(max_new_tokens=1, logit_processors=(processor,))
    await _check_first_tokens(bench, params, prompts=[completion.prompt_token_ids for completion in free])
    greedy = SamplingParams(max_new_tokens=12, temperature=0, logit_processors=(processor,))
    for completion in await _check_takes_the_best(bench, greedy, [free[0].prompt_token_ids]):
        assert set(completion.token_ids).isdisjoint(disallowed)
    prompt = bench.prompt()
    many = DisallowedTokens(token_ids=tuple(_many_ids(bench, prompt)))
    params = SamplingParams(temperature=0, max_new_tokens=12, logit_processors=(many,))
    await _check_takes_the_best(bench, params, [prompt, *bench.prompts(2)])


def _many_ids(bench: Bench, prompt: list[int]) -> list[int]:
    """Return nearly all ids of the vocabulary, or thousands, the one that ``prompt`` makes most likely last."""
    likely = np.argsort(bench.oracle().logits(prompt)[-1])[-_MOST_BIASES:].tolist()
    spared = {*bench.rng.sample(likely[:-1], _SPARED), *bench.engine.model_info.eos_token_ids}
    return [token for token in likely if token not in spared]


def _shuffled_ids(bench: Bench) -> list[int]:
    ids = ordinary_ids(bench.engine)
    return bench.rng.sample(ids, len(ids))


@case(Capability.LOGIT_PROCESSORS)
async def a_temperature_schedule_moves_from_start_to_end(bench: Bench) -> None:
    """A temperature schedule gives the first token its start temperature, and tokens after its last step the end."""
    schedule = TemperatureSchedule(start=0.4, end=2.0, steps=3)
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, logit_processors=(schedule,)))
    for count in (2, 5):
        await _check_later_token(bench, SamplingParams(max_new_tokens=count, logit_processors=(schedule,)))
    if bench.claims(Capability.LOGPROBS_PROCESSED):
        await _check_schedules_step_by_step(bench)


async def _check_schedules_step_by_step(bench: Bench) -> None:
    """Check the temperature of each token by its logprob: draws alone do not tell a step from the next one."""
    given = [(0.5, 4.0, 6), (3.0, 0.7, 11), (0.8, 2.0, 2), (1.5, 0.5, 1)]
    schedules = [TemperatureSchedule(start=start, end=end, steps=count) for start, end, count in given]
    # Each divides the logits, so two of them multiply.
    for chosen in (*([one] for one in schedules), schedules[1:3]):
        params = SamplingParams(
            max_new_tokens=16, logprobs=0, logprobs_mode=LogprobsMode.PROCESSED, logit_processors=tuple(chosen)
        )
        for completion in (await bench.engine.generate(bench.prompts(2), params)).completions:
            assert completion.logprobs is not None
            rows = steps(completion, bench.output_logits(completion), params, bench.tolerance())
            for at, (row, token) in enumerate(zip(rows, completion.token_ids, strict=True)):
                off = abs(completion.logprobs[at] - float(row.processed[token]))
                said = " and ".join(f"from {one.start} to {one.end} in {one.steps} steps" for one in chosen)
                assert off <= _slack(bench, params), (
                    f"with a temperature {said}, the logprob of token {at} is {off:.3g} nats off"
                )


@case(Capability.LOGIT_PROCESSORS)
async def processors_act_together(bench: Bench) -> None:
    """An action mask, disallowed tokens and a schedule in one request all hold."""
    allowed = sorted(set(bench.prompt(24)))
    processors = (
        ActionMask(allowed_token_ids=tuple(allowed)),
        DisallowedTokens(token_ids=tuple(allowed[:4])),
        TemperatureSchedule(start=2.0, end=0.5, steps=2),
    )
    await _check_first_tokens(bench, SamplingParams(max_new_tokens=1, logit_processors=processors))
    await _check_several_of_a_kind_act_together(bench)
    if bench.claims(Capability.LOGIT_BIAS):
        # No bias brings back a token that a processor rules out.
        other = next(token for token in ordinary_ids(bench.engine) if token not in allowed)
        for one, token in zip(processors, (other, allowed[0]), strict=False):
            params = SamplingParams(temperature=0, max_new_tokens=6, logit_processors=(one,), logit_bias={token: 300.0})
            await _check_takes_the_best(bench, params)


async def _check_several_of_a_kind_act_together(bench: Bench) -> None:
    """Check that of several masks and lists of disallowed ids in one request each holds, in either order."""
    ids, others = _shuffled_ids(bench)[:32], _shuffled_ids(bench)[:32]
    masks = (ActionMask(allowed_token_ids=tuple(ids)), ActionMask(allowed_token_ids=tuple(ids[24:] + others)))
    bans = (DisallowedTokens(token_ids=tuple(ids)), DisallowedTokens(token_ids=tuple(others)))
    for pair in (masks, masks[::-1], bans, bans[::-1]):
        params = bench.long(8, logit_processors=pair)
        for completion in await _check_takes_the_best(bench, params):
            drawn = set(completion.token_ids)
            assert params.allowed_token_ids is None or drawn <= params.allowed_token_ids, f"{drawn} leaves a mask"
            assert not drawn & params.disallowed_token_ids, f"{drawn} holds a disallowed id"
