"""Find the exception that made an engine fail in the lines of its log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

_HEADER: Final = "Traceback (most recent call last):"
_LINKS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_LONGEST: Final = 400
"""Maximum characters that are shown of an exception."""
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_PREFIX: Final = re.compile(
    r"""(?P<process>\([^()]*\bpid=\d+\)\ ?|\[rank\d+\]:\ ?)?          # vLLM's processes, ranks of torch
    (?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ [\d:., -]+\ (?P<place>\[[^\]]+:\d+\])(?:\ |$))?  # vLLM's logger
    (?P<stamp>\[\d{4}-\d\d-\d\d\ [^\]]*\]\ )?                           # SGLang's logger
    """,
    re.VERBOSE,
)
_GROUP_MARGIN: Final = re.compile(r"(?P<indent> +)[|+] (?:Exception Group )?$")
"""Margin before the first line of a traceback of an exception group, or of a group nested in it."""
_EXCEPTION: Final = re.compile(r"(?P<path>(?:[A-Za-z_][\w<>]*\.)*)(?P<name>[A-Za-z_]\w*)(?P<message>:.*)?$")
_UNFINISHED: Final = re.compile(r":$|\d validation errors? for [\w.]+$")
"""Ends the first line of a message that goes on with the cause in the next line."""
_LEVEL_NAMES: Final = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})
_HARMLESS: Final = re.compile(r"Exception ignored in|(?:DEBUG|INFO|WARNING)\b")
"""Start of the line above a traceback, if the exception was only logged or ignored and ended nothing."""
_CRASH: Final = "Fatal Python error: "
_AFTER_EFFECT_NAMES: Final = frozenset(
    "BaseExceptionGroup BrokenPipeError CancelledError ConnectionResetError EOFError EngineDeadError ExceptionGroup "
    "GeneratorExit KeyboardInterrupt RemoteTraceback SystemExit _RemoteTraceback".split()
)
_AFTER_EFFECT_PHRASES: Final = (
    "see root cause above",
    "see stack trace",
    "error messages above",
    "died during initialization",
    "initialization failed. warmup error",
)


@dataclass(slots=True)
class _Exception:
    name: str
    text: str

    def is_after_effect(self) -> bool:
        """Return True if this exception only reports that another process or task failed."""
        words = self.text.lower()
        return self.name in _AFTER_EFFECT_NAMES or any(phrase in words for phrase in _AFTER_EFFECT_PHRASES)


@dataclass(slots=True)
class _Writer:
    """Tracebacks of one source of lines, such as one process's logger."""

    chains: list[list[_Exception]]
    """The chained exceptions of each traceback, in the order of the log; shared by all writers."""
    chain: list[_Exception] = field(default_factory=list)
    margin: str | None = None
    """Left of the lines of the traceback that is being read; None outside of one."""
    linked: bool = False
    message_goes_on: bool = False
    before: str = ""
    """The line before this one."""

    def read(self, line: str, *, new_record: bool, harmless: bool) -> None:
        text = line if self.margin is None else line.removeprefix(self.margin)
        left, found, _ = line.partition(_HEADER)
        if found:
            self._open(left, harmless or _HARMLESS.match(self.before) is not None)
        elif line.strip(" |") in _LINKS:
            self.linked, self.message_goes_on = True, False
        elif self.margin is not None and not new_record:
            self._in_traceback(text)
        elif self.message_goes_on and not new_record:
            self._in_message(text)
        else:
            self.message_goes_on = False
        self.before = line

    def _open(self, left: str, harmless: bool) -> None:
        if not self.linked:
            self.chain = []
            if not harmless:
                self.chains.append(self.chain)
        group = _GROUP_MARGIN.match(left)
        self.margin = "" if group is None else f"{group['indent']}| "
        self.linked = self.message_goes_on = False

    def _in_traceback(self, text: str) -> None:
        found = None if text[:1].isspace() else _EXCEPTION.match(text)
        if found is None or found["name"] in _LEVEL_NAMES:
            return  # a frame, its source, or another process's words
        self.chain.append(_Exception(found["name"], text.strip()))
        self.margin, self.message_goes_on = None, True

    def _in_message(self, text: str) -> None:
        last = self.chain[-1]
        goes_on = text[:1].isspace() or _UNFINISHED.search(last.text) is not None
        if len(last.text) < _LONGEST and goes_on and not text.strip().startswith("+--"):
            last.text += f" {text.strip()}"
        else:
            self.message_goes_on = False


def first_exception(lines: Iterable[str]) -> str:
    """Return the exception that made an engine fail, as one line; "" if its log shows none.

    The result is the first exception of the first traceback. Exceptions that only report the failure of another process
    are skipped. If the first exception led to another one, that one follows. The blank lines of the log may be missing.
    """
    lines = list(lines)
    for chain in _chains(lines):
        causes = [exception.text for exception in chain if not exception.is_after_effect()]
        if causes:
            first, last = _shortened(causes[0]), _shortened(causes[-1])
            return first if first == last else f"{first}, which led to {last}"
    crash = next((line for line in lines if line.startswith(_CRASH)), "")
    return _shortened(crash)


def _chains(lines: Iterable[str]) -> list[list[_Exception]]:
    chains: list[list[_Exception]] = []
    writers: dict[str, _Writer] = {}
    for source, line, level, stamped in _split(lines):
        writer = writers.setdefault(source, _Writer(chains))
        writer.read(line, new_record=stamped, harmless=level in ("DEBUG", "INFO", "WARNING"))
    return chains


def _split(lines: Iterable[str]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield each line's source, text and level, and whether it begins a record whose other lines have no prefix."""
    for line in lines:
        plain = _COLOUR.sub("", line)
        prefix = _PREFIX.match(plain)
        assert prefix is not None  # each of its parts is optional
        source = f"{(prefix['process'] or '').rstrip()}{prefix['place'] or ''}"
        yield source, plain[prefix.end() :], prefix["level"] or "", prefix["stamp"] is not None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
