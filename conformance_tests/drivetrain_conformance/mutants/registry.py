"""Mutants: a backend, an ``InferenceEngine`` or one of its parts, with a single fault put in on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from drivetrain.backend.base import Backend
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds

SpoilBackend = Callable[[type[Backend]], type[Backend]]
SpoilEngine = Callable[[type[InferenceEngine]], type[InferenceEngine]]
SpoilPart = Callable[[PartKinds], PartKinds]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong engine."""

    name: str
    wrong: str
    """The fault, in one sentence."""
    caught_by: str
    """The case that must fail, as ``group/name``."""
    says: tuple[str, ...]
    """Parts of messages, of which the failure's has one: it must be caught for what is wrong with it."""
    spoil_backend: SpoilBackend | None = None
    spoil_engine: SpoilEngine | None = None
    spoil_part: SpoilPart | None = None


_registry: Final[dict[str, Mutant]] = {}


def spoiled_backend(*, caught_by: str, says: str | tuple[str, ...]) -> Callable[[SpoilBackend], SpoilBackend]:
    """Make the function below a mutant: given a backend's class, it returns a subclass with one thing wrong."""

    def decorate(spoil: SpoilBackend) -> SpoilBackend:
        _add(Mutant(spoil.__name__, _sentence(spoil), caught_by, _parts(says), spoil_backend=spoil))
        return spoil

    return decorate


def spoiled_engine(*, caught_by: str, says: str | tuple[str, ...]) -> Callable[[SpoilEngine], SpoilEngine]:
    """The same for the engine page: given its class, the function returns a subclass with one thing wrong."""

    def decorate(spoil: SpoilEngine) -> SpoilEngine:
        _add(Mutant(spoil.__name__, _sentence(spoil), caught_by, _parts(says), spoil_engine=spoil))
        return spoil

    return decorate


def spoiled_part(*, caught_by: str, says: str | tuple[str, ...]) -> Callable[[SpoilPart], SpoilPart]:
    """The same for a part of the engine: given the parts' classes, the function replaces one of them by a subclass."""

    def decorate(spoil: SpoilPart) -> SpoilPart:
        _add(Mutant(spoil.__name__, _sentence(spoil), caught_by, _parts(says), spoil_part=spoil))
        return spoil

    return decorate


def registered_mutants() -> Mapping[str, Mutant]:
    """Every mutant whose module was imported, by name; see :func:`drivetrain_conformance.mutants.run.all_mutants`."""
    return _registry


def _add(mutant: Mutant) -> None:
    if not mutant.wrong or not all(mutant.says):
        raise TypeError(f"the mutant {mutant.name} must say what is wrong with it, and how it is caught")
    if mutant.name in _registry:
        raise TypeError(f"there are two mutants {mutant.name}")
    _registry[mutant.name] = mutant


def _parts(says: str | tuple[str, ...]) -> tuple[str, ...]:
    return (says,) if isinstance(says, str) else says


def _sentence(spoil: Callable[..., object]) -> str:
    return (inspect.getdoc(spoil) or "").split("\n\n", 1)[0].replace("\n", " ")
