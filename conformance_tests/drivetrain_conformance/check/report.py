"""The rows of one check, and the report that they make."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

FORMAT: Final = 1
"""Version of the report's JSON form."""


class Outcome(Enum):
    """The verdict of one row."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    """The engine does not claim a capability that the row needs."""
    NOT_RUN = "not run"
    """Something before it failed, or the engine was configured without it."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One thing that was checked."""

    name: str
    outcome: Outcome
    seen: str
    """The figure, or the error."""
    against: str
    """The expectation, with its unit."""
    seconds: float
    worst: float | None = None
    """Largest difference of a logprob from the reference's, in nats; None: the row compares no logprobs."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of one check."""

    format: int
    backend: str
    model: str
    reference: str
    """Device and arithmetic of the reference."""
    claims: dict[str, bool]
    """Capabilities that decide which rows are run: claimed or not."""
    versions: dict[str, str]
    date: str
    seconds: float
    rows: list[CheckRow]

    @property
    def ok(self) -> bool:
        """True if no row failed."""
        return all(row.outcome is not Outcome.FAILED for row in self.rows)

    def row(self, name: str) -> CheckRow:
        """Return the row of this name.

        Raises:
            KeyError: there is no such row.
        """
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise KeyError(f"no row {name!r}; rows: {', '.join(row.name for row in self.rows)}")
        return found

    def to_json(self) -> bytes:
        """Return the report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode({"ok": self.ok, **msgspec.to_builtins(self)}), indent=1) + b"\n"

    def write(self, path: Path) -> None:
        """Write the report as JSON, and make its folder if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.to_json())
