"""Description of an engine for its holders: facts that never change, and the state, sent again at each change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from drivetrain.backend.base import ModelInfo, StopKind
from drivetrain.engine.states import EngineStatus
from drivetrain.process.codec import codec_for
from drivetrain.types.config import EngineConfig


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that do not change while an engine lives."""

    config: EngineConfig
    capabilities: frozenset[str]
    """Names of capabilities that the engine has for other processes."""
    native_stops: frozenset[StopKind]
    versions: dict[str, str]
    model: ModelInfo
    pid: int | None
    """Process id of the engine's host process."""
    machine: str
    """Identifies the running machine: memory can be shared only within it."""
    instance: str
    """Identifies this engine among all: another one may listen at the same address later."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that changes while an engine lives."""

    status: EngineStatus
    version: str
    """The weight version that is served."""
    adapters: tuple[str, ...]
    """Names of the LoRA adapters that are loaded."""


FACTS: Final = codec_for(EngineFacts)
STATE: Final = codec_for(SharedState)


def this_machine() -> str:
    """Return an id of this machine since its last boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


__all__ = ["FACTS", "STATE", "EngineFacts", "SharedState", "this_machine"]
