"""A weight update as a transaction: prepare → quiesce → begin → buckets → verify → commit."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.backend import Backend
from drivetrain.capability import Capability
from drivetrain.deadlines import deadline
from drivetrain.errors import DrivetrainError, EngineStateError, WeightSyncError, WeightTransferFailed
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
    "plugin": Capability.WEIGHTS_PLUGIN,
}


_AT_ONCE = frozenset({"cuda_ipc"})
"""Sources of which a bucket takes less time than a call."""


def loaded_together(kind: str, buckets: int) -> list[list[int]]:
    """Which buckets of a source to load in one call: all, where they take less time than a call; else one by one."""
    if kind in _AT_ONCE:
        return [list(range(buckets))]
    return [[index] for index in range(buckets)]


class WeightTransaction:
    """An update under way, between begin and commit. Made by ``InferenceEngine.weight_update``."""

    def __init__(self, backend: Backend, request: WeightUpdateRequest, timeout: float, keep_prefix_cache: bool) -> None:
        self._backend = backend
        self._timeout = timeout
        self._keep_prefix_cache = keep_prefix_cache
        self._begun = False
        self._deferred: tuple[int, ...] = ()
        """Every bucket, asked for in one call: that, and what is before and after it, is done on leaving."""
        self._ended = False
        self.request = request
        self.buckets = 0
        """How many buckets there are to load."""
        self.nbytes = 0
        """Bytes loaded so far."""

    async def prepare(self) -> None:
        """Let the receiver open the source and check every tensor; changes nothing."""
        try:
            reply = await self._send(PrepareUpdate(self.request), "the receiver to check the update")
        except DrivetrainError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"the update to {self.request.version!r} could not be prepared: {type(error).__name__}: {error}; "
                "nothing was changed"
            ) from error
        self.buckets = reply.buckets

    async def enter(self) -> None:
        """Begin, unless every step may be taken in one call."""
        if self.request.source.kind not in _AT_ONCE:
            await self._begin()

    async def load(self, indices: Sequence[int]) -> None:
        """Copy these buckets of the plan into the model.

        All those of a source on the engine's GPU, asked for in one call, are copied on leaving the update.

        Raises:
            WeightTransferFailed: the copy failed; leave the transaction, the engine becomes dirty.
            EngineStateError: the update has ended.
        """
        if self._ended:
            raise EngineStateError("a bucket came after the end of its update; begin another update", state="idle")
        wanted = tuple(indices)
        if not self._begun and not self._deferred and wanted == tuple(range(self.buckets)):
            self._deferred = wanted
            return
        await self._begin()
        await self._load(wanted)

    async def finish(self) -> None:
        """Load what is left to load, verify every tensor, forget what older weights cached, publish the version."""
        self._ended = True
        if self._deferred and not self._begun:
            async with deadline(self._timeout, "the receiver to apply the update"):
                reply = await self._backend.apply_weights(self.request.version, self.buckets, self._keep_prefix_cache)
            self.nbytes = reply.nbytes
            return
        await self._begin()
        await self._send(VerifyUpdate(), "the receiver to verify the update")
        if not self._keep_prefix_cache:
            async with deadline(self._timeout, "the prefix cache to be reset"):
                await self._backend.reset_prefix_cache()
        await self._send(CommitUpdate(self.request.version), "the receiver to commit the update")

    async def _begin(self) -> None:
        """From here on the weights are neither the old nor the new ones."""
        if not self._begun:
            self._begun = True
            await self._send(BeginUpdate(), "the receiver to begin the update")
            if self._deferred:
                await self._load(self._deferred)

    async def _load(self, indices: tuple[int, ...]) -> None:
        reply = await self._send(LoadBuckets(indices), f"buckets {list(indices)} to be loaded")
        self.nbytes += reply.nbytes

    async def _send(self, message: WeightMessage, waited_for: str) -> WeightReply:
        async with deadline(self._timeout, waited_for):
            return await self._backend.receive_weights(message)


def failure_reason(version: str, error: BaseException) -> str:
    """Say in few words why an update left the engine dirty."""
    return f"the update to {version!r} failed: {type(error).__name__}: {error}"


def as_transfer_error(version: str, error: Exception) -> WeightTransferFailed:
    """Wrap what is not of drivetrain's own error tree."""
    return WeightTransferFailed(failure_reason(version, error))
