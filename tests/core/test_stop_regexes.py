"""Stops compared with a plain search of every prefix of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drivetrain import InvalidRequest, SamplingParams
from drivetrain.text.stop_regexes import SearchBudget, StopRegex
from drivetrain.text.stops import StopMatch, StopMatcher
from drivetrain.types.outputs import MatchedText


class PieceDecoder:
    """Decodes a vocabulary of byte strings."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")


PARTS = [
    *("a", "b", "c", "-", " ", "€", r"\n", r"\.", r"\w", r"\W", r"\s", "[ab]", "[^a]", ".", "(a)", "(?i:A)"),
    *(r"\b", r"\B", "$", r"\Z", "^", "(?m:^)", "(?m:$)", "(?<=a)", "(?<!b)", "(?=a)", "(?!b)", r"(b)\1"),
]
REPEATS = ["?", "*", "+", "{2}", "{1,2}", "+?", "*?", "??", "*+", "?+"]


def patterns() -> st.SearchStrategy[str]:
    def larger(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(smaller, smaller).map("".join),
            st.tuples(smaller, smaller).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(smaller, st.sampled_from(REPEATS)).map(lambda two: f"(?:{two[0]}){two[1]}"),
        )

    flags = st.sampled_from(["", "(?i)", "(?m)", "(?s)"])
    return st.tuples(flags, st.recursive(st.sampled_from(PARTS), larger, max_leaves=6)).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[bytes]:
    """Draw a text, cut into tokens that may end within a character."""
    raw = draw(st.text(alphabet="abcA- \n€", max_size=16)).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(cuts)]


@st.composite
def stops(draw: st.DrawFn) -> SamplingParams:
    strings = draw(st.lists(st.text(alphabet="ab-€", min_size=1, max_size=3), max_size=2))
    regexes = draw(st.lists(patterns(), max_size=2))
    assume(strings or regexes)
    try:
        return SamplingParams(
            stop=tuple(strings),
            stop_regex=tuple(regexes),
            min_new_tokens=draw(st.sampled_from([0, 0, 2, 5])),
            include_stop_str_in_output=draw(st.booleans()),
        )
    except ValidationError:
        assume(False)
        raise


def expected(pieces: Sequence[bytes], params: SamplingParams) -> tuple[str | None, str]:
    """Return the stop that matches first and the remaining text, from a search of every prefix."""
    decode = PieceDecoder(pieces)
    text = decode(range(len(pieces)), skip_special_tokens=True)
    early = range(min(params.min_new_tokens - 1, len(pieces)))
    armed_from = len(decode(early, skip_special_tokens=True).rstrip("\ufffd"))
    if len(pieces) < max(params.min_new_tokens, 1):
        return None, text
    for end in range(armed_from + 1, len(text) + 1):
        prefix = text[:end]
        found = [(len(prefix) - len(stop), end, stop) for stop in params.stop if prefix.endswith(stop)]
        found.sort()
        for pattern in params.stop_regex:
            for match in regex.finditer(pattern, prefix, overlapped=True):
                if match.end() > armed_from:
                    found.append((match.start(), match.end(), pattern))
                    break
        if found:
            start, stop, matched = found[0]
            return matched, text[: stop if params.include_stop_str_in_output else start]
    return None, text


@settings(max_examples=400, deadline=None)
@given(cut_texts(), stops())
def test_the_matcher_finds_what_a_search_of_every_prefix_finds(pieces: list[bytes], params: SamplingParams) -> None:
    matcher = StopMatcher(params, PieceDecoder(pieces))
    any(matcher.push(token_id) is not None for token_id in range(len(pieces)))
    found = matcher.outcome()
    assert (found.matched, found.text) == expected(pieces, params)


@settings(max_examples=400, deadline=None)
@given(cut_texts(), stops())
def test_reading_a_stream_does_not_change_the_match(pieces: list[bytes], params: SamplingParams) -> None:
    streamed, whole = StopMatcher(params, PieceDecoder(pieces)), StopMatcher(params, PieceDecoder(pieces))
    released = ""
    for token_id in range(len(pieces)):
        if streamed.push(token_id) is not None:
            break
        released += streamed.release().text
    any(whole.push(token_id) is not None for token_id in range(len(pieces)))
    found = streamed.outcome()
    assert found == whole.outcome()
    if all(StopRegex(pattern, SearchBudget()).is_incremental for pattern in params.stop_regex):
        assert found.text.startswith(released)


def test_a_search_begins_where_a_match_can_still_begin() -> None:
    expression = StopRegex("x[0-9]+y", SearchBudget())
    text = "a" * 500 + "x12"
    expression.advance(text)
    assert expression.may_begin_at(text) == 500
    assert expression.may_begin_at(text + "z") == 504


@pytest.mark.parametrize("pattern", [r"-\b", r"a\B", r"end\b", r"\bend", "a$", r"a\nb", "(?<=a)b+c", "(?i)stop"])
def test_common_regexes_are_searched_incrementally(pattern: str) -> None:
    expression = StopRegex(pattern, SearchBudget())
    expression.advance("~" * 100)
    assert expression.may_begin_at("~" * 100) == 100


def test_a_boundary_at_the_end_may_still_become_a_match() -> None:
    matcher = StopMatcher(SamplingParams(stop_regex=(r"ab\B",)), PieceDecoder([b"ab", b"c"]))
    assert matcher.push(0) is None
    assert matcher.release().text == ""
    assert matcher.push(1) == StopMatch(r"ab\B", "", 0)
    assert matcher.outcome() == MatchedText("", 0, r"ab\B")


def test_a_regex_that_backtracks_is_refused_after_its_time() -> None:
    matcher = StopMatcher(SamplingParams(stop_regex=(r"(?s:.|[\s\S])+\Z.",)), PieceDecoder([b"a" * 60]))
    with pytest.raises(InvalidRequest, match="takes longer"):
        matcher.push(0)
