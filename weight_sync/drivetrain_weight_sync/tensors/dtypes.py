"""Dtypes and their names in a :class:`~drivetrain.types.weights.TensorSpec`."""

from __future__ import annotations

import math
from typing import Final

import torch

from drivetrain.errors import WeightPlanMismatch
from drivetrain.types.weights import TensorSpec

_WIDER: Final = {
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}
"""8-bit types are left out: quantised values mean nothing without their scales."""
_PLAIN: Final = frozenset({*_WIDER, torch.float64})
"""Floating dtypes whose values need no scales."""


def widens(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a conversion to another floating dtype keeps every value exactly, as bfloat16 to float32 does."""
    return wanted in _WIDER.get(dtype, ())


def rounds(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a conversion rounds values to another floating dtype; false for quantised (8-bit) values."""
    return dtype != wanted and {dtype, wanted} <= _PLAIN and not widens(dtype, wanted)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype that ``spec`` names.

    Raises:
        WeightPlanMismatch: torch knows no dtype of that name.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightPlanMismatch(
            f"{spec.name} has dtype {spec.dtype!r}, which torch {torch.__version__} does not know; "
            'give a name such as "float32" or "bfloat16"',
            mismatched=[spec.name],
        )
    return dtype


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of its element size: torch compares and indexes integers for any dtype."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe ``tensor`` under ``name``."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def nbytes_of(spec: TensorSpec) -> int:
    """Return the size of the tensor in bytes."""
    return dtype_of(spec).itemsize * math.prod(spec.shape)
