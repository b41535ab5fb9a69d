"""Stop strings and stop regexes: find where generation ends, and cut ids and text there.

The rule is the same on every backend and does not depend on how the text was split into tokens. Generation ends at the
first prefix of the decoded text that contains a match. The text is cut exactly there; the ids are the shortest prefix
of the sampled ids whose decoding holds the remaining text.

One matcher follows a sample, wherever its tokens are seen first: in a backend that ends at text stops by itself, or in
the engine. :meth:`StopMatcher.outcome` then goes along with the result, so that the same ids are not matched again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from drivetrain.text.stop_regexes import SearchBudget, StopRegex
from drivetrain.text.tokenizer import REPLACEMENT, Decoder, IncrementalDecoder
from drivetrain.types.outputs import MatchedText, ReleasedText
from drivetrain.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A match of a stop condition, with the text and ids that remain."""

    matched: str
    """The stop string, or the stop regex's pattern."""
    text: str
    """The remaining text."""
    token_count: int
    """Number of sampled ids that remain."""


class StopMatcher:
    """Finds the first match of a sample's stop strings and regexes, token by token."""

    def __init__(self, params: SamplingParams, decode: Decoder) -> None:
        self._decode = decode
        self._params = params
        self._budget = SearchBudget()
        self._regexes = [StopRegex(pattern, self._budget) for pattern in params.stop_regex]
        self._decoder = IncrementalDecoder(decode, skip_special_tokens=params.skip_special_tokens)
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._armed_from = 0
        self._match: StopMatch | None = None
        self._released = 0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return True if the request has stop strings or stop regexes."""
        return bool(params.stop or params.stop_regex)

    @property
    def token_ids(self) -> list[int]:
        """The ids so far."""
        return self._ids

    @property
    def text(self) -> str:
        """The text so far, without characters whose bytes are incomplete."""
        return self._decoder.text

    def push(self, token_id: int) -> StopMatch | None:
        """Add one sampled id and return the match that it completes, if any.

        Raises:
            InvalidRequest: A stop regex takes longer than ``STOP_SEARCH_S``.
        """
        self._budget.renew()
        before = len(self._decoder.text)
        self._decoder.push(token_id)
        self._ids.append(token_id)
        self._lengths.append(len(self._decoder.text))
        if len(self._ids) < self._params.min_new_tokens:
            self._armed_from = len(self._decoder.text)
            return None
        return self._search(before)

    def finish(self) -> StopMatch | None:
        """Match the characters that were held back until the sample ended."""
        shown = self._decoder.text
        self._decoder.finish()
        if not self._ids or len(self._ids) < self._params.min_new_tokens:
            return None
        self._lengths[-1] = len(self._decoder.text)
        if not self._decoder.text.startswith(shown):
            for expression in self._regexes:
                expression.restart()
        return self._search(len(shown))

    def outcome(self) -> MatchedText:
        """End the sample; return its ids so far, cut at the match if there is one.

        Raises:
            InvalidRequest: A stop regex takes longer than ``STOP_SEARCH_S``.
        """
        match = self._match or self.finish()
        if match is not None:
            return MatchedText(match.text, match.token_count, match.matched)
        return MatchedText(self._decoder.text, len(self._ids), None)

    def releasable(self) -> tuple[int, int]:
        """Return how many characters and ids cannot be cut by any later match."""
        text = self._decoder.text
        sure = len(text)
        if not (self._params.stop or self._regexes):
            return sure, len(self._ids)  # no stop condition can cut them, not even at ids of incomplete characters
        if not self._params.include_stop_str_in_output:
            for stop in self._params.stop:
                held = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
                sure = min(sure, len(text) - held)
            for expression in self._regexes:
                sure = min(sure, expression.may_begin_at(text))
        return sure, self._count_for(sure)

    def release(self) -> ReleasedText:
        """Return the text that became releasable since the last call, and how many ids are releasable."""
        shown, (self._released, count) = self._released, self.releasable()
        return ReleasedText(self._decoder.text[shown : self._released], count)

    def _search(self, before: int) -> StopMatch | None:
        """Search the characters after ``before``; of matches in the same prefix, strings and earlier regexes win."""
        text = self._decoder.text
        if len(text) <= before:
            return None
        end, found = len(text), self._first_string(before)
        if found is not None:
            end = found[2] - 1
        for expression in self._regexes:
            match = expression.first(text, before, end, self._armed_from)
            if match is not None:
                found = (expression.pattern, *match[1:])
                end = match[0] - 1
        if found is not None:
            matched, start, stop = found
            self._match = self._cut(matched, stop if self._params.include_stop_str_in_output else start)
            return self._match
        for expression in self._regexes:
            expression.advance_rarely(text)
        return None

    def _first_string(self, before: int) -> tuple[str, int, int] | None:
        """Return the stop string that is complete first, with its start and end; of several the longest."""
        text = self._decoder.text
        least = max(before, self._armed_from) + 1
        best: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = text.find(stop, max(0, least - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[2], best[1], best[0])

    def _cut(self, matched: str, length: int) -> StopMatch:
        return StopMatch(matched=matched, text=self._decoder.text[:length], token_count=self._count_for(length))

    def _count_for(self, length: int) -> int:
        """Return the smallest number of ids whose decoding holds the first ``length`` characters."""
        if length == 0:
            return 0
        count = min(bisect_left(self._lengths, length) + 1, len(self._ids))
        kept = self._decoder.text[:length]
        # A replacement character may be the text itself, not a character that lacks bytes: fewer ids may then do.
        while kept.endswith(REPLACEMENT) and count and self._holds(self._ids[: count - 1], kept):
            count -= 1
        return count

    def _holds(self, ids: list[int], text: str) -> bool:
        return self._decode(ids, skip_special_tokens=self._params.skip_special_tokens).startswith(text)
