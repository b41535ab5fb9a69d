"""What an engine's model holds, tensor by tensor."""

from __future__ import annotations

import torch

from drivetrain.errors import InvalidRequest
from drivetrain.weights import TensorData, WeightReport
from drivetrain_weight_sync.dtypes import spec_of
from drivetrain_weight_sync.finite import non_finite
from drivetrain_weight_sync.target import WeightTarget


def read_weight(target: WeightTarget, name: str) -> TensorData:
    """Copy one tensor out, by its checkpoint name or alias.

    Raises:
        InvalidRequest: the model has none of that name.
    """
    manifest = target.manifest()
    own = manifest.aliases.get(name, name)
    if own not in {spec.name for spec in manifest.tensors}:
        raise InvalidRequest(
            f"the model has no tensor {name!r}; 'engine.weight_manifest()' lists the names", field="name"
        )
    # A copy: numpy() pins the storage that it looks at, which could then never give its memory back.
    tensor = target.read(own).detach().to("cpu", copy=True).contiguous()
    return TensorData(spec_of(name, tensor), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def validate_weights(target: WeightTarget) -> WeightReport:
    """Look at every tensor, where it lies, for NaN, infinity and zeros only."""
    names = [spec.name for spec in target.manifest().tensors]
    # One at a time: what an engine fused is put together anew to be looked at.
    bad: dict[str, str] = {}
    zero: list[str] = []
    for name in names:
        tensor = target.read(name)
        bad |= non_finite({name: tensor})
        if tensor.numel() and not bool(tensor.any()):
            zero.append(name)
    return WeightReport(
        checked=len(names),
        nan=tuple(name for name, what in bad.items() if what == "NaN"),
        infinite=tuple(name for name, what in bad.items() if what == "infinite"),
        all_zero=tuple(zero),
    )


__all__ = ["read_weight", "validate_weights"]
