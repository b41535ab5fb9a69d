"""A suite describes the backend under test: how to open an engine, and the oracle to compare it with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import BackendLoadError
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain_conformance.harness.verdict import KnownFailure
from drivetrain_conformance.references.oracle import Oracle, TransformersOracle

GROUP: Final = "drivetrain.conformance"
"""Entry-point group under which a distribution registers its backend's :class:`Suite` subclass."""


class Suite:
    """The conformance suite of one backend. A subclass sets :attr:`backend` and may override how engines are opened."""

    backend: ClassVar[str]
    """Name of the backend under test."""
    profile: ClassVar[str] = "ci"
    """Size of the run: ``quick``, ``smoke``, ``ci`` or ``gpu``."""
    seed: ClassVar[int] = 0
    """Seed of all randomness in the suite."""
    layers: ClassVar[int | None] = None
    """Layers of the tiny model; None: two. Use more for an engine that finishes before a case can interrupt it."""
    known_failures: ClassVar[tuple[KnownFailure, ...]] = ()
    """Cases that are expected to fail, with their error and issue."""

    elsewhere: ClassVar[tuple[Mapping[str, object], ...]] = ()
    """Alternative configurations, tried in order: a case whose capabilities are unclaimed by default runs with the
    first one that claims them all.
    """

    isolation: Isolation | None = None
    """The place where engines run; None: the backend's choice."""
    fields: Mapping[str, object] = MappingProxyType({})
    """Configuration fields of every engine, such as ``{"device": "cpu"}``."""

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Create an engine with these configuration fields, without starting it; ``model`` is always among them."""
        own: dict[str, object] = {"backend": self.backend, **self.fields}
        if self.isolation is not None:
            own["isolation"] = self.isolation
        return create_engine({**own, **fields})

    def claims(self, fields: Mapping[str, object]) -> frozenset[Capability]:
        """Return the capabilities that :meth:`open_engine` would claim with these fields."""
        return self.open_engine(fields).capabilities

    def isolation_of(self, fields: Mapping[str, object]) -> str:
        """Return where engines with these fields run, for the report."""
        return self.open_engine(fields).isolation.value

    def left_out(self, case: str) -> str:
        """Return the reason for which a case, ``group/name``, says nothing about these engines; empty: it is run."""
        return ""

    def own_processes(self) -> frozenset[int]:
        """Return the pids of processes that belong to the suite, such as servers; an engine must leave no others."""
        return frozenset()

    def oracle(self, model: Path) -> Oracle | None:
        """Return the oracle for a model folder, or None: then cases that compare with an oracle are not run."""
        return TransformersOracle(model)


def suite_of(backend: str) -> type[Suite]:
    """Return the suite class that a backend's distribution registers, or a plain one.

    Raises:
        BackendLoadError: the registered entry point is not a :class:`Suite` subclass.
    """
    for entry in importlib.metadata.entry_points(group=GROUP, name=backend):
        cls: object = entry.load()
        if not isinstance(cls, type) or not issubclass(cls, Suite):
            raise BackendLoadError(f"the entry point {entry.value!r} of group {GROUP!r} is {cls!r}; expected a Suite")
        return cls
    return type("PlainSuite", (Suite,), {"backend": backend, "__doc__": f"The suite of {backend}."})
