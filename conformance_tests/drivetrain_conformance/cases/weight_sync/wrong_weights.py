"""Tensors, plans and folders that no push may bring into an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from drivetrain.errors import DrivetrainError, InvalidWeights, WeightPlanMismatch
from drivetrain.types.weights import (
    PlacedTensor,
    WeightPlan,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.served_models import Models
from drivetrain_conformance.assets.weight_sources import Tensors, nowhere, tensors_of, write_checkpoint

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
    # Double is rounded to the engine's own dtype.
    Fault("a tensor of another dtype", _replace(torch.Tensor.double), WeightPlanMismatch, "mismatched", "would round"),
    Fault("a tensor with a NaN", _replace(_ending_in(float("nan"))), InvalidWeights, "tensors"),
    Fault("a tensor with an infinity", _replace(_ending_in(float("-inf"))), InvalidWeights, "tensors"),
)


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
