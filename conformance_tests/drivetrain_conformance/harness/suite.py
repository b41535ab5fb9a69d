"""What an author says of the backend under test: how an engine is opened, and what to compare it with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import BackendLoadError
from drivetrain.types.config import Isolation
from drivetrain_conformance.harness.verdict import KnownFailure
from drivetrain_conformance.references.oracle import Oracle, TransformersOracle

GROUP: Final = "drivetrain.conformance"
"""Entry-point group in which a distribution names the :class:`Suite` subclass of its backend."""


class Suite:
    """The conformance suite of one backend. A subclass sets :attr:`backend`, and may change how engines are opened."""

    backend: ClassVar[str]
    """Name of the backend."""
    profile: ClassVar[str] = "ci"
    """How much work to do: ``smoke``, ``ci`` or ``gpu``."""
    seed: ClassVar[int] = 0
    """Seed of everything random in the suite."""
    layers: ClassVar[int | None] = None
    """Of the tiny model that is served; None: two. An engine that is done before it can be interrupted wants more."""
    known_failures: ClassVar[tuple[KnownFailure, ...]] = ()
    """Cases that fail, and how."""

    elsewhere: ClassVar[tuple[Mapping[str, object], ...]] = ()
    """Fields of configurations in which the engine claims what it does not claim without: cases that need one of those
    capabilities are run with the first that has them."""

    isolation: Isolation | None = None
    """Where engines run; None: the backend's choice."""
    fields: Mapping[str, object] = MappingProxyType({})
    """Fields of the configuration of every engine, such as ``{"device": "cpu"}``."""

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Make an engine, not started, with these fields of its configuration; ``model`` is always among them."""
        own: dict[str, object] = {"backend": self.backend, **self.fields}
        if self.isolation is not None:
            own["isolation"] = self.isolation
        return create_engine({**own, **fields})

    def oracle(self, model: Path) -> Oracle | None:
        """What to compare the engine's numbers with; None: nothing, and cases that compare are not run."""
        return TransformersOracle(model)


def suite_of(backend: str) -> type[Suite]:
    """The suite class of a backend: the one that its distribution names, or the plain one.

    Raises:
        BackendLoadError: the distribution names something else.
    """
    for entry in importlib.metadata.entry_points(group=GROUP, name=backend):
        cls: object = entry.load()
        if not isinstance(cls, type) or not issubclass(cls, Suite):
            raise BackendLoadError(f"the entry point {entry.value!r} of group {GROUP!r} is {cls!r}; expected a Suite")
        return cls
    return type("PlainSuite", (Suite,), {"backend": backend, "__doc__": f"The suite of {backend}."})
