"""Base of backends whose engine runs our worker: most primitives are one call to it, on any engine."""

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
"""First and longest interval, in seconds, at which a slow source is polled until it is open."""


def device_type_of(config: EngineConfig) -> str:
    """Return the configured device type; if none is configured, ``"cuda"`` when there is a GPU, else ``"cpu"``."""
    if config.device is not None:
        return config.device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class InFlight(Protocol):
    """The state of a request in flight that weight updates touch."""

    def replaced(self, version: str, tokens: float) -> None:
        """Record that new weights follow this many tokens; infinity if every token was already sampled."""
        ...


class WorkerBackend(Backend):
    """Implements statistics, memory, the prefix cache and weights by :meth:`ask`.

    The worker's methods have the names of the ``Backend`` page, plus ``prepare_weights`` and ``prepared_weights``, as a
    ``PrepareUpdate`` may take long. Engine releases that label no tokens with versions also need ``tokens_so_far``,
    which counts the tokens of unfinished requests, and ``apply_weights_counting``, which returns those counts as well.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.version = config.weight_version
        """Version of the weights that are served."""
        self.in_flight: dict[str, InFlight] = {}
        """Requests in flight, by the engine's id."""
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._admits = asyncio.Event()
        self._admits.set()
        self._cache_epoch = 0

    @abstractmethod
    async def ask(self, method: str, *arguments: object) -> object:
        """Call a method of the worker.

        If an argument is an ``ApplyUpdate`` with a freeze mode, the worker freezes requests before the method and
        resumes them after it, unless it fails.
        """

    @abstractmethod
    def labels_tokens(self) -> bool:
        """Return whether this engine release reports the weight version of each token."""

    @abstractmethod
    def served_dtype(self) -> str:
        """Return the dtype of the engine's weights, such as ``"bfloat16"``."""

    def new_id(self) -> str:
        """Return a new unique request id for the engine."""
        return request_id(self._prefix, next(self._numbers))

    async def admit(self, name: str, request: InFlight) -> None:
        """Count a request as in flight, before any of it is sent to the engine.

        If the engine labels no tokens, this waits while weights are being replaced: for a request that arrives during
        the change, nobody could tell which weights made its tokens.
        """
        await self._admits.wait()
        self.in_flight[name] = request

    @property
    def cache_key(self) -> str:
        """Prefix-cache key of new requests, used beside their tokens."""
        return f"drivetrain-{self._cache_epoch}"

    async def ask_until_free(self, patience: float, method: str, *arguments: object) -> None:
        """Call the worker repeatedly while it is busy, for up to ``patience`` seconds."""
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
        """Return UUIDs of the GPUs that hold the weights, by rank."""
        return tuple(cast("list[str]", await self.ask("gpus")))

    async def stats(self) -> EngineStats:
        """Return the worker's counts of requests and memory."""
        return cast(EngineStats, await self.ask("stats"))

    # Memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        if MemoryTag.KV_CACHE in tags:
            self._cache_epoch += 1
        # A request whose caller went away runs one more step, which only the engine knows about.
        await self.ask_until_free(_LAST_STEP_S, "sleep", tags)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory again."""
        await self.ask("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        """Never reuse an earlier prefix again, and free those that no frozen request holds."""
        self._cache_epoch += 1
        await self.ask("reset_prefix_cache")

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Return the model's tensors by their checkpoint names."""
        return cast(WeightManifest, await self.ask("weight_manifest"))

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update between two steps of the batch; generation continues while a source is opened."""
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
        async with busy_wait() if self._busy_wait else nullcontext():
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
    def _busy_wait(self) -> bool:
        return self.config.busy_wait and device_type_of(self.config) != "cpu"

    async def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
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
            # The engine has forgotten a finished request, although its result has not arrived here yet.
            request.replaced(self.version, tokens.get(name, math.inf))

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a group while generation continues."""
        await self.ask_until_free(2 * spec.timeout, "init_communicator", spec)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave the group."""
        await self.ask("destroy_communicator", group_name)

    async def read_weight(self, name: str) -> TensorData:
        """Return a copy of one tensor."""
        return cast(TensorData, await self.ask("read_weight", name))

    async def validate_weights(self) -> WeightReport:
        """Check every tensor in place for NaN, infinity, and nothing but zeros."""
        return cast(WeightReport, await self.ask("validate_weights"))

    async def save_sharded(self, path: str) -> None:
        """Write a model folder; the weights are written by a thread in the worker."""
        await save_sharded(path, self._files, self._write_weights)

    async def save_remote(self, url: str) -> None:
        """Write a model folder, and upload it from this process."""
        await save_remote(url, self._files, self._write_weights)

    @property
    def _files(self) -> ModelFiles:
        return ModelFiles(self.config.model, self.config.revision, self.served_dtype())

    async def _write_weights(self, folder: Path) -> None:
        await self.ask("save_sharded", str(folder))
