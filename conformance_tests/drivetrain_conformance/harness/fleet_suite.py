"""The suite of any backend through fleets of two of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain_conformance.harness.suite import Suite
from drivetrain_conformance.references.oracle import Oracle
from drivetrain_fleet import InferenceEngineClient

_WAITS: Final = "the second engine takes the request that is meant to wait for the first"
ABOUT_ONE_ENGINE: Final[Mapping[str, str]] = {
    "generate/higher_priority_starts_sooner": _WAITS,
    "abort/what_waits_its_turn_can_be_aborted": _WAITS,
    "sleep/the_memory_of_weights_comes_back": "two engines hold the weights twice",
}
"""Cases that apply to a single engine only, and the reason."""


class FleetSuite(Suite):
    """Opens a fleet of two engines wherever another suite opens one engine.

    Args:
        inner: The suite of the backend.
    """

    def __init__(self, inner: Suite) -> None:
        self._inner = inner
        vars(self).update(
            backend=inner.backend,
            profile=inner.profile,
            seed=inner.seed,
            layers=inner.layers,
            known_failures=inner.known_failures,
            elsewhere=inner.elsewhere,
            fields=inner.fields,
        )

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Create a fleet of two engines with these fields, without starting them; an update must reach both."""
        return InferenceEngineClient([self._inner.open_engine(fields) for _ in range(2)], min_engines=2)

    def isolation_of(self, fields: Mapping[str, object]) -> str:
        """Return "fleet"."""
        return "fleet"

    def left_out(self, case: str) -> str:
        """Return the reason for which a case applies to a single engine only; empty if a fleet can run it."""
        if case.startswith("faults/"):
            return "it strikes the one process of an engine; the project's tests strike those of fleets"
        return ABOUT_ONE_ENGINE.get(case, "") or self._inner.left_out(case)

    def own_processes(self) -> frozenset[int]:
        """Return the pids of processes that belong to the backend's suite."""
        return self._inner.own_processes()

    def oracle(self, model: Path) -> Oracle | None:
        """Return the backend's oracle."""
        return self._inner.oracle(model)
