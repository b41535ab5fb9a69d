"""Find where a sample must end, by brute force over every prefix of a sample that nothing stopped.

The rule, in the words of the contract: generation ends at the first match, not at text that merely ends like a match.
For a stop string or expression the ids are the shortest prefix of the sampled ids whose decoding holds the remaining
text, and text is cut exactly. A stop token id was sampled, so it stays in the ids and is left out of the text. Nothing
ends a sample before ``min_new_tokens`` ids.

This shares no code with the engine's matcher: it decodes every prefix anew, tries every start and end, and uses
Python's own ``re``. It is quadratic, and fit for comparison only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.text.tokenizer import Decoder
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Ending:
    """The required end of a sample."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    matched_stop: int | str | None

    @classmethod
    def of(cls, completion: Completion) -> Ending:
        """Return the actual ending of a completion."""
        return cls(completion.token_ids, completion.text, completion.finish_reason, completion.matched_stop)


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    end: int
    stop: str


def expected_ending(free: Completion, params: SamplingParams, decode: Decoder) -> Ending:
    """Return how ``free`` would have ended with the stops of ``params``.

    Args:
        free: The output of the same request without the stops of ``params``, which therefore continued past them.
        params: Only its stop conditions, ``include_stop_str_in_output``, ``min_new_tokens`` and ``skip_special_tokens``
            are used.
        decode: The model's tokenizer.
    """

    def text_of(ids: Sequence[int]) -> str:
        return decode(ids, skip_special_tokens=params.skip_special_tokens) if ids else ""

    sampled, least = free.token_ids, params.min_new_tokens
    ending_id = _first_stop_id(free, params)
    spoken = sampled if ending_id is None else sampled[:ending_id]
    texts = [text_of(spoken[:count]) for count in range(len(spoken) + 1)]
    # Text is settled once no later token changes it: the common beginning of all later prefixes' texts. The first bytes
    # of a character are shown as a replacement character, which disappears with the last byte.
    settled = [_common_beginning(texts[count:]) for count in range(len(texts))]
    too_early = len(settled[min(least - 1, len(spoken))]) if least else 0
    for count in range(max(least, 1), len(spoken) + 1):
        match = _first_match(settled[count], too_early, params)
        if match is not None:
            text = settled[count][: match.end if params.include_stop_str_in_output else match.start]
            remaining = next(n for n, held in enumerate(texts) if held.startswith(text))
            return Ending(sampled[:remaining], text, FinishReason.STOP, match.stop)
    if ending_id is not None:
        return Ending(sampled[: ending_id + 1], texts[-1], FinishReason.STOP, sampled[ending_id])
    return Ending(sampled, texts[-1], free.finish_reason, None)


def _common_beginning(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    return next(shortest[:n] for n in range(len(shortest), -1, -1) if all(t.startswith(shortest[:n]) for t in texts))


def _first_stop_id(free: Completion, params: SamplingParams) -> int | None:
    """Return the place of the first stop token id; the id that ended the free sample, such as EOS, counts."""
    stops = {*params.stop_token_ids, free.matched_stop}
    return next((at for at, token in enumerate(free.token_ids) if token in stops and at >= params.min_new_tokens), None)


def _first_match(text: str, too_early: int, params: SamplingParams) -> _Match | None:
    """Return the match that ends first, but not too early; of several matches that end there, the first one."""
    for end in range(too_early + 1, len(text) + 1):
        found = _matches_in(text[:end], too_early, params)
        if found:
            return found[0]
    return None


def _matches_in(text: str, too_early: int, params: SamplingParams) -> list[_Match]:
    """Return matches of strings, ordered by where they begin, then matches of expressions in their own order."""
    strings = sorted((len(text) - len(stop), stop) for stop in params.stop if text.endswith(stop))
    expressions = [
        (match, pattern)
        for pattern in params.stop_regex
        for start in range(len(text))
        if (match := re.compile(pattern).match(text, start)) and match.end() > too_early
    ]
    return [_Match(start, len(text), stop) for start, stop in strings] + [
        _Match(match.start(), match.end(), pattern) for match, pattern in expressions
    ]
