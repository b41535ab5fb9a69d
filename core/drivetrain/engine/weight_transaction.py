"""A weight update as a transaction: prepare → quiesce → begin → buckets → verify → commit."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DrivetrainError, EngineStateError, WeightSyncError, WeightTransferFailed
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import (
    ApplyUpdate,
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PrepareUpdate,
    VerifyUpdate,
    WeightMessage,
    WeightPlan,
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


SENT_MEANWHILE = frozenset({"broadcast"})
"""Sources whose buckets arrive during the update; the buckets of all other sources are ready before it."""


class WeightTransaction:
    """An update under way, between begin and commit. Made by ``InferenceEngine.weight_update``."""

    def __init__(
        self,
        backend: Backend,
        request: WeightUpdateRequest,
        timeout: float,
        keep_prefix_cache: bool,
        plans: KeptPlan,
    ) -> None:
        self._backend = backend
        self._timeout = timeout
        self._keep_prefix_cache = keep_prefix_cache
        self._plans = plans
        self._ended = False
        self.request = request
        self.buckets = 0
        """Number of buckets to load."""
        self.nbytes = 0
        """Bytes loaded so far."""
        self.paused_seconds = 0.0
        """Seconds from begin to commit, measured in the engine; known after commit."""

    async def prepare(self) -> None:
        """Let the receiver open the source and check every tensor; changes nothing."""
        message = self._plans.left_out_of(self.request)
        try:
            reply = await self._send(message, "the receiver to check the update")
        except DrivetrainError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"the update to {self.request.version!r} could not be prepared: {type(error).__name__}: {error}; "
                "nothing was changed"
            ) from error
        self.buckets = reply.buckets
        if reply.keeps_plan:
            self._plans.keep(self.request.plan)

    async def begin(self) -> None:
        """Begin to overwrite the weights: until commit they are neither the old nor the new ones."""
        reply = await self._send(BeginUpdate(), "the receiver to begin the update")
        self.buckets = reply.buckets or self.buckets

    @checked
    async def load(self, indices: Sequence[int]) -> None:
        """Copy these buckets of the plan into the model.

        Raises:
            InvalidRequest: ``indices`` is no list of indices.
            WeightTransferFailed: the copy failed; leave the transaction, the engine becomes dirty.
            EngineStateError: the update has ended, or was opened with ``at_once``, which loads every bucket itself.
        """
        if self._ended:
            raise EngineStateError("a bucket came after the end of its update; begin another update", state="idle")
        reply = await self._send(LoadBuckets(tuple(indices)), f"buckets {list(indices)} to be loaded")
        self.nbytes += reply.nbytes

    async def apply(self, freeze: PauseMode | None) -> None:
        """Begin, load, verify and commit in one call; with ``freeze`` requests are frozen for that call."""
        self._ended = True
        update = ApplyUpdate(self.request.version, self.buckets, self._keep_prefix_cache, freeze)
        async with deadline(self._timeout, "the receiver to apply the update"):
            reply = await self._backend.apply_weights(update)
        self.nbytes, self.paused_seconds = reply.nbytes, reply.seconds

    async def finish(self) -> None:
        """Verify every tensor, reset the prefix cache, and commit the version in the engine."""
        self._ended = True
        await self._send(VerifyUpdate(), "the receiver to verify the update")
        if not self._keep_prefix_cache:
            async with deadline(self._timeout, "the prefix cache to be reset"):
                await self._backend.reset_prefix_cache()
        reply = await self._send(CommitUpdate(self.request.version), "the receiver to commit the update")
        self.paused_seconds = reply.seconds

    async def _send(self, message: WeightMessage, waited_for: str) -> WeightReply:
        async with deadline(self._timeout, waited_for):
            return await self._backend.receive_weights(message)


class KeptPlan:
    """Remembers which plan the backend keeps, so that the next update need not send it again."""

    def __init__(self) -> None:
        self._plan: WeightPlan | None = None
        self._hash = ""
        self._names: tuple[str, ...] = ()
        self._kept = False

    def left_out_of(self, request: WeightUpdateRequest) -> PrepareUpdate:
        """Return the message for ``request``, without the plan if the backend has it.

        Until :meth:`keep` is called again, the plan counts as lost.
        """
        kept, self._kept = self._kept, False
        digests = request.digests
        if not kept or request.plan is not self._plan or digests is None or len(digests) != len(self._names):
            return PrepareUpdate(request)
        try:
            packed = struct.pack(f"<{len(digests)}q", *map(digests.__getitem__, self._names))
        except (KeyError, struct.error):
            return PrepareUpdate(request)  # the receiver raises the error about the digests
        return PrepareUpdate(
            request.model_copy(update={"plan": WeightPlan(()), "digests": {}}), kept_plan=self._hash, digests=packed
        )

    def keep(self, plan: WeightPlan | None) -> None:
        """Record that the backend keeps this plan."""
        if plan is None:
            return
        if plan is not self._plan:
            self._plan, self._hash = plan, plan.hash
            self._names = tuple(spec.name for spec in plan.tensors)
        self._kept = True


def failure_reason(version: str, error: BaseException) -> str:
    """Describe why an update left the engine dirty."""
    return f"the update to {version!r} failed: {type(error).__name__}: {error}"


def as_transfer_error(version: str, error: Exception) -> WeightTransferFailed:
    """Wrap an error that is not a DrivetrainError."""
    return WeightTransferFailed(failure_reason(version, error))
