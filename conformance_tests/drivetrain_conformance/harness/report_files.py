"""Reports as files, and what reports of backends and of routes say of their cases."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from drivetrain.errors import InvalidConfig
from drivetrain_conformance.harness.verdict import Verdict


@dataclass(frozen=True, slots=True)
class CaseEntry:
    """One case of a report."""

    case: str
    verdict: Verdict
    summary: str
    seconds: float
    message: str
    needs: list[str] = field(default_factory=list)
    """Capabilities that the case needs; empty for a case of routes."""


class CaseEntries:
    """Base class of reports: counts of their cases, and those that failed or did not run."""

    __slots__ = ()
    cases: list[CaseEntry]

    def counts(self) -> dict[Verdict, int]:
        """Return the number of cases by verdict."""
        counted = Counter(entry.verdict for entry in self.cases)
        return {verdict: counted[verdict] for verdict in Verdict}

    def failures(self) -> list[str]:
        """Return every failed case, with its message."""
        return [f"{entry.case}: {entry.message}" for entry in self.cases if entry.verdict.is_failure]

    def not_run(self) -> list[str]:
        """Return every case that could not be run, with the reason."""
        return [f"{entry.case}: {entry.message}" for entry in self.cases if entry.verdict is Verdict.NOT_RUN]


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


_Written = TypeVar("_Written", bound=_Versioned)


def today() -> str:
    """Return the date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write_json(value: object, path: Path, indent: int = 1) -> None:
    """Write a value as JSON, and make its folder if it is missing; a negative ``indent`` puts it on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n")


def read_json(path: Path, kind: type[_Written], what: str, command: str, version: int) -> _Written:
    """Read a command's JSON file, in this ``version`` of its format.

    Raises:
        InvalidConfig: the file cannot be read, holds something else, or has another format.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidConfig(f"{path} is no {what} of 'drivetrain {command}': {error}") from error
    if found.format != version:
        again = f"this version reads {version}: write it again with 'drivetrain {command}'"
        raise InvalidConfig(f"{path} is a {what} in format {found.format}; {again}")
    return found
