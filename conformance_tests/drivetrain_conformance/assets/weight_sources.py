"""Weights for the cases of weight sync, and a trainer that fails midway."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.weights import (
    CommunicatorSpec,
    DiskSource,
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.served_models import Models, copy_model
from drivetrain_weight_sync.transports.updatable_engine import UpdateUnderWay

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    """Return every tensor of a model folder, by its checkpoint name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def is_of_vision(name: str) -> bool:
    """Return True for the checkpoint name of a tensor of a vision model, or of the projector behind it."""
    return any(part.startswith(("visual", "vision", "multi_modal_projector")) for part in name.split("."))


def in_bfloat16(tensors: Tensors) -> Tensors:
    """Return the tensors as a mixed-precision trainer holds them."""
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row-major."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_checkpoint(folder: Path, model: Path, tensors: Tensors) -> Path:
    """Write a model folder like ``model`` but with these tensors; return it."""
    copy_model(model, folder, without="*.safetensors*")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def from_disk(model: Path, version: str = "new", **fields: object) -> WeightUpdateRequest:
    """Return a request for an update from a model folder."""
    return WeightUpdateRequest.model_validate({"version": version, "source": DiskSource(path=str(model)), **fields})


def a_matrix(manifest: WeightManifest) -> str:
    """Return the name of a floating-point matrix in the middle of the model that no other tensor is tied to."""
    tied = set(manifest.aliases.values())
    names = [
        spec.name
        for spec in manifest.tensors
        if len(spec.shape) == 2 and "float" in spec.dtype and spec.name not in tied
    ]
    return names[len(names) // 2]


def is_waited_for(fifo: Path) -> bool:
    """Return True if someone reads a FIFO or waits in ``open()`` to read it; a waiting one is let go."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def nowhere(models: Models) -> Path:
    """Return a path where nothing exists."""
    return models.folder("gone") / "nowhere"


# A trainer that fails --------------------------------------------------------------------------------------------


def with_another_digest(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """Return the request with a digest that does not match the named tensor."""
    digests = dict(request.digests or {})
    return request.model_copy(update={"digests": {**digests, name: digests[name] ^ 1}})


class Between:
    """Wraps an engine for ``WeightSync`` or ``LoraSync`` and changes the update requests on their way to it.

    Args:
        engine: The engine.
        buckets: Number of buckets after which the connection breaks; None: it holds.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        buckets: int | None = None,
    ) -> None:
        self._engine = engine
        self.change: Callable[[WeightUpdateRequest], WeightUpdateRequest] = lambda request: request
        """Applied to every request."""
        self.buckets = buckets
        self.groups: list[CommunicatorSpec] = []
        """Groups that the engine was told to join."""

    @property
    def isolation(self) -> Isolation:
        """The engine's isolation."""
        return self._engine.isolation

    @property
    def capabilities(self) -> Set[Capability]:
        """The engine's capabilities."""
        return self._engine.capabilities

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self._engine.config

    @property
    def gpus(self) -> Sequence[str]:
        """The engine's GPUs."""
        return self._engine.gpus

    @property
    def weight_update_ranks(self) -> Sequence[str]:
        """The engine's ranks."""
        return self._engine.weight_update_ranks

    async def weight_manifest(self) -> WeightManifest:
        """Return the engine's manifest."""
        return await self._engine.weight_manifest()

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        """Record the group, and let the engine join it."""
        self.groups.append(spec)
        await self._engine.init_weight_update_communicator(spec)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        """Let the engine leave the group."""
        await self._engine.destroy_weight_update_communicator(group_name)

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        """Prepare the changed request."""
        await self._engine.prepare_weight_update(self.change(request))

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Update the engine at once with the changed request."""
        await self._engine.update_named_weights(self.change(request))

    async def release_weight_sources(self) -> None:
        """Release the engine's weight sources."""
        await self._engine.release_weight_sources()

    @asynccontextmanager
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[UpdateUnderWay, None]:
        """Update the engine with the changed request, over a connection that may break."""
        breaks = self.buckets is not None
        async with self._engine.weight_update(self.change(request), at_once=at_once and not breaks) as update:
            if not breaks:
                yield update
                return
            line = _BreaksOff(update, self.buckets or 0)
            yield line
            if at_once:
                for index in range(update.buckets):
                    await line.load([index])


class _BreaksOff:
    def __init__(self, update: UpdateUnderWay, left: int) -> None:
        self._update = update
        self._left = left

    @property
    def buckets(self) -> int:
        return self._update.buckets

    @property
    def paused_seconds(self) -> float:
        return self._update.paused_seconds

    async def load(self, indices: Sequence[int]) -> None:
        if self._left < len(indices):
            raise ConnectionError("the trainer was lost")
        self._left -= len(indices)
        await self._update.load(indices)
