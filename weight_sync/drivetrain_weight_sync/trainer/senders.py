"""Make the sender of a strategy."""

from __future__ import annotations

import torch

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.broadcast import BroadcastSender
from drivetrain_weight_sync.transports.cuda_ipc import CudaIpcSender
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.process_groups import GroupBackend
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender


def sender_from_memory(
    strategy: Strategy, gpu: torch.device | None, group_backend: GroupBackend, master_address: str
) -> Sender:
    """Return the sender of a strategy that brings tensors from memory.

    Args:
        strategy: ``IN_PROCESS``, ``SHARED_MEMORY``, ``CUDA_IPC`` or ``BROADCAST``.
        gpu: GPU that holds the tensors; None: the current one is used where one is needed.
        group_backend: The library that broadcasts.
        master_address: Address at which the engine's ranks reach this host, for ``BROADCAST``.

    Raises:
        InvalidRequest: the strategy needs a GPU, and this process has none.
    """
    device = torch.device("cpu")
    if (group_backend == "nccl" or strategy is Strategy.CUDA_IPC) and torch.cuda.is_available():
        device = gpu or torch.device("cuda", torch.cuda.current_device())
    match strategy:
        case Strategy.BROADCAST:
            return BroadcastSender(device, group_backend, master_address)
        case Strategy.CUDA_IPC:
            if not torch.cuda.is_available():
                raise InvalidRequest("strategy 'cuda_ipc' needs a GPU in the trainer's process", field="strategy")
            return CudaIpcSender(device)
        case Strategy.SHARED_MEMORY:
            return SharedMemorySender()
        case _:
            return InProcessSender()
