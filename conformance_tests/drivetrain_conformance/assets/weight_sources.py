"""Where the cases of weight sync take their weights from: right ones, wrong ones, and a trainer that fails midway."""

from __future__ import annotations

import json
import os
import shutil
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
from drivetrain.types.weights import CommunicatorSpec, PlacedTensor, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_conformance.assets.served_models import Models
from drivetrain_weight_sync import WeightInput
from drivetrain_weight_sync.trainer.sync import UpdateUnderWay

Tensors = dict[str, torch.Tensor]


# Right weights ---------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a model folder, by its checkpoint name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def in_bfloat16(tensors: Tensors) -> Tensors:
    """The tensors as a trainer in mixed precision has them."""
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def of_a_diverged_model(tensors: Tensors) -> Tensors:
    """The tensors with finite matrices so large that the model's activations overflow, and its logits are NaN."""
    return {name: _overflowing(tensor) if _multiplies(name, tensor) else tensor for name, tensor in tensors.items()}


def _multiplies(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and not ("embed" in name or "lm_head" in name)


def _overflowing(tensor: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(tensor.dtype).max
    factor: float = min(most**0.6, most / 2) / (float(tensor.abs().max()) or 1.0)
    return (tensor.double() * factor).to(tensor.dtype)


def module_of(folder: Path) -> PreTrainedModel:
    """The model of a folder as a trainer holds it, in the dtype of the checkpoint."""
    with no_progress_bars():
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return module


def reused_buffer(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in memory that holds something else as soon as the next one is asked for."""
    buffer = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(255)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_checkpoint(folder: Path, model: Path, tensors: Tensors) -> Path:
    """Write a model folder like ``model`` but with these tensors; return it."""
    shutil.copytree(
        model,
        folder,
        ignore=shutil.ignore_patterns("*.safetensors*"),
        copy_function=shutil.copyfile,
        dirs_exist_ok=True,
    )
    folder.chmod(0o755)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


FORMS: Final = ("mapping", "pairs", "function", "module")


def in_form(form: str, tensors: Tensors, folder: Path) -> WeightInput:
    """These tensors, or for a module those of the folder, in a form in which a trainer may hold them."""
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
"""A tensor that no model has."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A way for a trainer's tensors to be wrong."""

    what: str
    spoil: Callable[[Tensors, str], None]
    """Spoils the tensor of that name, in place."""
    kind: type[DrivetrainError]
    field: str
    """Attribute of the error that names the tensors."""

    def check_named(self, error: DrivetrainError, name: str) -> None:
        """Raise unless the error names the tensor that was spoiled, and no other."""
        expected = GHOST if self.field == "extra" else name
        named = getattr(error, self.field)
        assert named == (expected,), f"{self.what}: the error names {named}, not {expected}"
        assert expected in str(error), f"{self.what}: the message does not name {expected}: {error}"


def _drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _add(tensors: Tensors, name: str) -> None:
    tensors[GHOST] = torch.ones(2, 3)


def _shorten(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1].clone()


def _convert(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].double()  # rounded to whatever the engine holds


def _poison(value: float) -> Callable[[Tensors, str], None]:
    def spoil(tensors: Tensors, name: str) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    return spoil


FAULTS: Final = (
    Fault("a missing tensor", _drop, WeightPlanMismatch, "missing"),
    Fault("an extra tensor", _add, WeightPlanMismatch, "extra"),
    Fault("a tensor of another shape", _shorten, WeightPlanMismatch, "mismatched"),
    Fault("a tensor of another dtype", _convert, WeightPlanMismatch, "mismatched"),
    Fault("a tensor with a NaN", _poison(float("nan")), InvalidWeights, "tensors"),
    Fault("a tensor with an infinity", _poison(float("-inf")), InvalidWeights, "tensors"),
)


def a_matrix(manifest: WeightManifest) -> str:
    """The name of a floating-point matrix of the model, somewhere in the middle, that is tied to no other."""
    tied = set(manifest.aliases.values())
    names = [
        spec.name
        for spec in manifest.tensors
        if len(spec.shape) == 2 and "float" in spec.dtype and spec.name not in tied
    ]
    return names[len(names) // 2]


def without_tensor(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """The request with a plan that lacks one tensor."""
    return _each_placed(request, lambda placed: () if placed.spec.name == name else (placed,))


def moved_tensor(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """The request with a plan in which one tensor lies a byte further on."""

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
    """Folders that hold no checkpoint of ``model``, each for another reason."""
    truncated, garbage, lacking, outside, sound = (
        write_checkpoint(models.folder(what), model, tensors_of(model))
        for what in ("truncated", "garbage", "lacking", "outside", "sound")
    )
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    (garbage / "model.safetensors").write_bytes(b"no tensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    (outside / "model.safetensors").unlink()
    index["weight_map"] = dict.fromkeys(tensors_of(model), os.path.relpath(sound / "model.safetensors", outside))
    (outside / "model.safetensors.index.json").write_text(json.dumps(index))
    return {
        "a folder that is not there": nowhere(models),
        "an empty folder": models.folder("empty"),
        "a truncated file": truncated,
        "a file of something else": garbage,
        "a folder that lacks a file of its index": lacking,
        "an index that names a file outside its folder": outside,
    }


def nowhere(models: Models) -> Path:
    """A path at which there is nothing."""
    return models.folder("gone") / "nowhere"


# A trainer that fails --------------------------------------------------------------------------------------------


def with_another_digest(request: WeightUpdateRequest, name: str) -> WeightUpdateRequest:
    """The request of a trainer that sent another tensor of this name than what arrives."""
    digests = dict(request.digests or {})
    return request.model_copy(update={"digests": {**digests, name: digests[name] ^ 1}})


class Between:
    """Stands between a ``WeightSync`` and its engine, and changes what the engine is told.

    Args:
        engine: The engine.
        change: Applied to every request on its way.
        buckets: After so many buckets the line breaks; None: it holds.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        change: Callable[[WeightUpdateRequest], WeightUpdateRequest] = lambda request: request,
        buckets: int | None = None,
    ) -> None:
        self._engine = engine
        self.change = change
        self.buckets = buckets
        self.groups: list[CommunicatorSpec] = []
        """That the engine was told to join."""

    @property
    def isolation(self) -> Isolation:
        """The engine's."""
        return self._engine.isolation

    @property
    def capabilities(self) -> Set[Capability]:
        """The engine's."""
        return self._engine.capabilities

    @property
    def config(self) -> EngineConfig:
        """The engine's."""
        return self._engine.config

    @property
    def gpus(self) -> Sequence[str]:
        """The engine's."""
        return self._engine.gpus

    async def weight_manifest(self) -> WeightManifest:
        """The engine's."""
        return await self._engine.weight_manifest()

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        """The engine's."""
        self.groups.append(spec)
        await self._engine.init_weight_update_communicator(spec)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        """The engine's."""
        await self._engine.destroy_weight_update_communicator(group_name)

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        """The engine's, of the changed request."""
        await self._engine.prepare_weight_update(self.change(request))

    async def release_weight_sources(self) -> None:
        """The engine's."""
        await self._engine.release_weight_sources()

    @asynccontextmanager
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[UpdateUnderWay, None]:
        """The engine's, of the changed request, over a line that may break."""
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
