"""Runs weight updates: checks and prepares them, deals with requests in flight, commits or leaves the engine dirty."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.controller import Controller
from drivetrain.engine.pause_and_sleep import PAUSE_CAPABILITY, PauseAndSleep
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.weight_transaction import (
    SENT_MEANWHILE,
    SOURCE_CAPABILITY,
    KeptPlan,
    WeightTransaction,
    as_transfer_error,
    failure_reason,
)
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import AbortUpdate, ReleaseSources, WeightUpdateRequest, transport_of

logger = logging.getLogger("drivetrain.engine")

FROZEN_CAPABILITY = {
    PauseMode.IN_PLACE: Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE,
    PauseMode.RETRACT: Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
}
"""Capabilities of the modes that leave requests in flight while weights change."""


class WeightUpdates:
    """Runs one weight update at a time, and keeps the one that was prepared ahead."""

    def __init__(
        self,
        controller: Controller,
        backend: Backend,
        in_flight: RequestsInFlight,
        pauses: PauseAndSleep,
        weights: ServedWeights,
    ) -> None:
        self.controller = controller
        self.backend = backend
        self.in_flight = in_flight
        self.pauses = pauses
        self.weights = weights
        self._prepared: WeightTransaction | None = None
        self._plans = KeptPlan()

    # Before an update --------------------------------------------------------------------------------------------

    def require_update_from(self, kind: str) -> None:
        """Raise unless an update from a source of this kind is claimed and may begin now."""
        what = f"a weight update from {kind}"
        self.controller.require(what, SOURCE_CAPABILITY[kind])
        self.controller.status.require_updatable()

    def require_update_of_adapter(self, request: WeightUpdateRequest) -> None:
        """Raise unless an adapter can be updated from the request's source, now."""
        if request.lora is not None:
            self.controller.require("an adapter's update from tensors", Capability.WEIGHTS_LORA_TENSORS)
        self.require_update_from(request.source.kind)

    def require_update_of_all(self, request: WeightUpdateRequest) -> None:
        """Raise unless the request's source can bring all weights, now."""
        if request.lora_name is not None:
            raise InvalidRequest(
                "an adapter is updated as a whole; use update_named_weights()",
                field="source.kind" if request.lora is None else "lora",
            )
        self.require_update_from(transport_of(request.source))

    async def prepare(self, request: WeightUpdateRequest) -> None:
        """Check an update ahead of time; see ``InferenceEngine.prepare_weight_update``."""
        self.require_update_of_all(request)
        async with self.controller.owning_weights("a weight update"):
            self.controller.status.require_updatable()
            self._prepared = None
            self._prepared = await self._prepare(request)

    async def _prepare(self, request: WeightUpdateRequest) -> WeightTransaction:
        keep = request.keep_prefix_cache or Capability.PREFIX_CACHE not in self.controller.capabilities
        seconds = self.controller.config.timeouts.weight_update
        transaction = WeightTransaction(self.backend, request, seconds, keep, self._plans)
        try:
            await transaction.prepare()
        except BaseException:
            await self._withdraw()  # the receiver may still be preparing it
            raise
        return transaction

    async def forget(self, request: WeightUpdateRequest) -> None:
        """Drop this request if it is the prepared one; the receiver frees its staged tensors."""
        if self._prepared is not None and self._prepared.request is request:
            self._prepared = None
            await self._withdraw()

    async def release_sources(self) -> None:
        """Let go of shared memory; see ``InferenceEngine.release_weight_sources``."""
        action = "release_weight_sources()"
        self.controller.status.require_open(action)
        async with self.controller.owning_weights(action), self.controller.controlling(action):
            self._prepared = None
            async with self.controller.bounded("the receiver to let go of shared memory"):
                await self.backend.receive_weights(ReleaseSources())

    # The update --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[WeightTransaction, None]:
        """Run one update; see ``InferenceEngine.weight_update``."""
        controller = self.controller
        self.require_update_of_all(request)
        async with controller.owning_weights("a weight update"), controller.controlling("a weight update"):
            controller.status.require_updatable()
            self._check_in_flight(request.mode)
            prepared, self._prepared = self._prepared, None
            transaction = prepared if prepared and prepared.request is request else await self._prepare(request)
            before = controller.status
            controller.move_to(before.begin_update())
            try:
                freeze = await self.quiesce(request.mode, later=at_once and not before.holds_requests)
            except BaseException:
                await self._withdraw()
                controller.move_to(before)
                await self.pauses.unfreeze_if_free(before)
                raise
            try:
                if not at_once:
                    await transaction.begin()
                yield transaction
                with self.weights.to_come(request.version):
                    await (transaction.apply(freeze) if at_once else transaction.finish())
                    self.weights.publish(request.version, request.update_id)
            except BaseException as error:
                controller.move_to(controller.status.dirty(failure_reason(request.version, error)))
                await self._withdraw(freeze)
                if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
                    raise as_transfer_error(request.version, error) from error
                raise
            after = controller.status.commit_update()
            if freeze is not None:
                self.pauses.were_unfrozen()
            try:
                await self.pauses.unfreeze_if_free(after)
            except BaseException:  # committed, but requests are still frozen: continue_generation() tries again
                frozen = request.mode if request.mode in FROZEN_CAPABILITY else PauseMode.RETRACT
                controller.move_to(after.pause(frozen))
                raise
            controller.move_to(after)

    async def update_at_once(self, request: WeightUpdateRequest) -> None:
        """Run a whole update whose tensors lie ready."""
        at_once = request.source.kind not in SENT_MEANWHILE
        async with self.update(request, at_once=at_once) as transaction:
            for index in range(0 if at_once else transaction.buckets):
                await transaction.load([index])

    async def quiesce(self, mode: PauseMode, *, later: bool = False) -> PauseMode | None:
        """Abort, await or freeze the requests in flight before an update.

        With ``later`` the backend freezes them as part of the update's one call; return how, else None.
        """
        if not self.in_flight.running:
            return None
        self._require_in_flight(mode)  # requests may have arrived while the update was prepared
        if later and mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            self.pauses.will_be_frozen()
            return mode
        seconds = self.controller.config.timeouts.weight_update
        async with deadline(seconds, f"requests in flight to be dealt with ({mode.value})"):
            await self.pauses.quiesce(mode, seconds)
        return None

    def _check_in_flight(self, mode: PauseMode) -> None:
        if self.in_flight.running:
            self._require_in_flight(mode)
            self.pauses.refuse_waiting_for_frozen(mode)

    def _require_in_flight(self, mode: PauseMode) -> None:
        if mode in FROZEN_CAPABILITY:
            self.controller.require_claimed("a weight update in flight", FROZEN_CAPABILITY[mode])
        self.controller.require_claimed(f"mode={mode.value!r}", PAUSE_CAPABILITY[mode])

    async def _withdraw(self, freeze: PauseMode | None = None) -> None:
        """Let the receiver forget a failed update. If the update was to freeze requests, freeze them now."""
        try:
            async with self.controller.bounded("the receiver to forget the update"):
                if freeze is not None:
                    await self.backend.freeze(freeze)
                await self.backend.receive_weights(AbortUpdate())
        except Exception as error:  # the caller is told the error that made the update fail
            logger.warning("the failed update could not be withdrawn from the engine: %s", error)

    # In the background -------------------------------------------------------------------------------------------

    def start_transfer(self, request: WeightUpdateRequest) -> WeightTransferHandle[None]:
        """Begin to stage an update; see ``InferenceEngine.start_weight_transfer``."""
        self.controller.require("start_weight_transfer()", Capability.WEIGHT_STAGING)
        self.require_update_of_all(request)

        return WeightTransferHandle(
            request.version,
            self.prepare(request),
            lambda _: self.update_at_once(request),
            lambda: self.forget(request),
        )
