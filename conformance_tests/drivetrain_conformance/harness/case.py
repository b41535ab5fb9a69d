"""One test of the suite: its body and its requirements."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.served_models import ModelKind

if TYPE_CHECKING:
    from drivetrain_conformance.harness.testbench import Bench

Body = Callable[["Bench"], Awaitable[None]] | Callable[["Bench"], None]


class Hardware(Enum):
    """Hardware that a case requires. On a machine without it the case is *not run*, which never counts as a pass."""

    ANY = "any"
    GPU = "gpu"
    TWO_GPUS = "two_gpus"
    TWO_RANKS = "two_ranks"
    """Two GPUs, or a machine without any, where the engine's ranks share the CPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: its body ends normally on an engine that claims all of ``needs``, and is refused on every other."""

    group: str
    name: str
    summary: str
    """The first paragraph of the body's docstring: the behaviour that is checked."""
    needs: frozenset[Capability]
    """Every capability that the body uses."""
    body: Body
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of the engine's configuration."""
    model: ModelKind = ModelKind.TEXT
    hardware: Hardware = Hardware.ANY
    own_engine: bool = False
    """The body opens and closes its own engines; the shared engine is closed before it starts."""
    changes_weights: bool = False
    """The body leaves the engine with other weights or another weight version."""
    slow: bool = False
    """The body takes many seconds on some engine, and goes deeper into what quicker cases see: not in the profile
    ``quick``.
    """

    @property
    def id(self) -> str:
        """``group/name``."""
        return f"{self.group}/{self.name}"


_registry: Final[dict[str, Case]] = {}


def case(
    *needs: Capability,
    config: Mapping[str, object] | None = None,
    model: ModelKind = ModelKind.TEXT,
    hardware: Hardware = Hardware.ANY,
    own_engine: bool = False,
    changes_weights: bool = False,
    slow: bool = False,
) -> Callable[[Body], Body]:
    """Register the decorated function as a case.

    The case's group is the module or package below ``cases``, its name is the function's, and its summary is the first
    paragraph of the docstring. The body is a coroutine function, or a plain function that runs coroutines with
    ``bench.run`` (for hypothesis).
    """

    def decorate(body: Body) -> Body:
        group = body.__module__.partition(".cases.")[2].partition(".")[0]
        summary = (inspect.getdoc(body) or "").split("\n\n", 1)[0].replace("\n", " ")
        made = Case(
            group=group,
            name=body.__name__,
            summary=summary,
            needs=frozenset(needs) | ({Capability.MOE} if model is ModelKind.MOE else set()),
            body=body,
            config=dict(config or {}),
            model=model,
            hardware=hardware,
            own_engine=own_engine,
            changes_weights=changes_weights,
            slow=slow,
        )
        if not summary:
            raise TypeError(f"{made.id} has no docstring; it must say what holds")
        if made.id in _registry:
            raise TypeError(f"there are two cases {made.id}")
        _registry[made.id] = made
        return body

    return decorate


def registered() -> Mapping[str, Case]:
    """Return every case whose module was imported, by id; see :func:`drivetrain_conformance.cases.all_cases`."""
    return _registry


class Named(Protocol):
    """A case of a backend or of routes."""

    @property
    def group(self) -> str: ...

    @property
    def id(self) -> str: ...


_Named = TypeVar("_Named", bound=Named)


def choose(cases: Sequence[_Named], groups: Collection[str] | None, ids: Collection[str] | None) -> list[_Named]:
    """Return the cases that are in these groups and have these ids; None or none given: all.

    Raises:
        InvalidConfig: a group or a case does not exist.
    """
    known = dict.fromkeys(case.group for case in cases)
    if unknown := set(groups or ()) - known.keys():
        raise InvalidConfig(f"there is no group {min(unknown)!r}; groups: {', '.join(known)}", field="--group")
    chosen = [case for case in cases if not groups or case.group in groups]
    if unknown := set(ids or ()) - {case.id for case in chosen}:
        raise InvalidConfig(f"there is no case {min(unknown)!r}; --list shows them", field="--case")
    return [case for case in chosen if not ids or case.id in ids]
