"""Register mutants: a working backend, the engine over it, or a part of that engine, spoiled in one way.

A mutant is written in one of four forms, and named as reports show it:

* a class below :func:`mutant` overrides public methods of a backend, ``InferenceEngine`` or a part of it;
* a function below a decorator that :func:`backend_mutants` or :func:`engine_mutants` made changes one value on its way,
  see :mod:`drivetrain_conformance.mutants.spoil`;
* a function below :func:`spoiled_backend` or :func:`spoiled_engine` returns a spoiled class itself;
* a function below :func:`spoiled_rank` surrounds the calls of one rank of an engine.

``needs`` names a capability that not every backend claims. A mutant with it is tried only where its case can pass.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from drivetrain.backend.base import Backend
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.types.capability import Capability

SpoilBackend = Callable[[type[Backend]], type[Backend]]
SpoilEngine = Callable[[type[InferenceEngine]], type[InferenceEngine]]
SpoilPart = Callable[[PartKinds], PartKinds]


class SpoilRank(Protocol):
    """Surrounds a call of one rank of an engine: gets the rank's worker, the method's name, and what calls it."""

    __name__: str

    def __call__(self, worker: Any, name: str, proceed: Callable[[], Any], /) -> Any: ...


Words = str | tuple[str, ...]
"""Part of a failure's message, or several parts of which it has one."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong engine."""

    name: str
    wrong: str
    """The fault, in one sentence."""
    caught_by: str
    """The case that must fail, as ``group/name``."""
    says: tuple[str, ...]
    """Parts of messages; the failure's message must contain one of them, so that the mutant is caught for its fault."""
    needs: Capability | None = None
    """A capability that some backends lack. Where the case is refused, the mutant is not tried."""
    spoil_backend: SpoilBackend | None = None
    spoil_engine: SpoilEngine | None = None
    spoil_part: SpoilPart | None = None
    spoil_rank: SpoilRank | None = None


_registry: Final[dict[str, Mutant]] = {}


class MutantDecorator(Protocol[_T]):
    """Decorator that registers an object as a mutant, with the case that must catch it and the failure's words."""

    def __call__(self, caught_by: str, *, says: Words, needs: Capability | None = None) -> Callable[[_T], _T]: ...


def backend_mutants(spoil: Callable[[type[Backend], _T], type[Backend]]) -> MutantDecorator[_T]:
    """Return a decorator for mutants of a backend, whose class ``spoil`` builds with the decorated function."""
    return _registering(lambda wrong: {"spoil_backend": lambda backend: spoil(backend, wrong)})


def engine_mutants(spoil: Callable[[type[InferenceEngine], _T], type[InferenceEngine]]) -> MutantDecorator[_T]:
    """Return a decorator for mutants of ``InferenceEngine``, which ``spoil`` builds with the decorated function."""
    return _registering(lambda wrong: {"spoil_engine": lambda engine: spoil(engine, wrong)})


def mutant(caught_by: str, *, says: Words, needs: Capability | None = None) -> Callable[[_T], _T]:
    """Register the class below as a mutant of its base class: a backend, ``InferenceEngine``, or a part of it."""
    return _registering(_overriding)(caught_by, says=says, needs=needs)


def spoiled_backend(*, caught_by: str, says: Words) -> Callable[[SpoilBackend], SpoilBackend]:
    """Register the function below as a mutant: given a backend's class, it returns a subclass with one thing wrong."""
    return _registering(lambda spoil: {"spoil_backend": spoil})(caught_by, says=says)


def spoiled_engine(*, caught_by: str, says: Words) -> Callable[[SpoilEngine], SpoilEngine]:
    """Register the function below as a mutant of ``InferenceEngine``, given its class."""
    return _registering(lambda spoil: {"spoil_engine": spoil})(caught_by, says=says)


def spoiled_rank(*, caught_by: str, says: Words) -> Callable[[_T], _T]:
    """Register the function below as a mutant: it surrounds the calls of one of two ranks, in the rank's process."""
    registering = _registering(lambda wrong: {"spoil_rank": wrong})
    return registering(caught_by, says=says, needs=Capability.TENSOR_PARALLEL)


def registered_mutants() -> Mapping[str, Mutant]:
    """Return the mutants of all imported modules, by name."""
    return _registry


def mixed(correct: type[_T], wrong: type[object]) -> type[_T]:
    """Return a subclass of ``correct`` whose methods ``wrong`` overrides."""
    return cast(type[_T], type(wrong.__name__, (wrong, correct), {"__doc__": wrong.__doc__}))


def _overriding(wrong: Any) -> Mapping[str, object]:
    if issubclass(wrong, Backend):
        return {"spoil_backend": lambda backend: mixed(backend, wrong)}
    if issubclass(wrong, InferenceEngine):
        return {"spoil_engine": lambda engine: mixed(engine, wrong)}
    (part,) = (name for name, kind in dataclasses.asdict(PartKinds()).items() if issubclass(wrong, kind))
    return {"spoil_part": lambda kinds: dataclasses.replace(kinds, **{part: mixed(getattr(kinds, part), wrong)})}


def _registering(spoils: Callable[[_T], Mapping[str, object]]) -> MutantDecorator[_T]:
    def decorator(caught_by: str, *, says: Words, needs: Capability | None = None) -> Callable[[_T], _T]:
        def decorate(wrong: _T) -> _T:
            name = getattr(wrong, "__name__", "")
            sentence = (inspect.getdoc(wrong) or "").split("\n\n", 1)[0].replace("\n", " ")
            words = (says,) if isinstance(says, str) else says
            if not sentence or not all(words):
                raise TypeError(f"the mutant {name} must say what is wrong with it, and how it is caught")
            if name in _registry:
                raise TypeError(f"there are two mutants {name}")
            made = Mutant(name, sentence, caught_by, words, needs)
            _registry[name] = dataclasses.replace(made, **spoils(wrong))  # type: ignore[arg-type]
            return wrong

        return decorate

    return decorator
