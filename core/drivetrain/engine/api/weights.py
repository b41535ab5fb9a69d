"""Weights: updates, versions, reading, saving."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from drivetrain.engine.api.page import Page
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.types.arguments import checked
from drivetrain.types.weights import (
    CommunicatorSpec,
    TensorData,
    WeightManifest,
    WeightReport,
    WeightUpdateRequest,
)


class WeightCalls(Page):
    """Update, name, read and save the weights."""

    async def weight_manifest(self) -> WeightManifest:
        """Return every tensor that a complete update must bring."""
        return await self.parts.weights.manifest()

    # Updates -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @checked
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[WeightTransaction, None]:
        """Run one weight update; ``load`` every bucket within.

        Entering checks the request against the model (a refusal changes nothing), treats requests in flight
        as ``request.mode`` says, and begins. Leaving verifies every tensor, resets the prefix cache, publishes the
        version, and lets requests go on unless the engine was paused before. Leaving by an exception, or failing to
        verify, leaves the engine dirty: it serves nothing until a complete update is committed.

        Args:
            request: The source of the tensors, the plan, the version, and the mode.
            at_once: If true, don't call ``load()``: the update is applied in one engine call on exit, and requests
                are frozen only for that call. Every bucket must be ready.

        Raises:
            WeightPlanMismatch: tensors are missing, extra or of another shape or dtype; nothing changed.
            WeightTransferFailed: the transfer broke; the engine is dirty.
            WeightVerifyFailed: the tensors that arrived differ from those that were sent; the engine is dirty.
        """
        async with self.parts.updates.update(request, at_once=at_once) as transaction:
            yield transaction

    @checked
    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        """Open the source of an update and check it against the model, while the engine serves on.

        Optional: :meth:`weight_update` prepares the request itself unless this was called with the same object just
        before. Changes nothing.

        Raises:
            WeightPlanMismatch: tensors are missing, extra or of another shape or dtype.
        """
        await self.parts.updates.prepare(request)

    async def release_weight_sources(self) -> None:
        """Unmap the memory that trainers share with the engine, which otherwise stays mapped between updates."""
        await self.parts.updates.release_sources()

    @checked
    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Run a whole weight update whose tensors are ready: every bucket, verified and committed.

        A source of kind ``lora``, or tensors of ``request.lora``, update one adapter, or load it if no adapter has its
        name. The other weights stay. If loading fails, the old adapter keeps serving.

        Raises:
            DrivetrainError: as :meth:`weight_update` does.
            EngineBusy: requests in flight use the adapter, and ``request.mode`` would have them go on.
        """
        if request.lora_name is not None:
            await self.parts.adapters.update(request, request.lora_name)
        else:
            await self.parts.updates.update_at_once(request)

    @checked
    async def start_weight_transfer(self, request: WeightUpdateRequest) -> WeightTransferHandle[None]:
        """Begin to stage an update in the background, while generation goes on; only its ``finish`` pauses.

        A checkpoint's files are read and checked meanwhile, and may be removed once it is staged. Tensors that a
        plugin's transport brings, and tensors in memory that is shared with a trainer, must not change until the
        transfer is finished; the ``start_weight_transfer`` of a ``WeightSync`` copies tensors first.

        Raises:
            WeightPlanMismatch, InvalidRequest: by the handle, as :meth:`prepare_weight_update` does.
        """
        return self.parts.updates.start_transfer(request)

    @checked
    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a torch.distributed group in which the trainer will broadcast weights.

        Raises:
            InvalidRequest: the engine is in a group of that name, or is joining one.
            DeadlineExceeded: the group did not form within ``timeouts.weight_update``.
        """
        await self.parts.communicators.join(spec)

    @checked
    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        """Leave that group.

        Raises:
            InvalidRequest: the engine is in no group of that name.
        """
        await self.parts.communicators.leave(group_name)

    # Version -----------------------------------------------------------------------------------------------------

    def get_weight_version(self) -> str:
        """Return the version of the weights that are served, as last committed."""
        return self.parts.weights.version

    @checked
    async def update_weight_version(self, version: str) -> None:
        """Give the weights another version without changing them."""
        await self.parts.weights.relabel(version)

    # Reading and saving ------------------------------------------------------------------------------------------

    @checked
    async def get_weights_by_name(self, name: str) -> TensorData:
        """Return one tensor by its checkpoint name."""
        return await self.parts.weights.read(name)

    async def validate_weights(self) -> WeightReport:
        """Check every tensor for NaN, infinity and zeros only."""
        return await self.parts.weights.validate()

    @checked
    async def save_sharded_model(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> None:
        """Save the model with its current weights to a folder that any engine can load; requests run on meanwhile.

        The folder appears when it is complete. A weight update, or sleep of the weights, waits until then.

        Args:
            path: A folder on the engine's machine that does not exist yet or is empty; relative to this process's
                working directory.
            timeout: Seconds until DeadlineExceeded, which leaves nothing; ``timeouts.weight_update`` if not given.

        Raises:
            InvalidRequest: the folder cannot be created; nothing was written.
            EngineStateError: the weights are asleep, dirty or being updated.
        """
        await self.parts.weights.save_sharded(path, timeout)

    @checked
    async def save_remote_model(self, url: str, *, timeout: float | None = None) -> None:
        """Save the model as :meth:`save_sharded_model` does to an fsspec URL under which nothing exists yet.

        Raises:
            InvalidRequest: the protocol is unknown, or the URL is not writable; nothing was written.
            EngineStateError: the weights are asleep, dirty or being updated.
        """
        await self.parts.weights.save_remote(url, timeout)
