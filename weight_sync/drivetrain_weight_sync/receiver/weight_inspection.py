"""Read and check the tensors of an engine's model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from drivetrain.errors import InvalidRequest
from drivetrain.types.weights import TensorData, WeightReport
from drivetrain_weight_sync.receiver.weight_target import WeightTarget
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.tensors.finite import non_finite


def read_weight(target: WeightTarget, name: str) -> TensorData:
    """Return a copy of one tensor, by its checkpoint name or alias.

    Raises:
        InvalidRequest: the model has no tensor of that name.
    """
    require_tensor(target, name)
    return tensor_data(name, target.read(name))


def require_tensor(target: WeightTarget, name: str) -> None:
    """Raise :class:`InvalidRequest` if the model has no tensor of that checkpoint name or alias."""
    manifest = target.manifest()
    if manifest.aliases.get(name, name) not in {spec.name for spec in manifest.tensors}:
        raise InvalidRequest(
            f"the model has no tensor {name!r}; 'engine.weight_manifest()' lists the names", field="name"
        )


def tensor_data(name: str, tensor: torch.Tensor) -> TensorData:
    """Copy a tensor into the form in which it leaves the engine, under ``name``."""
    # A copy: numpy() would pin the storage, which could then never free its memory.
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return TensorData(spec_of(name, tensor), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def validate_weights(target: WeightTarget) -> WeightReport:
    """Check every tensor in place for NaN, infinity, and nothing but zeros."""
    names = [spec.name for spec in target.manifest().tensors]
    # One at a time: a fused tensor is copied out of its parameter to be checked.
    bad: dict[str, str] = {}
    zero: list[str] = []
    for name in names:
        forms = [_of_common_dtype(held) for held in target.forms_of(name)]
        for held in forms:
            bad |= non_finite({name: held})
        if not any(bool(held.any()) for held in forms):  # empty parts, held by other ranks, count as zero
            zero.append(name)
    return WeightReport(
        checked=len(names),
        nan=tuple(name for name, what in bad.items() if what == "NaN"),
        infinite=tuple(name for name, what in bad.items() if what == "infinite"),
        all_zero=tuple(zero),
    )


def _of_common_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Convert 8-bit floats to float32: torch supports few reductions of them."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def merged(reports: Sequence[WeightReport]) -> WeightReport:
    """Merge the reports of all ranks on their parts of the same tensors."""
    first = reports[0]
    return WeightReport(
        checked=first.checked,
        nan=_any_of([report.nan for report in reports]),
        infinite=_any_of([report.infinite for report in reports]),
        all_zero=tuple(name for name in first.all_zero if all(name in report.all_zero for report in reports)),
    )


def _any_of(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))
