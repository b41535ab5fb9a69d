"""Which way the weights travel."""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import Final

from drivetrain.capability import Capability
from drivetrain.config import Isolation
from drivetrain.errors import InvalidRequest, UnsupportedCapability


class Strategy(Enum):
    """A way for weights to travel. The value is the name used in files."""

    AUTO = "auto"
    """The fastest that the engine claims."""
    IN_PROCESS = "in_process"
    """Straight from the trainer's tensors to the engine's, in one process."""
    SHARED_MEMORY = "shared_memory"
    """Through memory of this host that both processes map."""
    DISK = "disk"
    """Through a folder of safetensors."""
    CUDA_IPC = "cuda_ipc"
    """Through memory of a GPU that both processes use."""
    BROADCAST = "broadcast"
    """Through a torch.distributed broadcast."""


_CAPABILITY: Final = {
    Strategy.IN_PROCESS: Capability.WEIGHTS_IN_PROCESS,
    Strategy.SHARED_MEMORY: Capability.WEIGHTS_SHARED_MEMORY,
    Strategy.DISK: Capability.WEIGHTS_DISK,
    Strategy.CUDA_IPC: Capability.WEIGHTS_CUDA_IPC,
    Strategy.BROADCAST: Capability.WEIGHTS_BROADCAST,
}
_FASTEST_FIRST: Final = (
    Strategy.IN_PROCESS,
    Strategy.CUDA_IPC,
    Strategy.SHARED_MEMORY,
    Strategy.BROADCAST,
    Strategy.DISK,
)


def choose(
    asked: Strategy | str, isolation: Isolation, capabilities: Set[Capability], *, on_gpu: bool = False
) -> Strategy:
    """Return the strategy to use, never :attr:`Strategy.AUTO`.

    Args:
        asked: By the trainer.
        isolation: Where the engine runs.
        capabilities: What it claims.
        on_gpu: Whether the tensors lie on the one GPU that this process sees, and so the engine too.

    Raises:
        InvalidRequest: there is no strategy of that name.
        UnsupportedCapability: the engine does not claim the one asked for, or none at all.
    """
    strategy = _parse(asked)
    usable = [s for s in _FASTEST_FIRST if _CAPABILITY[s] in capabilities]
    # A process cannot map its own memory, and no other can reach into it.
    elsewhere = Strategy.CUDA_IPC if isolation is Isolation.INLINE else Strategy.IN_PROCESS
    usable = [strategy for strategy in usable if strategy is not elsewhere]
    choices = ", ".join(s.value for s in usable) or "none"
    if strategy is Strategy.AUTO:
        if not usable:
            raise UnsupportedCapability(
                "the engine claims no way to take weights that weight sync can send",
                capability=Capability.WEIGHTS_SHARED_MEMORY.value,
            )
        return next((s for s in usable if s is not Strategy.CUDA_IPC or on_gpu), usable[0])
    if strategy not in usable:
        raise UnsupportedCapability(
            f"weights cannot be sent by strategy {strategy.value!r} to this engine (isolation {isolation.value!r}); "
            f"it can take: {choices}",
            capability=_CAPABILITY[strategy].value,
        )
    return strategy


def _parse(asked: Strategy | str) -> Strategy:
    try:
        return Strategy(asked)
    except ValueError as error:
        names = ", ".join(strategy.value for strategy in Strategy)
        raise InvalidRequest(f"strategy is {asked!r}; give one of {names}", field="strategy") from error
