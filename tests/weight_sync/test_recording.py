"""A loader that moves tensors about before it copies them is followed; one that computes with them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from drivetrain.errors import WeightSyncError
from drivetrain.weights import TensorSpec
from drivetrain_weight_sync.recording import record

HEADS, DIM, WIDTH = 3, 4, 5
SHAPES = {"qkv": (HEADS * 3 * DIM, WIDTH), "bias": (HEADS * 3 * DIM,), "a": (4, 6), "b": (2, 6), "scalar": ()}

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


class Engine:
    def __init__(self) -> None:
        self.qkv = torch.zeros(3 * HEADS * DIM, WIDTH)
        self.bias = torch.zeros(3 * HEADS * DIM)
        self.fused = torch.zeros(6, 8)
        self.scalar = torch.zeros(())

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Interleaved heads are sorted as Bloom's are; a and b are put together, transposed and padded."""
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in ("qkv", "bias"):
                by_head = tensor.view(HEADS, 3, DIM, *tensor.shape[1:])
                getattr(self, name).copy_(by_head.transpose(0, 1).reshape(tensor.shape))
            elif name == "scalar":
                self.scalar.copy_(tensor.clone())
            else:
                kept[name] = tensor
                if len(kept) == 2:
                    put_together = torch.cat([kept["a"], kept["b"]]).t()
                    both = torch.empty_like(put_together, memory_format=torch.contiguous_format)
                    both.copy_(put_together)
                    self.fused[:, :6].copy_(both)


def specs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", SHAPES[name]) for name in names or SHAPES]


def test_what_is_moved_about_is_copied_from_where_it_was() -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    loaded, followed = Engine(), Engine()
    loaded.load(weights.items())
    copies = record(followed.load, specs())
    assert not followed.qkv.any(), "recording changes nothing"
    assert set(copies) == set(SHAPES)
    for name, found in copies.items():
        for copy in found:
            copy.destination.copy_(copy.part_of(weights[name]))
    for own in ("qkv", "bias", "fused", "scalar"):
        assert torch.equal(getattr(followed, own), getattr(loaded, own)), own


def test_a_rank_takes_its_part_of_what_is_moved_about() -> None:
    part = torch.zeros(2 * DIM, WIDTH)

    def second_and_third_head_of_q(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            sorted_by_kind = tensor.view(HEADS, 3, DIM, WIDTH).transpose(0, 1).reshape(3, HEADS * DIM, WIDTH)
            part.copy_(sorted_by_kind[0].narrow(0, DIM, 2 * DIM))

    (copy,) = record(second_and_third_head_of_q, specs("qkv"))["qkv"]
    tensor = torch.randn(SHAPES["qkv"])
    copy.destination.copy_(copy.part_of(tensor))
    assert torch.equal(part, tensor.view(HEADS, 3, DIM, WIDTH)[1:, 0].reshape(2 * DIM, WIDTH))


@pytest.mark.parametrize(
    "computes",
    [
        lambda tensor: tensor + 1,
        lambda tensor: 2 * tensor,
        lambda tensor: -torch.exp(tensor.float()),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.flip(0),
        lambda tensor: tensor[torch.randperm(len(tensor))],
        lambda tensor: tensor.mul_(3),
        lambda tensor: torch.where(tensor > 0, tensor, 0),
    ],
)
def test_what_is_computed_is_refused(computes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    held = torch.zeros(SHAPES["qkv"])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            held.copy_(computes(tensor))

    with pytest.raises(WeightSyncError, match="the engine transforms weights"):
        record(load, specs("qkv"))
    assert not held.any()


def test_what_is_loaded_by_way_of_another_tensor_is_refused() -> None:
    held = torch.zeros(SHAPES["a"])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            between = torch.full(SHAPES["a"], 7.0)
            between.copy_(tensor)
            held.copy_(between)

    with pytest.raises(WeightSyncError, match="into a tensor that it made for that"):
        record(load, specs("a"))
    assert not held.any(), "what was never written is not read"


def test_tensors_that_are_mixed_are_refused() -> None:
    held = torch.zeros(4, 6)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept = dict(weights)
        held.copy_(torch.where(torch.eye(4, 6).bool(), kept["a"], kept["b"][:1]))

    with pytest.raises(WeightSyncError, match="the engine transforms weights"):
        record(load, specs("a", "b"))
