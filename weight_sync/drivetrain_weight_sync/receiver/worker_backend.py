"""A backend whose engine holds a worker of ours: much of what the page asks is a call to it, whatever the engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol, cast

from drivetrain.backend.base import Backend, EngineStats
from drivetrain.errors import EngineBusy
from drivetrain.process.busy_wait import busy_wait
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import (
    ApplyUpdate,
    CommitUpdate,
    CommunicatorSpec,
    PrepareUpdate,
    TensorData,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
)
from drivetrain_weight_sync.receiver.request_arrivals import request_id
from drivetrain_weight_sync.receiver.saving import ModelFiles, save_remote, save_sharded

_LAST_STEP_S: Final = 10.0
_OPENING_S: Final = (0.001, 0.02)
"""First and longest pause between two questions whether a source is open."""


def device_type_of(config: EngineConfig) -> str:
    """The kind of device: the configured one, or a GPU when there is one."""
    if config.device is not None:
        return config.device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class InFlight(Protocol):
    """What is known of a request in flight."""

    def replaced(self, version: str, tokens: float) -> None:
        """Note that weights were replaced at so many tokens; infinitely many if the sample was complete."""
        ...


class WorkerBackend(Backend):
    """Statistics, memory, the prefix cache and weights, by :meth:`ask`.

    The worker answers to the names of the ``Backend`` page and, as a ``PrepareUpdate`` may take long, to
    ``prepare_weights`` and ``prepared_weights``. For a release that labels no tokens it answers to ``tokens_so_far``,
    how many tokens each of some requests has that is not complete, and to ``apply_weights_counting``, which returns
    these as well.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.version = config.weight_version
        """Of the weights that are served."""
        self.in_flight: dict[str, InFlight] = {}
        """By the engine's id."""
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._admits = asyncio.Event()
        self._admits.set()
        self._cache_epoch = 0

    @abstractmethod
    async def ask(self, method: str, *arguments: object) -> object:
        """Call a method of the worker.

        Where an argument is an ``ApplyUpdate`` that names a freeze mode, the worker freezes requests before the call,
        and lets them go on after it unless it failed.
        """

    @abstractmethod
    def labels_tokens(self) -> bool:
        """Whether this release says which weights made which token."""

    @abstractmethod
    def served_dtype(self) -> str:
        """The dtype of the engine's weights, such as ``"bfloat16"``."""

    def new_id(self) -> str:
        """A request's name for the engine, which no other has."""
        return request_id(self._prefix, next(self._numbers))

    async def admit(self, name: str, request: InFlight) -> None:
        """Take a request to be in flight from here on, before anything of it goes to the engine.

        Where the engine labels no tokens it waits for weights that are being replaced: of a request that comes just
        then nobody could tell which made its tokens.
        """
        await self._admits.wait()
        self.in_flight[name] = request

    @property
    def cache_key(self) -> str:
        """What a request's cached prefixes are found by, beside their tokens."""
        return f"drivetrain-{self._cache_epoch}"

    async def ask_until_free(self, patience: float, method: str, *arguments: object) -> None:
        """Call the worker again and again while it is busy, for ``patience`` seconds."""
        ends = asyncio.get_running_loop().time() + patience
        while True:
            try:
                await self.ask(method, *arguments)
            except EngineBusy:
                if asyncio.get_running_loop().time() > ends:
                    raise
                await asyncio.sleep(0.01)
            else:
                return

    async def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that hold the weights, by rank."""
        return tuple(cast("list[str]", await self.ask("gpus")))

    async def stats(self) -> EngineStats:
        """Requests and memory, as the worker counts them."""
        return cast(EngineStats, await self.ask("stats"))

    # Memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give back memory."""
        if MemoryTag.KV_CACHE in tags:
            self._cache_epoch += 1
        # A request whose caller went away takes one step more, of which nobody outside the engine knows.
        await self.ask_until_free(_LAST_STEP_S, "sleep", tags)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take it again."""
        await self.ask("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        """Ask for no earlier prefix any more, and let go of those that no frozen request holds."""
        self._cache_epoch += 1
        await self.ask("reset_prefix_cache")

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Tensors by their checkpoint names."""
        return cast(WeightManifest, await self.ask("weight_manifest"))

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update, between two steps of the batch; a source is opened while they go on."""
        if isinstance(message, PrepareUpdate):
            return await self._prepare(message)
        if not isinstance(message, CommitUpdate):
            return cast(WeightReply, await self.ask("receive_weights", message))
        async with self._new_version(message.version):
            return cast(WeightReply, await self.ask("receive_weights", message))

    async def _prepare(self, message: PrepareUpdate) -> WeightReply:
        reply = await self.ask("prepare_weights", message)
        pause, longest = _OPENING_S
        while reply is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            reply = await self.ask("prepared_weights")
        return cast(WeightReply, reply)

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Take all steps of an update in one call, between two steps of the batch."""
        if not update.keep_prefix_cache:
            self._cache_epoch += 1
        async with busy_wait() if self._on_gpu else nullcontext():
            reply = await self._applied(update)
        self.version = update.version
        return reply

    async def _applied(self, update: ApplyUpdate) -> WeightReply:
        if self.labels_tokens():
            return cast(WeightReply, await self.ask("apply_weights", update))
        with self._nobody_admitted():
            counted = await self.ask("apply_weights_counting", update, list(self.in_flight))
            reply, tokens = cast("tuple[WeightReply, dict[str, int]]", counted)
            self._replaced(tokens)
        return reply

    @cached_property
    def _on_gpu(self) -> bool:
        return device_type_of(self.config) != "cpu"

    async def set_weight_version(self, version: str) -> None:
        """Label the weights."""
        async with self._new_version(version):
            await self.ask("set_weight_version", version)

    @asynccontextmanager
    async def _new_version(self, version: str) -> AsyncGenerator[None, None]:
        if self.labels_tokens():
            yield
        else:
            with self._nobody_admitted():
                tokens = cast("dict[str, int]", await self.ask("tokens_so_far", list(self.in_flight)))
                yield
                self._replaced(tokens)
        self.version = version

    @contextmanager
    def _nobody_admitted(self) -> Iterator[None]:
        self._admits.clear()
        try:
            yield
        finally:
            self._admits.set()

    def _replaced(self, tokens: Mapping[str, int]) -> None:
        for name, request in self.in_flight.items():
            # The engine knows no more of one that is complete, whose result is on its way here.
            request.replaced(self.version, tokens.get(name, math.inf))

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group while generation goes on."""
        await self.ask_until_free(2 * spec.timeout, "init_communicator", spec)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave it."""
        await self.ask("destroy_communicator", group_name)

    async def read_weight(self, name: str) -> TensorData:
        """Copy one tensor out."""
        return cast(TensorData, await self.ask("read_weight", name))

    async def validate_weights(self) -> WeightReport:
        """Look at every tensor where it lies."""
        return cast(WeightReport, await self.ask("validate_weights"))

    async def save_sharded(self, path: str) -> None:
        """Write a model folder, the weights in a thread beside the worker."""
        await save_sharded(path, self._files, self._write_weights)

    async def save_remote(self, url: str) -> None:
        """Write one, and copy it there from this process."""
        await save_remote(url, self._files, self._write_weights)

    @property
    def _files(self) -> ModelFiles:
        return ModelFiles(self.config.model, self.config.revision, self.served_dtype())

    async def _write_weights(self, folder: Path) -> None:
        await self.ask("save_sharded", str(folder))
