"""The parts of an attached engine: those that change the engine ask its owner, and the state is the owner's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from drivetrain.attached.backend import AttachedBackend
from drivetrain.backend.base import GenerateRequest
from drivetrain.backend.toolkit.daemon_thread import in_daemon_thread
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.adapters import Adapters
from drivetrain.engine.communicators import Communicators
from drivetrain.engine.controller import Controller
from drivetrain.engine.generation import Generation
from drivetrain.engine.loaded_adapters import LoadedAdapters, LoadedLora
from drivetrain.engine.model import StartedModel
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.pooling import Pooling
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.states import EngineState, EngineStatus
from drivetrain.engine.validation import absolute_path, check_seconds
from drivetrain.engine.weight_transaction import SOURCE_CAPABILITY, WeightTransaction, as_transfer_error
from drivetrain.engine.weight_updates import WeightUpdates
from drivetrain.errors import DrivetrainError
from drivetrain.process.shared_engine import AppliedUpdate
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.text.tokenizer_files import is_here, load_tokenizer
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import (
    CommunicatorSpec,
    DiskSource,
    LoraSource,
    TensorData,
    WeightManifest,
    WeightReport,
    WeightUpdateRequest,
)


async def ask(part: Controller, backend: object, seconds: float | None, name: str, *arguments: object) -> object:
    """Call the owner, which keeps the deadline itself and knows more to say; this one is a little later.

    Raises:
        EngineDied: The engine died.
        EngineStateError: The engine is not started, or closed.
    """
    assert isinstance(backend, AttachedBackend)
    part.status.require_open(f"{name}()")
    timeouts = part.config.timeouts
    async with deadline((seconds or timeouts.control) + timeouts.close, f"the engine's owner to answer {name}"):
        return await backend.call(name, *arguments)


def _from_here(request: WeightUpdateRequest) -> WeightUpdateRequest:
    """Make the source's path absolute: the owner's working directory may be another."""
    source = request.source
    if not isinstance(source, DiskSource | LoraSource) or os.path.isabs(source.path):
        return request
    return request.model_copy(update={"source": source.model_copy(update={"path": _absolute(source.path)})})


def _absolute(path: str) -> str:
    return os.path.abspath(path)


class AttachedController(Controller):
    """Mirrors the owner's status, which may be late: the owner's gate holds and refuses requests, not this one."""

    def adopt(self, status: EngineStatus) -> None:
        """Take the owner's status."""
        if self.status.state not in (EngineState.FAILED, EngineState.CLOSED):
            self._status = status
            self.notify()

    def holds_requests(self) -> bool:
        self.status.require_open("a waiting request")
        return False

    def require_admission(self, action: str) -> None:
        """Let the request pass unless the engine has ended; the owner refuses it where its state does not allow it."""
        self.status.require_open(action)
        self.require_own_loop(action)


class AttachedModel(StartedModel):
    """Takes the tokenizer's files from the owner where this process does not have them."""

    async def start(self, report: Callable[[str], None]) -> None:
        assert isinstance(self.backend, AttachedBackend)
        info = await self.backend.start(report)
        report("loading the tokenizer")
        config = self.controller.config
        if is_here(config):
            tokenizer = await in_daemon_thread(partial(Tokenizer.load, config), "drivetrain-tokenizer")
        else:
            async with deadline(config.timeouts.control, "the engine's owner to send the tokenizer"):
                files = cast("dict[str, bytes]", await self.backend.call("tokenizer_files"))
            tokenizer = await asyncio.to_thread(load_tokenizer, config, files)
        self.take(tokenizer, info)

    @property
    def holder(self) -> int:
        assert isinstance(self.backend, AttachedBackend)
        return self.backend.facts.holder


class AttachedLoadedAdapters(LoadedAdapters):
    """Mirrors the names of the owner's adapters, which may be late: only the owner refuses a name."""

    def adopt(self, names: Iterable[str]) -> None:
        """Replace the names by the names of the owner's adapters."""
        self._by_name = {name: LoadedLora(name, pinned=False) for name in names}

    def require(self, name: str, field: str) -> None:
        """Let the name pass; the owner raises :class:`InvalidRequest` if no adapter has it."""

    def backend_name(self, name: str) -> str:
        """Return the name itself, which the owner translates."""
        return name


class AttachedRequests(RequestsInFlight):
    """Leaves pinned requests to the owner's gate.

    Only the owner knows the versions that are served now: a fleet serves several, and the mirrored version is late.
    """

    def require_version(self, request: GenerateRequest) -> None:
        """Let the request pass; the owner raises :class:`WeightVersionGone`."""


class AttachedGeneration(Generation):
    """Aborts requests of any holder, not only this one's."""

    async def _abort(self, action: str, request_id: str | None) -> None:
        await super()._abort(action, request_id)
        if request_id is None:
            await ask(self.controller, self.backend, None, "abort_generation")
        else:
            await ask(self.controller, self.backend, None, "abort", request_id)


class AttachedPooling(Pooling):
    """Leaves it to the owner to compute all numbers of a call with one version of the weights."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return await self.backend.embed(prompts, dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return await self.backend.reward_score(sequences)


class AttachedPauses(PauseAndSleep):
    """Asks the owner to pause, resume, sleep and wake up."""

    async def pause(self, mode: PauseMode, timeout: float | None, *, by: object = None) -> None:
        seconds = check_seconds(timeout, self.controller.config.timeouts.control)
        await ask(self.controller, self.backend, seconds, "pause_generation", mode, timeout)

    async def resume(self) -> None:
        await ask(self.controller, self.backend, None, "continue_generation")

    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None,
        timeout: float | None,
        abort_first: bool,
        drain_timeout: float,
        *,
        by: object = None,
    ) -> None:
        chosen = None if tags is None else self._chosen(tags, "sleep()")
        seconds = check_seconds(timeout, self.controller.config.timeouts.control) + drain_timeout
        await ask(self.controller, self.backend, seconds, "sleep", chosen, timeout, abort_first, drain_timeout)

    async def wake_up(self, tags: Iterable[MemoryTag | str] | None, timeout: float | None) -> None:
        chosen = None if tags is None else self._chosen(tags, "wake_up()")
        seconds = check_seconds(timeout, self.controller.config.timeouts.control)
        await ask(self.controller, self.backend, seconds, "wake_up", chosen, timeout)

    async def reset_prefix_cache(self) -> None:
        await ask(self.controller, self.backend, None, "reset_prefix_cache")

    async def clear_hicache_storage(self) -> None:
        await ask(self.controller, self.backend, None, "clear_hicache_storage")


class AttachedWeights(ServedWeights):
    """Asks the owner for weights; the version is mirrored."""

    async def relabel(self, version: str) -> None:
        await ask(self.controller, self.backend, None, "update_weight_version", version)

    async def manifest(self) -> WeightManifest:
        return cast(WeightManifest, await ask(self.controller, self.backend, None, "weight_manifest"))

    async def read(self, name: str) -> TensorData:
        return cast(TensorData, await ask(self.controller, self.backend, None, "get_weights_by_name", name))

    async def validate(self) -> WeightReport:
        seconds = self.controller.config.timeouts.weight_update
        return cast(WeightReport, await ask(self.controller, self.backend, seconds, "validate_weights"))

    async def save_sharded(self, path: object, timeout: float | None) -> None:
        self.controller.require("save_sharded_model()", Capability.SAVE_SHARDED)
        seconds = check_seconds(timeout, self.controller.config.timeouts.weight_update)
        await ask(self.controller, self.backend, seconds, "save_sharded_model", absolute_path(path), timeout)

    async def save_remote(self, url: object, timeout: float | None) -> None:
        seconds = check_seconds(timeout, self.controller.config.timeouts.weight_update)
        await ask(self.controller, self.backend, seconds, "save_remote_model", url, timeout)


class AttachedTransaction(WeightTransaction):
    """An update that the owner runs."""

    def __init__(self, controller: Controller, backend: object, request: WeightUpdateRequest) -> None:
        self._controller = controller
        self._owner = backend
        self.request = request
        self.buckets = 0
        self.nbytes = 0
        self.paused_seconds = 0.0

    async def load(self, indices: Sequence[int]) -> None:
        seconds = self._controller.config.timeouts.weight_update
        self.nbytes = cast(int, await ask(self._controller, self._owner, seconds, "load_buckets", list(indices)))

    def committed(self, applied: AppliedUpdate) -> None:
        """Record how many bytes the update brought and how long generation was paused."""
        self.nbytes, self.paused_seconds = applied.nbytes, applied.paused_seconds


class AttachedUpdates(WeightUpdates):
    """Asks the owner to prepare and run updates."""

    _at_owner: tuple[WeightUpdateRequest, int] | None = None
    """The request that the owner has prepared, and the number of the connection that it was prepared over."""

    def require_update_from(self, kind: str) -> None:
        """Raise unless an update from a source of this kind is claimed; the owner raises if none may begin now."""
        self.controller.require(f"a weight update from {kind}", SOURCE_CAPABILITY[kind])

    def _has_prepared(self, request: WeightUpdateRequest) -> bool:
        return self._at_owner is not None and self._at_owner[0] is request and self._at_owner[1] == self._connections()

    def _connections(self) -> int:
        assert isinstance(self.backend, AttachedBackend)
        return self.backend.owner.connections

    async def prepare(self, request: WeightUpdateRequest) -> None:
        self.require_update_of_all(request)
        self._at_owner = None
        await self._ask("prepare_weight_update", _from_here(request))
        self._at_owner = request, self._connections()

    async def forget(self, request: WeightUpdateRequest) -> None:
        if self._has_prepared(request):
            self._at_owner = None
            await self._ask("forget_weight_update")

    async def release_sources(self) -> None:
        self._at_owner = None
        await self._ask("release_weight_sources")

    @asynccontextmanager
    async def update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[WeightTransaction, None]:
        self.require_update_of_all(request)
        given = None if self._has_prepared(request) else _from_here(request)
        self._at_owner = None
        transaction = AttachedTransaction(self.controller, self.backend, request)
        if at_once:
            yield transaction
            transaction.committed(cast(AppliedUpdate, await self._ask("apply_update", given)))
            return
        transaction.buckets = cast(int, await self._ask("begin_update", given))
        try:
            yield transaction
            transaction.committed(cast(AppliedUpdate, await self._ask("commit_update")))
        except BaseException as error:
            try:
                await self._ask("break_off_update", f"{type(error).__name__}: {error}")
            except DrivetrainError as lost:
                error.add_note(f"the update could not be broken off: {lost}")
            if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
                raise as_transfer_error(request.version, error) from error
            raise

    async def _ask(self, name: str, *arguments: object) -> object:
        seconds = self.controller.config.timeouts.weight_update
        return await ask(self.controller, self.backend, seconds, name, *arguments)


class AttachedCommunicators(Communicators):
    """Asks the owner to join and leave groups."""

    async def join(self, spec: CommunicatorSpec) -> None:
        seconds = self.controller.config.timeouts.weight_update
        await ask(self.controller, self.backend, seconds, "init_weight_update_communicator", spec)

    async def leave(self, group_name: str) -> None:
        await ask(self.controller, self.backend, None, "destroy_weight_update_communicator", group_name)


class AttachedAdapters(Adapters):
    """Asks the owner to load, update and unload adapters."""

    async def load(self, name: str, path: str, pinned: bool) -> None:
        await ask(self.controller, self.backend, None, "load_lora_adapter", name, _absolute(path), pinned)

    async def unload(self, name: str) -> None:
        await ask(self.controller, self.backend, None, "unload_lora_adapter", name)

    async def update(self, request: WeightUpdateRequest, name: str) -> None:
        seconds = self.controller.config.timeouts.weight_update
        await ask(self.controller, self.backend, seconds, "update_adapter", _from_here(request))
