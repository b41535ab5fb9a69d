"""Weights that sleep and wake up as a whole, also if memory runs out half-way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drivetrain.errors import EngineOutOfMemory
from drivetrain_transformers.weights import Weights
from scarce_memory import no_more_memory_than

WIDTH = 4096
LARGE = 4 * WIDTH**2
"""Bytes of a layer, which the C library maps, and returns when they are freed."""


def module() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def sizes(layers: torch.nn.Module) -> list[int]:
    return [parameter.untyped_storage().nbytes() // LARGE for parameter in layers.parameters()]


def weights_of(layers: torch.nn.Module, *, keep: bool) -> Weights:
    return Weights(cast("Any", SimpleNamespace(module=layers)), keep=keep)


@pytest.mark.parametrize("sleeps_again", [False, True])
def test_weights_that_wake_up_half_way_sleep_on(sleeps_again: bool) -> None:
    layers = module()
    weights = weights_of(layers, keep=False)
    weights.sleep()
    assert sizes(layers) == [0, 0, 0]
    with (
        no_more_memory_than(LARGE * 3 // 2),
        pytest.raises(EngineOutOfMemory, match=r"sleeps on.*call wake_up\(\) again"),
    ):
        weights.wake_up()
    assert sizes(layers) == [0, 0, 0]
    if sleeps_again:
        weights.sleep()
        assert sizes(layers) == [0, 0, 0]
    weights.wake_up()
    assert sizes(layers) == [1, 1, 1]


def test_weights_of_which_not_all_can_be_kept_stay_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = module()
    before = [parameter[0].detach().clone() for parameter in layers.parameters()]
    weights = weights_of(layers, keep=True)
    empty = torch.empty

    def without_pinned_memory(*size: int, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        return empty(*size, **given)  # torch pins memory only where it finds a GPU

    monkeypatch.setattr(torch, "empty", without_pinned_memory)
    with no_more_memory_than(LARGE * 3 // 2), pytest.raises(EngineOutOfMemory, match=r"call sleep\(\) again"):
        weights.sleep()
    assert sizes(layers) == [1, 1, 1]
    weights.sleep()
    assert sizes(layers) == [0, 0, 0]
    weights.wake_up()
    for parameter, row in zip(layers.parameters(), before, strict=True):
        assert torch.equal(parameter[0], row)
