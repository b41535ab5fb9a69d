"""Objects that an engine makes anew when it converts a layer; CUDA graphs read memory at the old ones' addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drivetrain_weight_sync.tracing.rebuilt_objects import put_back


@dataclass(frozen=True)
class Scales:
    scale: torch.Tensor
    alpha: float


class Kernel:
    def __init__(self, value: float, parts: int = 2) -> None:
        self.strides = torch.full((3,), value)
        self.scales = [Scales(torch.full((2, 2), value), value)] * parts
        self.module = torch.nn.Linear(2, 2)
        self.itself = self


@dataclass
class Method:
    kernel: object = field(default_factory=lambda: Kernel(1.0))
    scheme: str = "fp8"


def test_an_object_that_was_made_anew_keeps_its_address_and_takes_the_new_values() -> None:
    method = Method()
    old, before = method.kernel, dict(vars(method))
    assert isinstance(old, Kernel)
    strides, scale, module = old.strides, old.scales[0].scale, old.module
    method.kernel = Kernel(2.0)
    put_back(method, before)
    assert method.kernel is old
    assert old.strides is strides
    assert strides.tolist() == [2.0, 2.0, 2.0]
    assert old.scales[0].scale is scale
    assert scale.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert old.scales[0].alpha == 2.0
    assert old.module is module


def test_an_object_of_another_kind_stays() -> None:
    method = Method()
    before = dict(vars(method))
    method.kernel = made = Scales(torch.zeros(1), 0.0)
    put_back(method, before)
    assert method.kernel is made


def test_what_was_not_made_anew_is_left_alone() -> None:
    method = Method()
    before = dict(vars(method))
    put_back(method, before)
    assert vars(method) == before
