"""Attributes of the engine that every group of calls uses."""

from __future__ import annotations

from drivetrain.engine.parts import Parts
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation


class Page:
    """The attributes that the groups of calls share. ``InferenceEngine`` sets them."""

    config: EngineConfig
    """The configuration that the engine was created with."""
    capabilities: frozenset[Capability]
    """Capabilities that this engine claims; known before it starts."""
    isolation: Isolation
    """The engine's process: this one, or a host process."""
    versions: dict[str, str]
    """Versions of drivetrain, Python and the engine."""
    parts: Parts
    """The parts of the engine, for tests and extensions; their methods may change between releases. They can be
    replaced before the engine starts: see :class:`~drivetrain.engine.parts.PartKinds`."""
