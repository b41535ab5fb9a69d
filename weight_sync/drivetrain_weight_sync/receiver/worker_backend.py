"""Base of backends whose engine runs our worker: most primitives are one call to it, on any engine."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

from drivetrain.backend.base import EngineStats
from drivetrain.backend.toolkit.capability_sets import (
    FREEZING,
    LOGPROBS,
    RECEIVED_WEIGHTS,
    SAMPLING,
    STOPS,
    STRUCTURED_OUTPUT,
)
from drivetrain.backend.toolkit.serial_calls import SerialCalls
from drivetrain.errors import EngineBusy
from drivetrain.media.qwen_vision import vision_capabilities
from drivetrain.types.capability import Capability
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
    WeightUpdateRequest,
)
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters
from drivetrain_weight_sync.receiver.saving import ModelFiles, save_remote, save_sharded
from drivetrain_weight_sync.receiver.worker_requests import S, WorkerRequests

_ALWAYS: Final = (
    LOGPROBS
    | STOPS
    | SAMPLING
    | STRUCTURED_OUTPUT
    | FREEZING
    | RECEIVED_WEIGHTS
    | {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.PRIORITY,
        Capability.SLEEP_WEIGHTS,
        Capability.SLEEP_KV_CACHE,
        Capability.MOE,
        Capability.PROFILE,
        Capability.TENSOR_PARALLEL,
        Capability.EMBED,
        Capability.REWARD_SCORE,
    }
)
OF_PLAIN_WEIGHTS: Final = frozenset({Capability.READ_WEIGHTS, Capability.SAVE_SHARDED, Capability.SAVE_REMOTE})
"""Capabilities that need unquantised weights: of quantised ones, the engine keeps no checkpoint copy."""
_HELD: Final = "drivetrain-adapter-"
"""Beginning of the path of an adapter that the workers hold in memory."""
_LAST_STEP_S: Final = 10.0
_OPENING_S: Final = (0.001, 0.02)
"""First and longest interval, in seconds, at which a slow source is polled until it is open."""


def device_type_of(config: EngineConfig) -> str:
    """Return the configured device type; if none is configured, ``"cuda"`` when there is a GPU, else ``"cpu"``."""
    if config.device is not None:
        return config.device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class WorkerBackend(WorkerRequests[S]):
    """Implements generation, aborts, statistics, memory, the prefix cache and weights for an engine with our worker.

    An adapter implements the abstract methods. Its ``start`` calls :meth:`listen`, starts the engine and calls
    :meth:`connect`; :class:`~drivetrain_weight_sync.receiver.served_model.ServedModel` describes the model.

    The worker's methods have the names of the ``Backend`` page. Its ``reset_prefix_cache``, and an update that does not
    keep the cache, also concern requests that are on their way to the engine or wait in it: see
    :class:`~drivetrain_weight_sync.receiver.cache_epochs.CacheEpochs`. Others are ``prepare_weights`` and
    ``prepared_weights``, as a ``PrepareUpdate`` may take long, and ``stage_adapter`` and ``drop_adapter``. Engine
    releases that label no tokens with versions also need ``tokens_so_far``, which counts the tokens of unfinished
    requests, and ``apply_weights_counting``, which returns those counts as well.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._adapter_numbers = itertools.count(1)
        self._lora_calls = SerialCalls()
        """Loads and unloads adapters."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the capabilities of an engine that has drivetrain's worker and sampler.

        A subclass adds and takes away.
        """
        claimed = set(_ALWAYS) | vision_capabilities(config)
        if config.enable_prefix_caching:
            claimed.add(Capability.PREFIX_CACHE)
        if config.enable_lora:
            claimed |= {Capability.LORA, Capability.WEIGHTS_LORA, Capability.WEIGHTS_LORA_TENSORS}
        if importlib.util.find_spec("fsspec") is not None:
            claimed.add(Capability.SAVE_REMOTE)
        if config.tensor_parallel_size > 1:
            claimed -= {Capability.SAVE_SHARDED, Capability.SAVE_REMOTE}
        if config.engine_kwargs.get("quantization") is not None:
            claimed -= OF_PLAIN_WEIGHTS
        return frozenset(claimed)

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
            self.renew_cache_key()
        # A request whose caller went away runs one more step, which only the engine knows about.
        await self.ask_until_free(_LAST_STEP_S, "sleep", tags)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory again."""
        await self.ask("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        """Never reuse an earlier prefix again, and free them all if no request holds one."""
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
        reply = await self._applied(update)
        self.version = update.version
        return reply

    async def _applied(self, update: ApplyUpdate) -> WeightReply:
        if self.labels_tokens():
            return cast(WeightReply, await self.ask("apply_weights", update))
        with self.nobody_admitted():
            counted = await self.ask("apply_weights_counting", update, list(self.in_flight))
            reply, tokens = cast("tuple[WeightReply, dict[str, int]]", counted)
            self._replaced(tokens)
        return reply

    async def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        async with self._new_version(version):
            await self.ask("set_weight_version", version)

    @asynccontextmanager
    async def _new_version(self, version: str) -> AsyncGenerator[None, None]:
        if self.labels_tokens():
            yield
        else:
            with self.nobody_admitted():
                tokens = cast("dict[str, int]", await self.ask("tokens_so_far", list(self.in_flight)))
                yield
                self._replaced(tokens)
        self.version = version

    def _replaced(self, tokens: Mapping[str, int]) -> None:
        for name, request in self.in_flight.items():
            # The engine has forgotten a finished request, although its result has not arrived here yet.
            request.replaced(self.version, tokens.get(name, math.inf))

    # Adapters ----------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder, to the end even if the caller is cancelled."""
        await self._lora_calls.run(lambda: self.load_adapter_folder(lora_name, lora_path, pinned))

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Load an adapter from its tensors, to the end even if the caller is cancelled."""
        await self._lora_calls.run(lambda: self.load_adapter_tensors(lora_name, update, pinned))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter, to the end even if the caller is cancelled."""
        await self._lora_calls.run(lambda: self.unload_adapter(lora_name))

    async def load_adapter_folder(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Have the engine load an adapter from a peft folder."""
        await super().load_lora_adapter(lora_name, lora_path, pinned)

    async def load_adapter_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Have every worker receive an adapter, then have the engine load it."""
        await super().load_lora_tensors(lora_name, update, pinned)

    async def unload_adapter(self, lora_name: str) -> None:
        """Have the engine unload an adapter, and the workers free it."""
        await super().unload_lora_adapter(lora_name)

    async def stage_adapter(
        self, update: WeightUpdateRequest, plain: PlainAdapters, namings: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> str:
        """Have every worker receive and check an adapter; return the path by which the engine then loads it.

        Raises:
            InvalidRequest: The engine cannot serve it; no worker keeps it.
        """
        path = f"{_HELD}{next(self._adapter_numbers)}"
        fused = {name: list(others) for name, others in plain.adapted_with.items()}
        shapes = [dict(naming) for naming in namings]
        await self.ask("stage_adapter", path, update, plain.largest_rank, fused, shapes)
        return path

    async def drop_adapter(self, path: str) -> None:
        """Have the workers free an adapter, unless its path is that of a folder."""
        if path.startswith(_HELD):
            await self.ask("drop_adapter", path)

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
