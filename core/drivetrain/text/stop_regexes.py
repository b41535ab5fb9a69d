"""Search for one stop regex in a text that grows, without starting again at its beginning.

A match may span many tokens, so each search begins at the earliest character from which the text so far can still
become a match. The ``regex`` package finds it: a *partial match* is one that fails only because the text ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import regex

from drivetrain.checks.limits import STOP_SEARCH_S
from drivetrain.errors import InvalidRequest

_T = TypeVar("_T")

_FLAGS: Final = regex.compile(r"\(\?[ims]+\)")
_PIECES: Final = regex.compile(
    r"""
    (?P<assertion> \$ | \\[ZbB] )
    | (?P<lookbehind> \(\?<[=!] )
    | (?P<plain>
        [^\\\[(){|?*+$]
        | \\(?: [^\w\s] | [dDwWsSnrtfvA] | x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} )
        | \[\^?\]? (?: [^\\\[\]] | \\(?: [^\w\s] | [dDwWsSnrtfv] ) )* \]
        | \((?![?*]) | \(\?: | \(\?[ims]+: | \(\?P?<[A-Za-z]\w*> | \) | \|
        | (?: [?*+] | \{\d+(?:,\d*)?\} | \{,\d+\} ) \?? (?!\+)
    )
    """,
    regex.VERBOSE,
)
"""The syntax for which a start without a partial match can never match. Lookaheads, atomic groups, possessive repeats
and backtracking verbs are left out: later text may turn their failure into a match."""
_MAY_BE_MORE: Final = {r"\b": r"(?:\b|\Z(?s:.))", r"\B": r"(?:\B|\Z(?s:.))"}
"""Word boundaries depend on the next character, so at the end of the text they count as a partial match."""

_STRIDE: Final = 64
"""Characters after which the beginning of the search is found again."""


class SearchBudget:
    """The CPU time that regexes may take after one token."""

    def __init__(self) -> None:
        self._seconds_left = STOP_SEARCH_S

    def renew(self) -> None:
        """Restart the time limit, for the next token."""
        self._seconds_left = STOP_SEARCH_S

    def run(self, look: Callable[[float], _T], pattern: str, characters: int) -> _T:
        """Return ``look(seconds)``, retried within the remaining CPU time of this thread.

        Raises:
            InvalidRequest: The time is used up.
        """
        began = time.thread_time()
        seconds = max(self._seconds_left, 1e-3)
        try:
            while True:
                try:
                    return look(seconds)
                except TimeoutError:
                    # regex's timeout counts CPU seconds of all threads of the process.
                    if time.thread_time() - began >= self._seconds_left:
                        raise _too_slow(pattern, characters) from None
                    seconds *= 2
        finally:
            self._seconds_left -= time.thread_time() - began


class StopRegex:
    """One stop regex and the place from which the text so far can still match it."""

    def __init__(self, pattern: str, budget: SearchBudget) -> None:
        self.pattern = pattern
        self._budget = budget
        self._compiled = regex.compile(pattern)
        begun = _begun(pattern)
        self._begun = None if begun is None else regex.compile(begun)
        self._depends_on_end = begun is None or any(
            piece.group("assertion") is not None for piece in _PIECES.finditer(pattern)
        )
        self._earliest = 0
        self._known_for = 0
        """Length of the text for which ``_earliest`` was found."""

    @property
    def is_incremental(self) -> bool:
        """True if later text cannot turn a start without a partial match into a match."""
        return self._begun is not None

    def restart(self) -> None:
        """Search from the beginning: earlier characters have changed."""
        self._earliest = self._known_for = 0

    def first(self, text: str, before: int, until: int, armed_from: int) -> tuple[int, int, int] | None:
        """Find the shortest prefix of ``text`` that holds a match which ends after ``armed_from``.

        Args:
            text: The text so far.
            before: Length of the prefix that was searched earlier.
            until: Length of the longest prefix to search.
            armed_from: Matches that end before it do not count.

        Returns:
            The length of the prefix, and where the match in it begins and ends.
        """
        if until <= before or (not self._depends_on_end and self._match(text, until, armed_from) is None):
            return None
        for end in range(before + 1, until + 1):
            match = self._match(text, end, armed_from)
            if match is not None:
                return end, match.start(), match.end()
        return None

    def may_begin_at(self, text: str) -> int:
        """Return the earliest place at which a match that needs more text can begin."""
        if self._begun is None:
            match = self._partial(self._compiled, text)
            return len(text) if match is None else match.start()
        self.advance(text)
        return self._earliest

    def advance_rarely(self, text: str) -> None:
        """Call :meth:`advance` once per ``_STRIDE`` characters: searching a few again takes less time."""
        if len(text) - self._known_for >= _STRIDE:
            self.advance(text)

    def advance(self, text: str) -> None:
        """Let later searches begin at the earliest place from which ``text`` can still become a match."""
        if self._begun is None or self._known_for == len(text):
            return
        self._known_for = len(text)
        try:
            match = self._partial(self._begun, text)
        except InvalidRequest:
            return  # Not in time: later searches begin where this one did.
        if match is None:
            self._earliest = len(text)
        elif match.partial:
            self._earliest = match.start()
        # A whole match may hide a partial one that begins earlier, so the place stays.

    def _match(self, text: str, end: int, armed_from: int) -> regex.Match[str] | None:
        def look(seconds: float) -> regex.Match[str] | None:
            # Overlapped: a match before ``armed_from`` must not hide a later one that begins inside it.
            for match in self._compiled.finditer(text, self._earliest, end, overlapped=True, timeout=seconds):
                if match.end() > armed_from:
                    return match
            return None

        return self._budget.run(look, self.pattern, len(text))

    def _partial(self, compiled: regex.Pattern[str], text: str) -> regex.Match[str] | None:
        def look(seconds: float) -> regex.Match[str] | None:
            return compiled.search(text, self._earliest, partial=True, timeout=seconds)

        return self._budget.run(look, self.pattern, len(text))


def _begun(pattern: str) -> str | None:
    """Return a regex whose partial matches begin wherever more text can become a match; None if there is none."""
    flags = _FLAGS.match(pattern)
    at = flags.end() if flags else 0
    head, pieces = pattern[:at], []
    looks_behind = asserts = False
    while at < len(pattern):
        piece = _PIECES.match(pattern, at)
        if piece is None:
            return None
        looks_behind |= piece.group("lookbehind") is not None
        asserts |= piece.group("assertion") is not None
        pieces.append(_MAY_BE_MORE.get(piece.group(), piece.group()))
        at = piece.end()
    if looks_behind and asserts:
        return None
    # Only matches that reach the end of the text can grow; the others are final.
    return rf"{head}(?:{''.join(pieces)})\Z"


def _too_slow(pattern: str, characters: int) -> InvalidRequest:
    return InvalidRequest(
        f"sampling_params.stop_regex={pattern!r} takes longer than {STOP_SEARCH_S:g} s on the {characters} characters "
        "generated so far; write it so that it need not try many ways to match, such as without a repetition of "
        "alternatives or repetitions",
        field="sampling_params.stop_regex",
    )
