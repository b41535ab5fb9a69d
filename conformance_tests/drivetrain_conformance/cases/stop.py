"""Stop conditions: where generation ends, and its ids and text, compared with a brute-force reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import InvalidRequest
from drivetrain.text.tokenizer import REPLACEMENT
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.common_checks import agrees_with_reference
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.stop_texts import (
    TOKENS,
    Fields,
    expressions,
    free_samples,
    letter_ids,
    pieces,
    plain,
    samples_of_spanning_characters,
    spanning_characters,
    stop_params,
)
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.random_property import random_property
from drivetrain_conformance.harness.testbench import Bench, ordinary_ids

_FORCE: Final = 100.0
_NEVER: Final = "never-[0-9]{9}"
_BACKTRACKS: Final = r"(?s:.|[\s\S])+\Z."
"""A regex that backtracks through all 2**n ways to match a text of n characters, and never matches."""
_LONG: Final = 200
"""Characters of a match: engines may look at the end of a text only."""
_MANY: Final = 20
"""Stops beside the one that matches: engines may take a few only."""
_MOST: Final = 1500
"""Stop token ids beside the one that matches: engines may have room for 128 or 1024."""
_KEEP: Final = {"include_stop_str_in_output": st.booleans()}


# Stop token ids ------------------------------------------------------------------------------------------------------


@case(Capability.STOP_TOKEN_IDS)
async def a_stop_token_id_ends_generation(bench: Bench) -> None:
    """Generation ends at the first of the stop token ids, which stays in the ids, leaves the text, and is named."""
    runs = await free_samples(bench, 4)
    asked: list[tuple[Completion, Fields]] = []
    for run in runs:
        one, other = (bench.rng.choice(run.token_ids) for _ in range(2))
        asked += [(run, {"stop_token_ids": [one]}), (run, {"stop_token_ids": (one, other)})]
        asked += [(run, {"stop_token_ids": run.token_ids[0]}), (run, {"stop_token_ids": _never(bench, run)})]
        many = _many_others(bench, run)
        asked += [(run, {"stop_token_ids": [*many, one]}), (run, {"stop_token_ids": many})]
    for completion, _ in await _check(bench, asked):
        assert completion.matched_stop in (None, completion.token_ids[-1])


@case(Capability.STOP_TOKEN_IDS)
async def a_stop_token_id_in_the_prompt_ends_nothing(bench: Bench) -> None:
    """A stop token id in the prompt ends nothing; only generated ids count."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 4):
        new = [token for token in run.prompt_token_ids if token not in run.token_ids]
        asked += [(run, {"stop_token_ids": new}), (run, {"stop_token_ids": run.prompt_token_ids})]
    await _check(bench, asked)


@case(Capability.STOP_TOKEN_IDS, Capability.IGNORE_EOS)
async def stop_token_ids_hold_where_eos_is_ignored(bench: Bench) -> None:
    """With ignore_eos the model's EOS ids end nothing, but the request's own stop token ids still do."""
    runs = await free_samples(bench, 4, ignore_eos=True)
    await _check(
        bench, [(run, {"ignore_eos": True, "stop_token_ids": [bench.rng.choice(run.token_ids)]}) for run in runs]
    )
    eos = bench.engine.model_info.eos_token_ids[0]
    given = [(run, {"ignore_eos": True, "stop_token_ids": [eos, run.token_ids[-1]]}) for run in runs]
    await _check(bench, given)
    if bench.claims(Capability.LOGIT_BIAS):
        # Every token of this sample is EOS: only ignore_eos lets it go on, also beside other stop token ids.
        params: dict[str, object] = {"max_new_tokens": 3, "temperature": 0, "logit_bias": {eos: _FORCE}}
        other = next(token for token in bench.prompt() if token not in bench.engine.model_info.eos_token_ids)
        (forced,) = (
            await bench.engine.generate([bench.prompt()], {**params, "ignore_eos": True, "stop_token_ids": [other]})
        ).completions
        assert forced.token_ids == [eos] * 3, f"EOS ended it beside another stop token id: {forced.token_ids}"
        # An EOS that the request names itself is a stop token id like any other.
        for named in ([eos], [other, eos]):
            asked = {**params, "ignore_eos": True, "stop_token_ids": named}
            (ended,) = (await bench.engine.generate([bench.prompt()], asked)).completions
            assert ended.token_ids == [eos], f"an EOS among the stop token ids did not end it: {ended.token_ids}"
            assert (ended.finish_reason, ended.matched_stop) == (FinishReason.STOP, eos)


@case(Capability.STOP_TOKEN_IDS, Capability.LOGIT_BIAS)
async def a_special_stop_token_id_ends_generation(bench: Bench) -> None:
    """A special token that is not an EOS ends generation if, and only if, its id is a stop token id."""
    engine = bench.engine
    specials = [*engine.tokenizer.inner.all_special_ids, *engine.tokenizer.inner.added_tokens_decoder]
    special = next(token for token in specials if token not in engine.model_info.eos_token_ids)
    fields: dict[str, object] = {"logit_bias": {special: _FORCE}, "max_new_tokens": 3, "temperature": 0}
    for skip in (True, False):
        fields |= {"skip_special_tokens": skip, "stop_token_ids": []}
        (free,) = (await engine.generate([bench.prompt()], fields)).completions
        assert free.token_ids == [special] * 3
        await _check(bench, [(free, {**fields, "stop_token_ids": [special]})])


# Stop strings --------------------------------------------------------------------------------------------------------


@case(Capability.STOP_STRINGS)
async def a_stop_string_ends_generation_at_its_first_match(bench: Bench) -> None:
    """Generation ends at a stop string's first match, even across tokens; text and ids end before the match."""
    runs = await free_samples(bench, 6)
    asked: list[tuple[Completion, Fields]] = []
    for run in runs:
        asked += [(run, {"stop": bench.rng.choice(pieces(run.text, length))}) for length in (1, 2, 3)]
        asked.append((run, {"stop": max(pieces(run.text, 1, 8), key=len)}))
    for completion, params in await _check(bench, asked):
        assert completion.finish_reason is FinishReason.STOP
        assert (completion.matched_stop,) == params.stop
        assert params.stop[0] not in completion.text
    await _check_long_match(bench, "stop", lambda letter: letter * _LONG)


@case(Capability.STOP_STRINGS)
async def the_first_of_several_stop_strings_wins(bench: Bench) -> None:
    """The stop string that is complete first ends generation and is named, however the strings are ordered."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 4):
        stops = [bench.rng.choice(pieces(run.text, 1, 4)) for _ in range(4)]
        asked += [(run, {"stop": stops}), (run, {"stop": stops[::-1]})]
        # One stop string ends another, and one begins another.
        long = max(pieces(run.text, 2, 4), key=len)
        asked += [(run, {"stop": [long, long[1:]]}), (run, {"stop": [long, long[:-1]]})]
    await _check(bench, asked)


@case(Capability.STOP_STRINGS)
async def what_merely_ends_like_a_match_is_no_match(bench: Bench) -> None:
    """Text that is only part of a stop string does not end generation."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        for piece in bench.rng.sample(pieces(run.text, 1, 3), 3):
            missing = [letter for letter in "~zq#XW" if letter not in run.text]
            asked.append((run, {"stop": [missing[0] + piece, piece + missing[0], piece + missing[1] + piece]}))
    assert not any(isinstance(completion.matched_stop, str) for completion, _ in await _check(bench, asked))


@case(Capability.STOP_STRINGS)
async def a_stop_string_is_not_looked_for_in_the_prompt(bench: Bench) -> None:
    """Text of the prompt does not match a stop string, nor does a match that begins in the prompt."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        before = bench.engine.decode(run.prompt_token_ids)
        over = before[-2:] + next(piece for piece in (run.text[:2], run.text[:1], "") if REPLACEMENT not in piece)
        stops = [stop for stop in (before, before[-3:], over) if stop not in run.text and REPLACEMENT not in stop]
        # If a model repeats its prompt, its text may hold all of these strings; so add one that cannot occur.
        asked.append((run, {"stop": [*stops, f"{before[-3:]}never~{before[:3]}"]}))
    assert not any(isinstance(completion.matched_stop, str) for completion, _ in await _check(bench, asked))


@case(Capability.STOP_STRINGS)
async def a_match_at_the_start_leaves_nothing(bench: Bench) -> None:
    """A completion whose text begins with a stop string has no ids and no text, and ended by that stop."""
    runs = [run for run in await free_samples(bench, 12) if REPLACEMENT not in run.text[:1]][:4]
    assert runs, "no completion begins with a whole character"
    for completion, _ in await _check(bench, [(run, {"stop": run.text[0]}) for run in runs]):
        assert (completion.token_ids, completion.text) == ([], "")
        assert completion.finish_reason is FinishReason.STOP


@case(Capability.STOP_STRINGS)
async def the_stop_string_is_kept_if_asked_for(bench: Bench) -> None:
    """With include_stop_str_in_output, ids and text end exactly with the stop string."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        for length in (1, 2, 3):
            stops = [bench.rng.choice(pieces(run.text, length)), bench.rng.choice(pieces(run.text, 1, 3))]
            asked.append((run, {"stop": stops, "include_stop_str_in_output": True}))
    for completion, _ in await _check(bench, asked):
        assert completion.text.endswith(str(completion.matched_stop))


@case(Capability.STOP_STRINGS, Capability.LOGIT_BIAS)
async def a_stop_string_may_overlap_itself(bench: Bench) -> None:
    """A stop string that can overlap itself ends generation at the first place where it is complete."""
    letter, other = letter_ids(bench.engine, 2)
    fields: dict[str, object] = {"temperature": 0, "max_new_tokens": 12, "logit_bias": {letter: _FORCE}}
    (free,) = (await bench.engine.generate([bench.prompt()], fields)).completions
    text, another = bench.engine.decode([letter]), bench.engine.decode([other])
    assert free.token_ids == [letter] * 12
    asked: list[tuple[Completion, Fields]] = []
    for stops in ([text * 3], [text * 5, text * 2], [text * 4 + another, text * 6], [text * 2 + another]):
        for keep in (False, True):
            asked.append((free, {**fields, "stop": stops, "include_stop_str_in_output": keep}))
    kept = [len(completion.token_ids) for completion, _ in await _check(bench, asked)]
    assert kept == [0, 3, 0, 2, 0, 6, 12, 12], "tokens that remain, without the stop string and with it"


@case(Capability.STOP_STRINGS)
async def a_stop_string_matches_inside_characters_of_several_tokens(bench: Bench) -> None:
    """A character made of several tokens matches a stop string once it is complete; its first bytes match nothing."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await samples_of_spanning_characters(bench, 24):
        for at in spanning_characters(run, bench.engine)[:2]:
            character, alike = run.text[at], chr(ord(run.text[at]) ^ 1)  # two characters whose first bytes are equal
            around = (run.text[max(0, at - 1) : at + 1], run.text[at : at + 2], run.text[at + 1 : at + 2])
            for stop in filter(plain, (character, *around)):
                stops = [alike + character, stop]
                asked += [(run, {"stop": stops, "include_stop_str_in_output": keep}) for keep in (False, True)]
            asked.append((run, {"stop": alike}))
    await _check(bench, asked[:48])


@case(Capability.STOP_STRINGS, Capability.LOGIT_BIAS)
async def a_special_token_is_text_if_it_is_kept(bench: Bench) -> None:
    """With skip_special_tokens=False the text of a special token matches a stop string like any other text."""
    engine = bench.engine
    special = next(t for t in engine.tokenizer.inner.all_special_ids if t not in engine.model_info.eos_token_ids)
    fields: dict[str, object] = {"logit_bias": {special: _FORCE}, "max_new_tokens": 4, "temperature": 0}
    fields["skip_special_tokens"] = False
    (free,) = (await engine.generate([bench.prompt()], fields)).completions
    text = engine.decode([special], skip_special_tokens=False)
    assert free.text == text * 4
    asked = [(free, {**fields, "stop": stop}) for stop in (text, text * 2, text[-1] + text[0], text[1:-1])]
    await _check(bench, [*asked, (free, {**fields, "stop": text, "include_stop_str_in_output": True})])


# Stop expressions ----------------------------------------------------------------------------------------------------


@case(Capability.STOP_REGEX)
async def a_stop_regex_ends_generation_at_the_first_text_that_has_a_match(bench: Bench) -> None:
    """Generation ends as soon as the text contains a match of a stop regex, even across tokens; the regex is named."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        for pattern in expressions(bench.rng, run.text):
            asked.append((run, {"stop_regex": pattern}))
            asked.append((run, {"stop_regex": [_NEVER, pattern], "include_stop_str_in_output": True}))
    for completion, params in await _check(bench, asked):
        assert completion.finish_reason is FinishReason.STOP
        assert completion.matched_stop == params.stop_regex[-1]
    await _check_long_match(bench, "stop_regex", lambda letter: f"{letter}{{{_LONG}}}")


async def _check_long_match(bench: Bench, field: str, stop_of: Callable[[str], str]) -> None:
    """Check that a long text ends at a match as long as most of it, alone and as the last of many stops."""
    if not bench.claims(Capability.LOGIT_BIAS):
        return
    (letter,) = letter_ids(bench.engine, 1)
    stop = stop_of(bench.engine.decode([letter]))
    asked: Fields = {"logit_bias": {letter: _FORCE}, "max_new_tokens": _LONG + 24, "temperature": 0}
    never = [f"never-{number}" for number in range(_MANY)]
    params = [{**asked, field: stops, "include_stop_str_in_output": True} for stops in ([stop], [*never, stop])]
    for completion in (await bench.engine.generate([bench.prompt()] * len(params), params)).completions:
        assert completion.matched_stop == stop, f"{stop!r} did not end a text of {len(completion.text)} characters"
        assert len(completion.token_ids) == _LONG


@case(Capability.STOP_REGEX)
async def a_stop_regex_that_never_matches_ends_nothing(bench: Bench) -> None:
    """A stop regex that never matches completely changes nothing, though much of the text begins a match."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 4):
        begun = [re.escape(piece) for piece in bench.rng.sample(pieces(run.text, 1, 2), 3)]
        asked.append((run, {"stop_regex": [f"({'|'.join(begun)}){_NEVER}", f"{_NEVER}({begun[0]})"]}))
    assert not any(isinstance(completion.matched_stop, str) for completion, _ in await _check(bench, asked))


@case(Capability.STOP_REGEX, Capability.IGNORE_EOS)
async def a_stop_regex_that_takes_too_long_ends_its_own_request(bench: Bench) -> None:
    """A stop regex that backtracks too long is refused by name, and other requests are answered as before."""
    params: Fields = {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    prompt = bench.prompt()
    before = await bench.engine.generate(prompt, params)
    assert len(before.completions[0].text) > 24, "the case needs a longer text"
    with refused(InvalidRequest, field="sampling_params.stop_regex", naming="takes longer"):
        await bench.engine.generate([prompt, prompt], [{**params, "stop_regex": _BACKTRACKS}, params])
    after = await bench.engine.generate(prompt, params)
    assert after.completions[0].token_ids == before.completions[0].token_ids


@case(Capability.STOP_STRINGS, Capability.STOP_REGEX, Capability.STOP_TOKEN_IDS)
async def stops_of_all_kinds_work_side_by_side(bench: Bench) -> None:
    """With stop strings, expressions and token ids at once, the one that comes first ends generation."""
    asked: list[tuple[Completion, Fields]] = []
    for run in await free_samples(bench, 6):
        for _ in range(3):
            asked.append(
                (
                    run,
                    {
                        "stop": bench.rng.choice(pieces(run.text, 1, 3)),
                        "stop_regex": bench.rng.choice(expressions(bench.rng, run.text)),
                        "stop_token_ids": [bench.rng.choice(run.token_ids)],
                    },
                )
            )
    await _check(bench, asked)


# Not before min_new_tokens -------------------------------------------------------------------------------------------


@case(Capability.STOP_TOKEN_IDS, Capability.MIN_NEW_TOKENS)
async def no_stop_token_id_before_min_new_tokens(bench: Bench) -> None:
    """A stop token id is not drawn before min_new_tokens, and ends generation after it."""
    for run in await free_samples(bench, 4):
        stop = run.token_ids[0]
        beside = [{}, *[{"ignore_eos": True}] * bench.claims(Capability.IGNORE_EOS)]
        for least, further in itertools.product((1, 6), beside):
            fields = {"stop_token_ids": [stop], "min_new_tokens": least, "max_new_tokens": 12, **further}
            output = await bench.engine.generate([run.prompt_token_ids], {"temperature": 0, **fields})
            (completion,) = output.completions
            assert len(completion.token_ids) >= least, f"{fields}: it ended after {completion.token_ids}"
            assert stop not in completion.token_ids[:-1], f"{fields}: it was drawn: {completion.token_ids}"
            if completion.matched_stop == stop:
                assert len(completion.token_ids) > least


@case(Capability.STOP_STRINGS, Capability.MIN_NEW_TOKENS)
async def no_stop_string_before_min_new_tokens(bench: Bench) -> None:
    """A stop string that is complete before min_new_tokens ends nothing; one completed later does."""
    asked: list[tuple[Completion, Fields]] = []
    for least in (1, 2, 7, 15):
        for run in await free_samples(bench, 4, min_new_tokens=least):
            stops = [bench.rng.choice(pieces(run.text, 1, 3)) for _ in range(2)]
            stops = [stop for stop in (*stops, run.text[-1:]) if plain(stop)]
            asked += [(run, {"stop": stop, "min_new_tokens": least}) for stop in stops]
    matched = [completion.matched_stop for completion, _ in await _check(bench, asked)]
    assert any(isinstance(stop, str) for stop in matched), "none of the stop strings came after min_new_tokens"


@case(Capability.STOP_REGEX, Capability.MIN_NEW_TOKENS)
async def no_stop_regex_before_min_new_tokens(bench: Bench) -> None:
    """A stop regex whose match is complete before min_new_tokens ends nothing; one completed later does."""
    asked: list[tuple[Completion, Fields]] = []
    for least in (1, 2, 7, 15):
        for run in await free_samples(bench, 4, min_new_tokens=least):
            patterns = expressions(bench.rng, run.text)
            asked += [(run, {"stop_regex": pattern, "min_new_tokens": least}) for pattern in patterns]
    await _check(bench, asked)


@case(Capability.STOP_STRINGS, Capability.STOP_REGEX, Capability.MIN_NEW_TOKENS, Capability.LOGIT_BIAS)
async def a_match_may_begin_before_min_new_tokens(bench: Bench) -> None:
    """A match counts by its end: one that begins before min_new_tokens and ends after it stops generation."""
    (letter,) = letter_ids(bench.engine, 1)
    text = bench.engine.decode([letter])
    fields: dict[str, object] = {
        "temperature": 0,
        "max_new_tokens": 12,
        "min_new_tokens": 5,
        "logit_bias": {letter: _FORCE},
    }
    (free,) = (await bench.engine.generate([bench.prompt()], fields)).completions
    assert free.token_ids == [letter] * 12
    stops: list[Fields] = [{"stop": text * 3}, {"stop_regex": f"{text}{{3}}"}, {"stop_regex": f"{text}{{5}}"}]
    stopped = await _check(bench, [(free, {**fields, **stop}) for stop in stops])
    assert [len(completion.token_ids) for completion, _ in stopped] == [2, 2, 0]


# Cutting at a stop ---------------------------------------------------------------------------------------------------


@case(Capability.STOP_STRINGS, Capability.LOGPROBS_TEMPERATURE)
async def logprobs_are_cut_with_the_ids(bench: Bench) -> None:
    """A completion cut at a stop string has the original logprob for each id that remains."""
    for run in await free_samples(bench, 4, logprobs=0):
        stop = pieces(run.text, 1, 3)[-1]
        fields: dict[str, object] = {"temperature": 0, "max_new_tokens": TOKENS, "logprobs": 0}
        for completion, _ in await _check(bench, [(run, {**fields, "stop": stop})]):
            assert completion.logprobs is not None
            own = bench.output_logprobs(completion)
            assert len(completion.logprobs) == len(own)
            assert all(abs(a - b) <= bench.tolerance() for a, b in zip(completion.logprobs, own, strict=True))


@case(Capability.STOP_STRINGS, Capability.TOP_LOGPROBS, Capability.LOGPROBS_TEMPERATURE)
async def top_logprobs_are_cut_with_the_ids(bench: Bench) -> None:
    """A completion cut at a stop string has the alternatives of the ids that remain, and no others."""
    for run in await free_samples(bench, 4, logprobs=2):
        for completion, _ in await _check(bench, [(run, {"stop": pieces(run.text, 1, 3)[-1], "logprobs": 2})]):
            assert completion.top_logprobs is not None
            assert completion.logprobs is not None
            best = [alternatives[0][1] for alternatives in completion.top_logprobs]
            assert len(best) == len(completion.token_ids)
            assert all(abs(a - b) <= bench.tolerance() for a, b in zip(best, completion.logprobs, strict=True))


@case(Capability.STOP_STRINGS, Capability.VERSION_SPANS)
async def version_spans_are_cut_with_the_ids(bench: Bench) -> None:
    """The version spans of a completion cut at a stop string end where its ids end."""
    engine, version = bench.engine, bench.engine.get_weight_version()
    try:
        await engine.update_weight_version("relabelled")
        runs = await free_samples(bench, 4)
        asked: list[tuple[Completion, Fields]] = [(run, {"stop": pieces(run.text, 1, 3)[-1]}) for run in runs]
        asked += [(run, {"stop": run.text[0]}) for run in runs if plain(run.text[0])]
        stopped = await _check(bench, asked)
    finally:
        await engine.update_weight_version(version)
    for completion, _ in stopped:
        count = len(completion.token_ids)
        assert completion.weight_versions == ((VersionSpan("relabelled", 0, count),) if count else ())


# Many at once --------------------------------------------------------------------------------------------------------


@case(Capability.STOP_STRINGS)
async def each_sample_stops_by_itself(bench: Bench) -> None:
    """With n above 1 and in batches each sample ends at its own first match, and one prompt's stops affect no other."""
    runs = await free_samples(bench, 4)
    fields: list[Fields] = [{"n": 3, "stop": bench.rng.choice(pieces(run.text, 1, 2))} for run in runs[:2]]
    fields += [{}, {"stop": runs[0].text, "n": 2}]
    params = [stop_params(own) for own in fields]
    output = await bench.engine.generate([run.prompt_token_ids for run in runs], params)
    assert [len(group) for group in output.by_prompt()] == [3, 3, 1, 2]
    for run, own, group in zip(runs, params, output.by_prompt(), strict=True):
        for completion in group:
            agrees_with_reference(bench, run, own, completion)


@case(Capability.STOP_STRINGS)
async def no_sample_holds_a_stop_string(bench: Bench) -> None:
    """No random sample contains a stop string, except at its very end with include_stop_str_in_output."""
    runs = await free_samples(bench, 4)
    stops = tuple({*pieces(runs[0].text, 1, 2)[:6], *pieces(runs[1].text, 1)[:4]})
    decode, hit = bench.engine.decode, 0
    for keep in (False, True):
        params = SamplingParams(n=6, max_new_tokens=TOKENS, stop=stops, include_stop_str_in_output=keep)
        output = await bench.engine.generate([run.prompt_token_ids for run in runs], params)
        for completion in output.completions:
            ids, text = completion.token_ids, completion.text
            hit += isinstance(completion.matched_stop, str)
            if isinstance(completion.matched_stop, str):
                assert decode(ids).startswith(text), f"{ids} do not hold {text!r}"
                assert not ids or not decode(ids[:-1]).startswith(text), f"the last of {ids} is not needed for {text!r}"
                assert text.endswith(completion.matched_stop) == keep
                text = text[:-1] if keep else text
            assert not any(stop in text for stop in stops), f"{text!r} holds one of {stops}"
    assert hit, "no sample came upon a stop string"


# Any stops -----------------------------------------------------------------------------------------------------------


@case(Capability.STOP_STRINGS)
def any_stop_strings_agree_with_the_reference(bench: Bench) -> None:
    """Whatever the stop strings, ids, text and the matched stop are those of the brute-force reference."""
    runs = bench.run(free_samples(bench, 6, max_new_tokens=16))
    bench.run(_check(bench, [(runs[0], {"max_new_tokens": 16, "stop": "never"})]))
    parts = [part for run in runs for part in pieces(run.text, 1, 5)]
    near = st.tuples(st.sampled_from(parts), st.sampled_from(["x", "é", " ", *parts])).map("".join)
    stops = st.lists(st.one_of(st.sampled_from(parts), near), min_size=1, max_size=4)
    asked = st.tuples(st.sampled_from(runs), st.fixed_dictionaries({"stop": stops, **_KEEP}))

    @random_property(bench.profile.examples, bench.seed)
    @given(st.lists(asked, min_size=1, max_size=3))
    def agrees(asked: list[tuple[Completion, Fields]]) -> None:
        bench.run(_check(bench, [(run, {"max_new_tokens": 16, **fields}) for run, fields in asked]))

    agrees()


@case(Capability.STOP_STRINGS, Capability.STOP_REGEX, Capability.STOP_TOKEN_IDS, Capability.LOGIT_BIAS)
def any_stops_agree_with_the_reference(bench: Bench) -> None:
    """With stops of all kinds on a text of few letters, where near matches abound, the reference agrees."""
    ids = letter_ids(bench.engine, 3)
    a, b, c = (bench.engine.decode([token]) for token in ids)
    bias: dict[str, object] = {"logit_bias": dict.fromkeys(ids, _FORCE), "max_new_tokens": 16, "temperature": 0}
    prompts = bench.prompts(6)
    runs = bench.run(bench.engine.generate(prompts, bias)).completions
    bench.run(_check(bench, [(runs[0], {**bias, "stop": "!", "stop_regex": "!", "stop_token_ids": [0]})]))
    strings = st.lists(st.text(alphabet=[a, b, c], min_size=1, max_size=5), max_size=3)
    patterns = [
        f"{a}+{b}",
        f"[{a}{b}]{{3}}",
        f"{c}({a}|{b}{b})",
        f"{b}.{b}",
        f"{a}(?={c})",
        f"(?<!{a}){b}{{2}}",
        f"{c}$",
    ]
    stops = {
        "stop": strings,
        "stop_regex": st.lists(st.sampled_from(patterns), max_size=2),
        "stop_token_ids": st.lists(st.sampled_from(ids), max_size=1),
    }
    asked = st.tuples(st.sampled_from(runs), st.fixed_dictionaries({**stops, **_KEEP}))

    @random_property(bench.profile.examples, bench.seed)
    @given(st.lists(asked, min_size=1, max_size=3))
    def agrees(asked: list[tuple[Completion, Fields]]) -> None:
        bench.run(_check(bench, [(run, {**bias, **fields}) for run, fields in asked]))

    agrees()


# ---------------------------------------------------------------------------------------------------------------------


async def _check(bench: Bench, asked: Sequence[tuple[Completion, Fields]]) -> list[tuple[Completion, SamplingParams]]:
    """Repeat each request with stops, compare with the reference, and return the completions and their params."""
    params = [stop_params(fields) for _, fields in asked]
    output = await bench.engine.generate([run.prompt_token_ids for run, _ in asked], params)
    answers = zip((run for run, _ in asked), params, output.completions, strict=True)
    return [(completion, own) for run, own, completion in answers if agrees_with_reference(bench, run, own, completion)]


def _never(bench: Bench, run: Completion) -> list[int]:
    return [token for token in ordinary_ids(bench.engine) if token not in run.token_ids][:3]


def _many_others(bench: Bench, run: Completion) -> list[int]:
    """Return as many ids as the vocabulary has, up to a bound, none of which is an EOS or in ``run``."""
    known = {*run.token_ids, *bench.engine.model_info.eos_token_ids}
    return [token for token in range(bench.engine.model_info.vocab_size) if token not in known][:_MOST]
