"""The rule for stops, on a byte-level vocabulary whose characters may span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drivetrain import SamplingParams
from drivetrain.text.stops import StopMatch, StopMatcher
from drivetrain.text.tokenizer import IncrementalDecoder


class PieceDecoder:
    """Decodes a vocabulary of byte strings."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")


BYTES = PieceDecoder([bytes([value]) for value in range(256)])


def run(decoder: PieceDecoder, ids: Sequence[int], params: SamplingParams) -> StopMatch | None:
    matcher = StopMatcher(params, decoder)
    for token_id in ids:
        if (match := matcher.push(token_id)) is not None:
            return match
    return matcher.finish()


def test_ids_are_the_shortest_prefix_that_holds_the_text() -> None:
    decoder = PieceDecoder([b"Hel", b"lo wor", b"ld. E", b"ND more"])
    assert run(decoder, [0, 1, 2, 3], SamplingParams(stop=("END",))) == StopMatch("END", "Hello world. ", 3)
    assert run(decoder, [0, 1, 2, 3], SamplingParams(stop=("wor",))) == StopMatch("wor", "Hello ", 2)
    assert run(decoder, [0, 1, 2, 3], SamplingParams(stop=("lo",), include_stop_str_in_output=True)) == StopMatch(
        "lo", "Hello", 2
    )


def test_a_match_before_an_unfinished_character_does_not_wait_for_it() -> None:
    decoder = PieceDecoder([b"a", b"STOP\xe2", b"\x82\xac"])
    matcher = StopMatcher(SamplingParams(stop=("STOP",)), decoder)
    assert matcher.push(0) is None
    assert matcher.push(1) == StopMatch("STOP", "a", 1)


def test_a_match_on_a_character_of_several_tokens() -> None:
    assert run(BYTES, "ab€cd".encode(), SamplingParams(stop=("€c",))) == StopMatch("€c", "ab", 2)
    assert run(BYTES, "ab€cd".encode(), SamplingParams(stop=("c",))) == StopMatch("c", "ab€", 5)


def test_the_stop_whose_match_is_complete_first_wins_however_text_is_cut_into_tokens() -> None:
    params = SamplingParams(stop=("abc", "b"))
    assert run(PieceDecoder([b"xabcx"]), [0], params) == StopMatch("b", "xa", 1)
    assert run(BYTES, b"xabcx", params) == StopMatch("b", "xa", 2)


def test_a_held_back_character_is_looked_at_when_the_sample_ends() -> None:
    assert run(BYTES, b"ab\xff", SamplingParams(stop=("�",))) == StopMatch("�", "ab", 2)


@given(st.text(alphabet="ab€\n", max_size=20), st.text(alphabet="ab€", min_size=1, max_size=3), st.data())
def test_the_result_does_not_depend_on_how_text_is_cut_into_tokens(text: str, stop: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    pieces = [raw[a:b] for a, b in pairwise(cuts)]
    decoder = PieceDecoder(pieces)
    match = run(decoder, range(len(pieces)), SamplingParams(stop=(stop,)))
    if stop not in text:
        assert match is None
        return
    assert match is not None
    assert match.text == text[: text.index(stop)]
    held = b"".join(pieces[: match.token_count])
    assert held.decode(errors="replace").startswith(match.text)
    shorter = b"".join(pieces[: max(0, match.token_count - 1)])
    assert match.token_count == 0 or not shorter.decode(errors="replace").startswith(match.text)


@given(st.text(alphabet="abc€", max_size=20), st.sampled_from(["ab+c", "[ab]{3}", "c(a|b)", "€€", "b.c"]))
def test_what_is_released_while_streaming_is_never_taken_back(text: str, pattern: str) -> None:
    matcher = StopMatcher(SamplingParams(stop_regex=(pattern,), stop=("cab",)), BYTES)
    released: list[tuple[int, int]] = []
    match = None
    for byte in text.encode():
        if (match := matcher.push(byte)) is not None:
            break
        released.append(matcher.releasable())
    match = match or matcher.finish()
    kept = (len(match.text), match.token_count) if match else (len(text), len(text.encode()))
    for characters, ids in released:
        assert characters <= kept[0]
        assert ids <= kept[1]
    assert released == sorted(released)


@given(st.binary(max_size=24))
def test_incremental_decoding_ends_with_the_whole_decoding(raw: bytes) -> None:
    decoder = IncrementalDecoder(BYTES)
    shown = "".join(decoder.push(byte) for byte in raw)
    assert shown == decoder.text
    assert BYTES(list(raw), skip_special_tokens=True).startswith(shown)
    assert shown + decoder.finish() == BYTES(list(raw), skip_special_tokens=True)
