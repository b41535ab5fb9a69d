"""Weights of a peft model with its adapters merged, under their checkpoint names."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.tensors.checkpoint_names import base_name, listed
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.storages import storage_of

Pairs = Sequence[tuple[str, torch.Tensor]]


class MergedAdapters:
    """Merges the active adapters of a module into copies of its layers, one layer at a time; the module is not changed.

    :meth:`pairs` puts stand-ins on the meta device in the place of tensors that merging would change. Stand-ins may be
    renamed and split into views; :meth:`resolved` then returns tensors that are computed when they are needed.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[int, tuple[torch.Tensor, str, nn.Module, str]] = {}
        """By storage: the stand-in, the name of the layer that holds the tensor, that layer, and the path in it."""
        self._last: tuple[str, nn.Module] | None = None
        """The layer that was merged last, kept because a layer's tensors are mostly asked for one after another."""

    def __bool__(self) -> bool:
        return bool(self._stand_ins)

    def pairs(self, module: nn.Module, pairs: Pairs) -> Pairs:
        """Return the base weights of ``module``.

        Args:
            module: The trainer's module, wrapped by peft or not.
            pairs: The tensors of its state dict.

        Raises:
            WeightSyncError: an adapter is not merged and cannot be merged here.
        """
        return _base_weights(module, pairs, self)

    def stand_in(self, tensor: torch.Tensor, name: str, layer: nn.Module, path: str) -> torch.Tensor:
        """Return a meta tensor like ``tensor``, which ``layer`` holds at ``path``."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._stand_ins[storage_of(made)] = made, name, layer, path
        return made

    def resolved(self, tensor: torch.Tensor) -> torch.Tensor | DerivedTensor:
        """Replace a stand-in by a description of how to compute its tensor; return any other tensor as it is."""
        if not tensor.is_meta or (found := self._stand_ins.get(storage_of(tensor))) is None:
            return tensor
        whole, name, layer, path = found

        def compute() -> torch.Tensor:
            if self._last is None or self._last[0] != name:
                self._last = None
                self._last = name, _merged_copy(name, layer)
            merged: torch.Tensor = attrgetter(path)(self._last[1]).detach()
            if merged.stride() != whole.stride():
                merged = torch.empty_strided(
                    whole.shape, whole.stride(), dtype=merged.dtype, device=merged.device
                ).copy_(merged)
            return merged.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        return DerivedTensor(tensor, compute)


def without_adapters(module: nn.Module, pairs: Pairs) -> Pairs:
    """Return the base weights of ``module``, into which ``merge_adapter()`` has merged its active adapters.

    Raises:
        WeightSyncError: an adapter is not merged.
    """
    return _base_weights(module, pairs, None)


def _base_weights(module: nn.Module, pairs: Pairs, merging: MergedAdapters | None) -> Pairs:
    if "peft" not in sys.modules:
        return pairs
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    modules = dict(module.named_modules())
    layers = {name: part for name, part in modules.items() if isinstance(part, BaseTunerLayer)}
    saved = {name: part for name, part in modules.items() if isinstance(part, ModulesToSaveWrapper)}
    if not layers and not saved:
        return pairs
    apart = {name: modules[name] for name, part in layers.items() if not _is_merged(part)}
    _require_mergeable(apart, merging)
    added = {name for part in layers.values() for name in (*part.adapter_layer_names, *part.other_param_names)}
    if any(isinstance(part, TrainableTokensWrapper) for part in modules.values()):
        added.discard("token_adapter")
    outermost = {name: part for name, part in apart.items() if _owner(name, apart) is None}
    kept: list[tuple[str, torch.Tensor]] = []
    for name, tensor in pairs:
        parts = name.split(".")
        if "original_module" in parts or not added.isdisjoint(parts):
            continue
        if merging is not None and (owner := _owner(name, outermost)) is not None:
            tensor = merging.stand_in(tensor, owner, outermost[owner], name.removeprefix(f"{owner}."))
        if "modules_to_save" in parts:
            place = parts.index("modules_to_save")
            if parts[place + 1] not in _active(saved[".".join(parts[:place])]):
                continue
            del parts[place : place + 2]
        own = base_name(".".join(part for part in parts if part != "token_adapter"))
        if own is not None:
            kept.append((own, tensor))
    return kept


@torch.no_grad()
def _merged_copy(name: str, layer: nn.Module) -> nn.Module:
    """Return a copy of a layer with all active adapters merged.

    Raises:
        WeightSyncError: peft cannot merge them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    copied = copy.deepcopy(layer, _without_hooks(layer))
    # Layers within first, as peft does.
    for part in reversed([part for part in copied.modules() if isinstance(part, BaseTunerLayer)]):
        if _is_merged(part):
            continue
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already following adapters were merged")
                part.merge()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise WeightSyncError(
                f"peft cannot merge the adapters of {name}: {error}. Push the adapter alone with LoraSync, or train "
                "one that can be merged"
            ) from error
    return copied


def _require_mergeable(apart: Mapping[str, nn.Module], merging: MergedAdapters | None) -> None:
    """Raise if the unmerged adapters of a layer in ``apart`` cannot be merged into a copy of the layer."""
    both = (
        "call merge_adapter() before the push and unmerge_adapter() after it, or push the adapter alone with LoraSync"
    )
    if apart and merging is None:
        raise WeightSyncError(
            f"adapters of {listed(apart, 3)} are not merged into the weights; nothing was changed. If the weights are "
            f"sharded, {both}"
        )
    for name, part in apart.items():
        merged, active = set(_merged(part)), set(_active(part))
        if getattr(part, "disable_adapters", False):
            raise WeightSyncError(
                f"the adapters of {name} are disabled; nothing was changed. Enable them before the push"
            )
        if not merged <= active:
            raise WeightSyncError(
                f"adapters {sorted(merged)} of {name} are merged and {sorted(active)} are active; nothing was changed. "
                "Call unmerge_adapter(), then push, or merge_adapter() with the active ones"
            )
        if hasattr(part, "unload_and_optionally_merge_module"):
            raise WeightSyncError(f"{name} is a {type(part).__name__}, which merges only as it is unloaded; {both}")


def _is_merged(layer: object) -> bool:
    """Return whether all active adapters of the layer, and no others, are merged into its base weights."""
    return set(_active(layer)) == set(_merged(layer))


def _merged(layer: object) -> list[str]:
    merged: list[str] = getattr(layer, "merged_adapters", [])
    return merged


def _active(part: object) -> list[str]:
    active: str | list[str] = getattr(part, "active_adapters", None) or getattr(part, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _owner(name: str, layers: Container[str]) -> str | None:
    """Return the name of the layer that ``name`` is within."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return None


def _without_hooks(layer: nn.Module) -> dict[int, object]:
    """Return deepcopy's memo with empty hooks: a hook may refer to the whole model."""
    hooks: Iterable[object] = (
        held for part in layer.modules() for name, held in vars(part).items() if name.endswith("_hooks")
    )
    return {id(held): type(held)() for held in hooks if isinstance(held, dict)}
