"""Models small enough to compare bitwise, with every kind of tensor that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width, bias=True, dtype=torch.bfloat16)
        self.down = nn.Linear(3 * width, width, bias=False, dtype=torch.float16)
        self.gate = nn.Linear(width, 4, bias=False, dtype=torch.float32)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(()))
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randint(-128, 128, (width, 7), dtype=torch.int8))
        self.register_buffer("none", torch.empty(0, width))
        self.register_buffer("cache", torch.rand(3), persistent=False)


class Inner(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    """Three layers of mixed dtypes, a 0-dim and an empty buffer; ``lm_head`` is tied to the embedding."""

    def __init__(self, seed: int, *, tied: bool = True, layers: int = 3, width: int = 24, vocabulary: int = 61) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = Inner(layers, width, vocabulary)
            self.lm_head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        if tied:
            self.lm_head.weight = self.model.embed.weight


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter and persistent buffer."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors are not bitwise equal, or that only one of the two has."""
    names = one.keys() | other.keys()
    return sorted(
        name
        for name in names
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or one[name].shape != other[name].shape
        or bits(one[name]) != bits(other[name])
    )
