"""Facts and aborts of the server's other processes, for routes that are about the server as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import TypedDict


class SessionFacts(TypedDict):
    """One session."""

    session_id: str
    created: float
    turns: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Numbers of one process, which are added up over all."""

    answers: dict[str, dict[int, int]] = field(default_factory=dict)
    """Route → status → number of answers."""
    generated: int = 0
    """Number of sampled tokens."""
    tokens_per_second: float = 0.0

    def __add__(self, other: Counted) -> Counted:
        """Return the sums."""
        answers = {route: dict(by_status) for route, by_status in self.answers.items()}
        for route, by_status in other.answers.items():
            mine = answers.setdefault(route, {})
            for status, number in by_status.items():
                mine[status] = mine.get(status, 0) + number
        return Counted(answers, self.generated + other.generated, self.tokens_per_second + other.tokens_per_second)


class OtherProcesses:
    """The other processes of a server; this class stands for a server that has none."""

    async def counts(self) -> list[Counted]:
        """Return the numbers of each process, those that have ended included."""
        return []

    async def sessions(self) -> list[SessionFacts]:
        """Return the recorded sessions of all processes."""
        return []

    async def request_ids(self) -> list[str]:
        """Return the ids of SGLang's requests in flight."""
        return []

    async def abort(self, request_id: str) -> None:
        """End one request, wherever it is."""

    async def abort_all(self) -> None:
        """End every request."""
