"""A push recognises the tensors of the previous push, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from drivetrain_weight_sync.trainer.staging import Seen

SQUARE = torch.randn(4, 4)
OTHER = torch.randn(8)


def test_the_same_tensors_are_known_again() -> None:
    seen = Seen([("a", SQUARE), ("b", OTHER)])
    assert seen.are([("a", SQUARE), ("b", OTHER)])
    SQUARE.mul_(2)
    assert seen.are([("a", SQUARE.detach()), ("b", OTHER[:])]), "their values do not matter, nor who holds them"


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given[:1],
        lambda given: [*given, ("c", OTHER)],
        lambda given: given[::-1],
        lambda given: [("another", SQUARE), given[1]],
        lambda given: [("a", SQUARE.clone()), given[1]],
        lambda given: [("a", SQUARE.T), given[1]],
        lambda given: [("a", SQUARE[:2]), given[1]],
        lambda given: [("a", SQUARE.view(16)), given[1]],
        lambda given: [("a", SQUARE.view(torch.int32)), given[1]],
        lambda given: [("a", nn.Parameter(SQUARE)), given[1]],
        lambda given: [("a", SQUARE.to_sparse()), given[1]],
        lambda given: [("a", SQUARE.to("meta")), given[1]],
        lambda given: [("a", "no tensor"), given[1]],
        lambda given: [("a", SQUARE), ("b", OTHER[1:])],
    ],
)
def test_other_tensors_are_not(
    change: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]],
) -> None:
    given = [("a", SQUARE), ("b", OTHER)]
    assert not Seen(given).are(change(given))
