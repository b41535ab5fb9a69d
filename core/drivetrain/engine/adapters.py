"""Loading, updating and unloading LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.uninterrupted import to_its_end
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.controller import Controller
from drivetrain.engine.loaded_adapters import LoadedAdapters, LoadedLora
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.weight_updates import WeightUpdates
from drivetrain.errors import DrivetrainError, EngineBusy, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import LoraSource, WeightUpdateRequest


class Adapters:
    """Loads, updates and unloads adapters, minding the requests that use them. It keeps no state."""

    def __init__(
        self,
        controller: Controller,
        backend: Backend,
        loaded: LoadedAdapters,
        in_flight: RequestsInFlight,
        pauses: PauseAndSleep,
        weights: ServedWeights,
        updates: WeightUpdates,
    ) -> None:
        self.controller = controller
        self.backend = backend
        self.loaded = loaded
        self.in_flight = in_flight
        self.pauses = pauses
        self.weights = weights
        self.updates = updates

    async def load(self, name: str, path: str, pinned: bool) -> None:
        """Load an adapter; see ``InferenceEngine.load_lora_adapter``."""
        action = "load_lora_adapter()"
        self.controller.require(action, Capability.LORA)
        async with (
            self.controller.controlling(action),
            self.controller.bounded(f"the LoRA adapter {name!r} to load"),
        ):
            if self.loaded.find(name) is not None:
                raise InvalidRequest(f"lora_name={shown(name)} is loaded already; unload it first", field="lora_name")
            self.loaded.require_room()
            self.loaded.put(name, await self._load(name, path, pinned))

    async def unload(self, name: str) -> None:
        """Unload an adapter; see ``InferenceEngine.unload_lora_adapter``."""
        action = "unload_lora_adapter()"
        self.controller.require(action, Capability.LORA)
        self.loaded.require(name, "lora_name")
        async with self.controller.controlling(action), self.controller.bounded(f"the adapter {name!r} to unload"):
            self.loaded.require(name, "lora_name")  # another call may have unloaded it meanwhile
            users = self.in_flight.using_lora(name)
            if users:
                raise EngineBusy(
                    f"LoRA adapter {name!r} is used by {users} requests under way; let them end or abort them"
                )
            adapter = self.loaded.pop(name)  # no request may take it from here on
            try:
                await self.backend.unload_lora_adapter(adapter.backend_name)
            except asyncio.CancelledError:
                self.loaded.add_stray(adapter.backend_name)  # it may be unloaded all the same, and cannot be served
                raise
            except BaseException:
                self.loaded.put(name, adapter)
                raise

    async def update(self, request: WeightUpdateRequest, name: str) -> None:
        """Load the new adapter beside the old one, let it take the name, and unload the old one.

        If loading fails, the old adapter keeps serving.
        """
        source = request.source
        async with self._replacing(request, name) as old:
            async with self.controller.bounded(f"the LoRA adapter {name!r} to load"):
                given = source.path if isinstance(source, LoraSource) else request
                new = await self._load(name, given, old is not None and old.pinned)
            try:
                async with self._without_users(request, name):
                    await to_its_end(self._label_and_serve(request.version, name, new))
            finally:
                surplus = old if self.loaded.find(name) is new else new
                if surplus is not None:
                    await self._unload_surplus(name, surplus.backend_name)

    async def _unload_surplus(self, name: str, backend_name: str) -> None:
        try:
            async with self.controller.bounded(f"the surplus adapter of the update of {name!r} to unload"):
                await self.backend.unload_lora_adapter(backend_name)
        except BaseException:
            self.loaded.add_stray(backend_name)
            raise

    @asynccontextmanager
    async def _replacing(self, request: WeightUpdateRequest, name: str) -> AsyncGenerator[LoadedLora | None, None]:
        """Check that the update is admissible, keep other changes out, and yield the adapter that it replaces."""
        what = f"an update of the adapter {name!r}"
        controller = self.controller
        self.updates.require_update_of_adapter(request)
        async with controller.owning_weights(what), controller.controlling(what):
            controller.status.require_weights(what)
            old = self.loaded.find(name)
            if old is None:
                self.loaded.require_room()
            self._refuse_users(name, request.mode)
            self.pauses.refuse_waiting_for_frozen(request.mode)
            yield old

    @asynccontextmanager
    async def _without_users(self, request: WeightUpdateRequest, name: str) -> AsyncGenerator[None, None]:
        """Hold new requests, and abort or await the adapter's requests in flight, as the update's mode says."""
        before = self.controller.status
        with self.in_flight.weights_are_kept():
            self.controller.move_to(before.begin_update())
            try:
                self._refuse_users(name, request.mode)  # requests may have arrived meanwhile
                if self.in_flight.running_with_lora(name):
                    await self.updates.quiesce(request.mode)
                yield
            finally:
                self.controller.move_to(before)

    async def _label_and_serve(self, version: str, name: str, adapter: LoadedLora) -> None:
        with self.weights.to_come(version):
            await self.weights.label(version)
            self._serve(version, name, adapter)

    def _serve(self, version: str, name: str, adapter: LoadedLora) -> None:
        self.loaded.put(name, adapter)
        self.weights.publish(version)

    async def _load(self, name: str, given: str | WeightUpdateRequest, pinned: bool) -> LoadedLora:
        """Load an adapter from a folder, or from the tensors of an update."""
        for stray in self.loaded.strays:
            with suppress(DrivetrainError):  # the backend does not have it after all
                await self.backend.unload_lora_adapter(stray)
            self.loaded.discard_stray(stray)
        backend_name = self.loaded.unused_backend_name(name)
        try:
            if isinstance(given, str):
                await self.backend.load_lora_adapter(backend_name, given, pinned)
            else:
                await self.backend.load_lora_tensors(backend_name, given, pinned)
        except InvalidRequest:
            raise
        except BaseException:
            self.loaded.add_stray(backend_name)
            raise
        return LoadedLora(backend_name, pinned)

    def _refuse_users(self, name: str, mode: PauseMode) -> None:
        """Raise if requests in flight use the adapter and ``mode`` would let them continue with another one."""
        users = self.in_flight.running_with_lora(name)
        if users and mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            raise EngineBusy(
                f"LoRA adapter {name!r} is used by {users} requests in flight, which cannot go on with another one "
                f"(mode={mode.value!r}); let them end first, or say mode='wait' or mode='abort'"
            )
