"""The verdict on each capability, concluded from the verdicts of the cases that need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain.types.capability import Capability
from drivetrain_conformance.harness.verdict import Verdict


@dataclass(frozen=True, slots=True)
class CapabilityResult:
    """The conclusion about one capability."""

    capability: Capability
    claimed: bool
    verdict: Verdict
    """PASSED: claimed and seen to work. REFUSED: unclaimed and seen to refuse."""
    message: str = ""


class CapabilityResults:
    """Collects claims and verdicts."""

    def __init__(self) -> None:
        self._claimed: set[Capability] = set()
        self._verdicts: dict[Capability, list[tuple[str, Verdict]]] = {}
        self.cases: set[str] = set()
        """Ids of the cases whose verdict was recorded."""

    def claim(self, capabilities: Iterable[Capability]) -> None:
        """Record that an engine of this run claims these capabilities."""
        self._claimed.update(capabilities)

    def record(self, case: str, needs: Iterable[Capability], verdict: Verdict) -> None:
        """Record the verdict of a case, by its id."""
        self.cases.add(case)
        for capability in needs:
            self._verdicts.setdefault(capability, []).append((case, verdict))

    def conclude(self, *, complete: bool) -> list[CapabilityResult]:
        """Return one conclusion for each capability.

        In a ``complete`` run, a claimed capability fails if none of its cases passed: it was not seen to work.
        """
        return [self._conclude(capability, complete) for capability in Capability]

    def _conclude(self, capability: Capability, complete: bool) -> CapabilityResult:
        recorded = self._verdicts.get(capability, [])
        claimed = capability in self._claimed
        verdicts = [verdict for _, verdict in recorded]
        for bad in (Verdict.FAILED, Verdict.KNOWN_FAILURE):
            if bad in verdicts:
                cases = ", ".join(case for case, verdict in recorded if verdict is bad)
                return CapabilityResult(capability, claimed, bad, cases)
        if Verdict.PASSED in verdicts:
            return CapabilityResult(capability, claimed, Verdict.PASSED)
        if claimed and Verdict.NOT_RUN in verdicts:
            return CapabilityResult(capability, claimed, Verdict.NOT_RUN, "no case of it could run on this machine")
        if claimed and complete:
            return CapabilityResult(capability, claimed, Verdict.FAILED, "claimed, but no case of it passed")
        if Verdict.REFUSED in verdicts and not claimed:
            return CapabilityResult(capability, claimed, Verdict.REFUSED)
        return CapabilityResult(capability, claimed, Verdict.NOT_RUN, "no case of it ran")
