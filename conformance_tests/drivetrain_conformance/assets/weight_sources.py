"""Weights for the cases of weight sync: correct ones, wrong ones, and a trainer that fails midway."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, InvalidWeights, WeightPlanMismatch
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.weights import (
    CommunicatorSpec,
    DiskSource,
    PlacedTensor,
    SharedMemorySource,
    WeightManifest,
    WeightPlan,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.served_models import Models, copy_model
from drivetrain_weight_sync import WeightInput
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.transports.updatable_engine import UpdateUnderWay

NEW: Final = "new"
"""Version of most updates."""

Tensors = dict[str, torch.Tensor]


# Right weights ---------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> Tensors:
    """Return every tensor of a model folder, by its checkpoint name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def in_bfloat16(tensors: Tensors) -> Tensors:
    """Return the tensors as a mixed-precision trainer holds them."""
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def of_a_diverged_model(tensors: Tensors) -> Tensors:
    """Return finite tensors with matrices so large that activations overflow and the logits are NaN."""
    return {name: _overflowing(tensor) if _multiplies(name, tensor) else tensor for name, tensor in tensors.items()}


def _multiplies(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and not ("embed" in name or "lm_head" in name)


def _overflowing(tensor: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(tensor.dtype).max
    factor: float = min(most**0.6, most / 2) / (float(tensor.abs().max()) or 1.0)
    return (tensor.double() * factor).to(tensor.dtype)


def module_of(folder: Path) -> PreTrainedModel:
    """Load a folder's model as a trainer holds it, in the checkpoint's dtype."""
    with no_progress_bars():
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return module


def reused_buffer(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in one buffer, which is overwritten as soon as the next tensor is requested."""
    buffer = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(255)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row-major."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_checkpoint(folder: Path, model: Path, tensors: Tensors) -> Path:
    """Write a model folder like ``model`` but with these tensors; return it."""
    copy_model(model, folder, without="*.safetensors*")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def from_disk(model: Path, version: str = NEW, **fields: object) -> WeightUpdateRequest:
    """Return a request for an update from a model folder."""
    return WeightUpdateRequest.model_validate({"version": version, "source": DiskSource(path=str(model)), **fields})


FORMS: Final = ("mapping", "pairs", "function", "module")


def in_form(form: str, tensors: Tensors, folder: Path) -> WeightInput:
    """Return these tensors (for ``module``, those of the folder) in one of the :data:`FORMS` that a trainer may use."""
    match form:
        case "mapping":
            return tensors
        case "pairs":
            return list(tensors.items())
        case "function":
            return lambda: reused_buffer(tensors)
        case "module":
            return module_of(folder)
        case _:
            raise AssertionError(form)


# Wrong weights ---------------------------------------------------------------------------------------------------

GHOST: Final = "model.layers.0.ghost.weight"
"""Name of a tensor that no model has."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a trainer's tensors can be wrong."""

    what: str
    spoil: Callable[[Tensors, str], object]
    """Changes the named tensor in place."""
    kind: type[DrivetrainError]
    field: str
    """Attribute of the error that names the tensors."""
    says: str = ""
    """Words of the error's message."""

    def check_named(self, error: DrivetrainError, name: str) -> None:
        """Raise unless the error names the wrong tensor and no other."""
        expected = GHOST if self.field == "extra" else name
        named = getattr(error, self.field)
        assert named == (expected,), f"{self.what}: the error names {named}, not {expected}"
        assert expected in str(error), f"{self.what}: the message does not name {expected}: {error}"
        assert self.says in str(error), f"{self.what}: the message does not say {self.says!r}: {error}"


def _replace(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], None]:
    return lambda tensors, name: tensors.update({name: change(tensors[name])})


def _ending_in(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.cat([tensor.view(-1)[:-1], tensor.new_tensor([value])]).view(tensor.shape)


FAULTS: Final = (
    Fault("a missing tensor", lambda tensors, name: tensors.pop(name), WeightPlanMismatch, "missing"),
    Fault("an extra tensor", lambda tensors, _: tensors.update({GHOST: torch.ones(2, 3)}), WeightPlanMismatch, "extra"),
    Fault("a tensor of another shape", _replace(lambda it: it[:-1].clone()), WeightPlanMismatch, "mismatched"),
    # Double is rounded to whatever dtype the engine holds.
    Fault("a tensor of another dtype", _replace(torch.Tensor.double), WeightPlanMismatch, "mismatched", "would round"),
    Fault("a tensor with a NaN", _replace(_ending_in(float("nan"))), InvalidWeights, "tensors"),
    Fault("a tensor with an infinity", _replace(_ending_in(float("-inf"))), InvalidWeights, "tensors"),
)


def a_matrix(manifest: WeightManifest) -> str:
    """Return the name of a floating-point matrix in the middle of the model that no other tensor is tied to."""
    tied = set(manifest.aliases.values())
    names = [
        spec.name
        for spec in manifest.tensors
        if len(spec.shape) == 2 and "float" in spec.dtype and spec.name not in tied
    ]
    return names[len(names) // 2]


def one_of_each_kind(manifest: WeightManifest) -> list[str]:
    """Return the names of floating-point tensors that no other is tied to, one of each kind of tensor in a layer."""
    tied = set(manifest.aliases.values())
    kinds: dict[str, list[str]] = {}
    for spec in manifest.tensors:
        if "float" in spec.dtype and spec.name not in tied:
            kinds.setdefault(re.sub(r"\d+", "", spec.name), []).append(spec.name)
    return [names[len(names) // 2] for names in kinds.values()]


def without_tensor(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """Return the request with one tensor missing from its plan."""
    return _each_placed(request, lambda placed: () if placed.spec.name == name else (placed,))


def moved_tensor(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """Return the request with one tensor's offset in the plan one byte too large."""

    def moved(placed: PlacedTensor) -> tuple[PlacedTensor, ...]:
        return (replace(placed, offset=placed.offset + 1) if placed.spec.name == name else placed,)

    return _each_placed(request, moved)


def _each_placed(
    request: WeightUpdateRequest, change: Callable[[PlacedTensor], tuple[PlacedTensor, ...]]
) -> WeightUpdateRequest:
    assert request.plan is not None
    buckets = tuple(
        replace(bucket, tensors=tuple(new for placed in bucket.tensors for new in change(placed)))
        for bucket in request.plan.buckets
    )
    return request.model_copy(update={"plan": WeightPlan(buckets)})


def bad_folders(models: Models, model: Path) -> dict[str, Path]:
    """Make folders that hold no valid checkpoint of ``model``, each for a different reason."""
    truncated, garbage, lacking, outside, elsewhere, endless, sound = (
        write_checkpoint(models.folder(what), model, tensors_of(model))
        for what in ("truncated", "garbage", "lacking", "outside", "elsewhere", "endless", "sound")
    )
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    (garbage / "model.safetensors").write_bytes(b"no tensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    file = sound / "model.safetensors"
    for folder, named in ((outside, os.path.relpath(file, outside)), (elsewhere, str(file))):
        (folder / "model.safetensors").unlink()
        index["weight_map"] = dict.fromkeys(tensors_of(model), named)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (endless / "model.safetensors").unlink()
    os.mkfifo(endless / "model.safetensors")
    return {
        "a folder that is not there": nowhere(models),
        "an empty folder": models.folder("empty"),
        "a truncated file": truncated,
        "a file of something else": garbage,
        "a folder that lacks a file of its index": lacking,
        "an index that names a file outside its folder": outside,
        "an index that names an absolute path": elsewhere,
        "a FIFO in place of a file": endless,
    }


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


def with_value(request: WeightUpdateRequest, name: str, tensor: torch.Tensor, value: float) -> WeightUpdateRequest:
    """Write ``value`` into one element of a tensor in shared memory, and return the request with its digest."""
    source = request.source
    assert isinstance(source, SharedMemorySource)
    assert request.plan is not None
    index, placed = next(
        (index, placed)
        for index, bucket in enumerate(request.plan.buckets)
        for placed in bucket.tensors
        if placed.spec.name == name
    )
    changed = tensor.to(dtype_of(placed.spec), copy=True)
    changed.view(-1)[0] = value
    with open(source.path, "r+b") as arena:
        arena.seek(source.bucket_offsets[index] + placed.offset)
        arena.write(raw_bytes(changed))
    return request.model_copy(update={"digests": {**(request.digests or {}), name: digest(changed)}})


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
