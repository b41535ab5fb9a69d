# pyright: reportMissingImports=false
"""Load vision towers that transformers 5.19 or later saved, whose tensor names lack ``vision_model``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

_PART: Final = "vision_model"
"""The only part of vLLM's CLIP and SigLIP towers, in which all their tensors lie."""
_LAYERS: Final = "encoder.layers."


def register() -> None:
    """Have vLLM accept a tower's tensor names with and without ``vision_model``, and keep those it does not use.

    A LLaVA reads the features of an inner layer, and vLLM does not build the layers after that one. A trainer has
    their tensors nonetheless, and pushes them.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader

    load = AutoWeightsLoader.load_weights

    @functools.wraps(load)
    def load_weights(loader: Any, *arguments: Any, **options: Any) -> set[str]:
        for module in loader.module.modules():
            of_tower = [name for name, _ in module.named_children()] == [_PART]
            if of_tower and not hasattr(type(module), "load_weights"):
                type(module).load_weights = _load_tower
        loaded: set[str] = load(loader, *arguments, **options)
        return loaded

    AutoWeightsLoader.load_weights = load_weights


def _load_tower(tower: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    inner: Any = getattr(tower, _PART)
    held: set[str] = set()

    def used() -> Iterator[tuple[str, torch.Tensor]]:
        for given, tensor in weights:
            name = given.removeprefix(f"{_PART}.")
            if _uses(inner, name):
                yield f"{_PART}.{name}", tensor
            else:
                held.update(_hold(inner, name, tensor))

    loaded: set[str] = AutoWeightsLoader(tower).load_weights(used())
    return loaded | {f"{_PART}.{name}" for name in held}


def _uses(inner: Any, name: str) -> bool:
    """Return whether the tower was built with the part that a tensor belongs to."""
    if name.startswith(_LAYERS):
        return int(name.removeprefix(_LAYERS).partition(".")[0]) < len(inner.encoder.layers)
    part = name.partition(".")[0]
    return getattr(inner, part, part) is not None


def _hold(inner: Any, name: str, tensor: torch.Tensor) -> list[str]:
    """Copy a tensor into a parameter that no computation reads, which is made at the first copy; return its name."""
    if not hasattr(inner, "unused"):
        inner.unused, inner.unused_places = torch.nn.ParameterList(), dict[str, int]()
    if name not in inner.unused_places:
        if tensor.is_meta:
            return []
        like = next(inner.parameters())
        made = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
        inner.unused_places[name] = len(inner.unused)
        inner.unused.append(torch.nn.Parameter(made, requires_grad=False))
    place = inner.unused_places[name]
    inner.unused[place].data.copy_(tensor)
    return [f"unused.{place}"]
