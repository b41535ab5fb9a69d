"""Stop strings and stop regexes: where generation ends, and which ids and text remain.

The rule is the same on every backend and does not depend on how the text was split into tokens. Generation ends at the
first prefix of the decoded text that contains a match. The text is cut exactly there; the ids are the shortest prefix
of the sampled ids whose decoding holds the remaining text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import regex

from drivetrain.checks.limits import STOP_SEARCH_S
from drivetrain.errors import InvalidRequest
from drivetrain.text.tokenizer import REPLACEMENT, Decoder, IncrementalDecoder
from drivetrain.types.sampling import SamplingParams

_T = TypeVar("_T")


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
        self._patterns = [regex.compile(pattern) for pattern in params.stop_regex]
        self._decoder = IncrementalDecoder(decode, skip_special_tokens=params.skip_special_tokens)
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._armed_from = 0
        self._seconds_left = STOP_SEARCH_S

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return True if the request has stop strings or stop regexes."""
        return bool(params.stop or params.stop_regex)

    @property
    def text(self) -> str:
        """The text so far, without characters whose bytes are incomplete."""
        return self._decoder.text

    def push(self, token_id: int) -> StopMatch | None:
        """Add one sampled id and return the match that it completes, if any.

        Raises:
            InvalidRequest: A stop regex takes longer than ``STOP_SEARCH_S``.
        """
        self._seconds_left = STOP_SEARCH_S
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
        before = len(self._decoder.text)
        self._decoder.finish()
        if not self._ids or len(self._ids) < self._params.min_new_tokens:
            return None
        self._lengths[-1] = len(self._decoder.text)
        return self._search(before)

    def releasable(self) -> tuple[int, int]:
        """Return how many characters and ids cannot be cut by any later match."""
        text = self._decoder.text
        sure = len(text)
        if not (self._params.stop or self._patterns):
            return sure, len(self._ids)  # nothing can cut them, not even ids of incomplete characters
        if not self._params.include_stop_str_in_output:
            for stop in self._params.stop:
                held = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
                sure = min(sure, len(text) - held)
            for pattern in self._patterns:
                match = self._bounded(pattern, self._beginning)
                if match is not None:
                    sure = min(sure, match.start())
        return sure, self._count_for(sure)

    def _search(self, before: int) -> StopMatch | None:
        for end in range(before + 1, len(self._decoder.text) + 1):
            found = self._match_ending_by(end)
            if found is not None:
                matched, start, stop = found
                return self._cut(matched, stop if self._params.include_stop_str_in_output else start)
        return None

    def _match_ending_by(self, end: int) -> tuple[str, int, int] | None:
        text = self._decoder.text
        if end > self._armed_from:
            hits = [(end - len(stop), stop) for stop in self._params.stop if text.endswith(stop, 0, end)]
            if hits:
                start, stop = min(hits)
                return stop, start, end
        for pattern in self._patterns:
            match = self._bounded(pattern, partial(self._first, end))
            if match is not None:
                return pattern.pattern, match.start(), match.end()
        return None

    def _first(self, end: int, pattern: regex.Pattern[str], seconds: float) -> regex.Match[str] | None:
        # Overlapped: a match before ``_armed_from`` must not hide a later one that begins inside it.
        for match in pattern.finditer(self._decoder.text, 0, end, overlapped=True, timeout=seconds):
            if match.end() > self._armed_from:
                return match
        return None

    def _beginning(self, pattern: regex.Pattern[str], seconds: float) -> regex.Match[str] | None:
        return pattern.search(self._decoder.text, partial=True, timeout=seconds)

    def _bounded(self, pattern: regex.Pattern[str], look: Callable[[regex.Pattern[str], float], _T]) -> _T:
        """Run ``look`` within the token's remaining time: CPU seconds of this thread, as a busy machine is slow."""
        began = time.thread_time()
        seconds = max(self._seconds_left, 1e-3)
        try:
            while True:
                try:
                    return look(pattern, seconds)
                except TimeoutError:
                    # regex's timeout counts CPU seconds of all threads of the process.
                    if time.thread_time() - began >= self._seconds_left:
                        raise _too_slow(pattern.pattern, len(self._decoder.text)) from None
                    seconds *= 2
        finally:
            self._seconds_left -= time.thread_time() - began

    def _cut(self, matched: str, length: int) -> StopMatch:
        return StopMatch(matched=matched, text=self._decoder.text[:length], token_count=self._count_for(length))

    def _count_for(self, length: int) -> int:
        """Return the smallest number of ids whose decoding holds the first ``length`` characters."""
        if length == 0:
            return 0
        count = min(bisect_left(self._lengths, length) + 1, len(self._ids))
        kept = self._decoder.text[:length]
        # A replacement character may be final, not an unfinished character: then an earlier id already held the text.
        while kept.endswith(REPLACEMENT) and count and self._holds(self._ids[: count - 1], kept):
            count -= 1
        return count

    def _holds(self, ids: list[int], text: str) -> bool:
        return self._decode(ids, skip_special_tokens=self._params.skip_special_tokens).startswith(text)


def _too_slow(pattern: str, characters: int) -> InvalidRequest:
    return InvalidRequest(
        f"sampling_params.stop_regex={pattern!r} takes longer than {STOP_SEARCH_S:g} s on the {characters} characters "
        "generated so far; write it so that it need not try many ways to match, such as without a repetition of "
        "alternatives or repetitions",
        field="sampling_params.stop_regex",
    )
