"""Choice of the transport for a push."""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from pathlib import Path
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain_weight_sync.transports.plugins import Transport, find_transport, transport_names


class Strategy(Enum):
    """The transport of a push. The value is the name used in files."""

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
    PLUGIN = "plugin"
    """Through a plugin's transport, which is chosen by its own name."""


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
    asked: Strategy | str | Transport,
    isolation: Isolation,
    capabilities: Set[Capability],
    *,
    can_map: bool = False,
    directory: Path | None = None,
) -> Strategy | Transport:
    """Return the strategy to use, never :attr:`Strategy.AUTO`, or a plugin's transport.

    Args:
        asked: The trainer's choice.
        isolation: The engine's isolation.
        capabilities: The engine's capabilities.
        can_map: True if the engine's GPUs can read the memory of the tensors.
        directory: Folder for a plugin's transport that is chosen by name and created here.

    Raises:
        InvalidRequest: no strategy has that name, or a directory is given with a transport object.
        UnsupportedCapability: the engine does not claim the strategy asked for, or claims none at all.
        WeightSyncError: a plugin's transport does not load, or two plugins register the name.
    """
    if isinstance(asked, Transport) and directory is not None:
        raise InvalidRequest("a transport has a directory of its own; give it to the transport", field="directory")
    known = _parse(asked)
    if not isinstance(known, Strategy):
        name = known if isinstance(known, str) else known.name
        if Capability.WEIGHTS_PLUGIN not in capabilities:
            raise UnsupportedCapability(
                f"weights cannot be sent by {name!r}: this engine does not accept plugin transports",
                capability=Capability.WEIGHTS_PLUGIN.value,
            )
        return find_transport(known)(directory) if isinstance(known, str) else known
    strategy = known
    usable = [s for s in _FASTEST_FIRST if _CAPABILITY[s] in capabilities]
    # A process cannot open its own CUDA IPC handles, and another process cannot take tensors in process.
    elsewhere = Strategy.CUDA_IPC if isolation is Isolation.INLINE else Strategy.IN_PROCESS
    usable = [strategy for strategy in usable if strategy is not elsewhere]
    choices = ", ".join(s.value for s in usable) or "none"
    if strategy is Strategy.AUTO:
        if not usable:
            raise UnsupportedCapability(
                "the engine supports none of weight sync's transports",
                capability=Capability.WEIGHTS_SHARED_MEMORY.value,
            )
        return next((s for s in usable if s is not Strategy.CUDA_IPC or can_map), usable[0])
    if strategy not in usable:
        raise UnsupportedCapability(
            f"weights cannot be sent by strategy {strategy.value!r} to this engine (isolation {isolation.value!r}); "
            f"it can take: {choices}",
            capability=_CAPABILITY[strategy].value,
        )
    return strategy


def _parse(asked: Strategy | str | Transport) -> Strategy | str | Transport:
    """Resolve ``asked`` to a strategy, a transport object, or the name of a plugin's transport."""
    if isinstance(asked, Transport) or (isinstance(asked, Strategy) and asked is not Strategy.PLUGIN):
        return asked
    strategies = {strategy.value: strategy for strategy in Strategy if strategy is not Strategy.PLUGIN}
    if isinstance(asked, str) and asked in strategies:
        return strategies[asked]
    if not isinstance(asked, str) or asked not in transport_names():
        names = ", ".join([*strategies, *transport_names()])
        raise InvalidRequest(f"strategy is {shown(asked)}; give one of {names}", field="strategy")
    return asked
