"""Description of an engine for its holders: facts that never change, and the state, sent again at each change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from drivetrain.backend.base import Backend, ModelInfo, StopKind
from drivetrain.engine.states import EngineStatus
from drivetrain.process.codec import codec_for
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that do not change while an engine lives."""

    config: EngineConfig
    capabilities: frozenset[str]
    """Names of capabilities that the engine has for other processes."""
    native_stops: frozenset[StopKind]
    counts_resumed_tokens: bool
    versions: dict[str, str]
    model: ModelInfo
    pid: int | None
    """Process id of the engine's host process."""
    machine: str
    """Identifies the running machine: memory can be shared only within it."""
    instance: str
    """Identifies this engine among all: another one may listen at the same address later."""
    holder: int = 0
    """Number of the holder that asks, from 1 on; 0: the owner."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that changes while an engine lives."""

    status: EngineStatus
    version: str
    """The weight version that is served."""
    adapters: tuple[str, ...]
    """Names of the LoRA adapters that are loaded."""
    update_id: str
    """Identifies the update that brought the weights; empty: the engine's start did."""


FACTS: Final = codec_for(EngineFacts)
STATE: Final = codec_for(SharedState)


def shared_capabilities(
    backend: type[Backend], config: EngineConfig, capabilities: frozenset[Capability], isolation: Isolation
) -> frozenset[Capability]:
    """Return the capabilities that an engine has for other processes.

    Args:
        backend: The backend's class, for an engine that runs inline.
        config: The engine's configuration.
        capabilities: The engine's capabilities for the process that owns it.
        isolation: The process in which the engine runs.
    """
    shared = capabilities - {Capability.WEIGHTS_IN_PROCESS}
    if isolation is Isolation.INLINE:  # memory that this process cannot map, others can
        shared |= backend.capabilities(config) & {Capability.WEIGHTS_CUDA_IPC}
    return shared


def this_machine() -> str:
    """Return an id of this machine since its last boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
