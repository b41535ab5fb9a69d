"""A weight update as a transaction: prepare → quiesce → begin → buckets → verify → commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from drivetrain.backend import Backend
from drivetrain.capability import Capability
from drivetrain.deadlines import deadline
from drivetrain.errors import WeightTransferFailed
from drivetrain.weights import (
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PrepareUpdate,
    VerifyUpdate,
    WeightMessage,
    WeightReply,
    WeightUpdateRequest,
)

SOURCE_CAPABILITY = {
    "in_process": Capability.WEIGHTS_IN_PROCESS,
    "shared_memory": Capability.WEIGHTS_SHARED_MEMORY,
    "disk": Capability.WEIGHTS_DISK,
    "cuda_ipc": Capability.WEIGHTS_CUDA_IPC,
    "broadcast": Capability.WEIGHTS_BROADCAST,
    "lora": Capability.WEIGHTS_LORA,
}


class WeightTransaction:
    """An update under way, between begin and commit. Made by ``InferenceEngine.weight_update``."""

    def __init__(self, backend: Backend, request: WeightUpdateRequest, timeout: float) -> None:
        self._backend = backend
        self._timeout = timeout
        self.request = request
        self.buckets = 0
        """How many buckets there are to load."""
        self.nbytes = 0
        """Bytes loaded so far."""

    async def load(self, indices: Sequence[int]) -> None:
        """Copy these buckets of the plan into the model.

        Raises:
            WeightTransferFailed: the copy failed; leave the transaction, the engine becomes dirty.
        """
        reply = await self._send(LoadBuckets(tuple(indices)), f"buckets {list(indices)} to be loaded")
        self.nbytes += reply.nbytes

    async def prepare(self) -> None:
        """Let the receiver open the source and check every tensor; changes nothing."""
        reply = await self._send(PrepareUpdate(self.request), "the receiver to check the update")
        self.buckets = reply.buckets

    async def begin(self) -> None:
        """From here on the weights are neither the old nor the new ones."""
        await self._send(BeginUpdate(), "the receiver to begin the update")

    async def finish(self, before_commit: Callable[[], Awaitable[None]]) -> None:
        """Verify every tensor, run ``before_commit``, and publish the version."""
        await self._send(VerifyUpdate(), "the receiver to verify the update")
        await before_commit()
        await self._send(CommitUpdate(self.request.version), "the receiver to commit the update")

    async def _send(self, message: WeightMessage, waited_for: str) -> WeightReply:
        async with deadline(self._timeout, waited_for):
            return await self._backend.receive_weights(message)


def failure_reason(version: str, error: BaseException) -> str:
    """Say in few words why an update left the engine dirty."""
    return f"the update to {version!r} failed: {type(error).__name__}: {error}"


def as_transfer_error(version: str, error: Exception) -> WeightTransferFailed:
    """Wrap what is not of drivetrain's own error tree."""
    return WeightTransferFailed(failure_reason(version, error))
