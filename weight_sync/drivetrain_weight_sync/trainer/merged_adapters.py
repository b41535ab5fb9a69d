"""Weights of a peft model with its adapters merged, under their checkpoint names."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Container, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.tensors.checkpoint_names import base_name, unwrapped
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
        adapted = AdaptedModule.of(module)
        if adapted is None:
            return pairs
        kept: list[tuple[str, torch.Tensor]] = []
        for name, tensor in pairs:
            own = adapted.base_name(name)
            if own is not None:
                owner = adapted.owner(name)
                kept.append((own, tensor if owner is None else self._stand_in(tensor, name, owner, adapted)))
        return kept

    def _stand_in(self, tensor: torch.Tensor, name: str, owner: str, adapted: AdaptedModule) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        path = unwrapped(name).removeprefix(f"{owner}.")
        self._stand_ins[storage_of(made)] = made, owner, adapted.unmerged[owner], path
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


class AdaptedModule:
    """A module with adapters of peft: which tensors of its state dict are base weights, and which layers to merge.

    Names may have wrappers' prefixes.

    Raises:
        WeightSyncError: an adapter is not merged and cannot be merged into a copy of its layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], saved: Mapping[str, nn.Module], *, tokens: bool) -> None:
        apart = {name: part for name, part in layers.items() if not _is_merged(part)}
        _require_mergeable(apart)
        self.unmerged = {name: part for name, part in apart.items() if _owner(name, apart) is None}
        """Outermost layers whose adapters are not merged, by name without wrappers' prefixes."""
        self._saved = saved
        self._added = {
            name
            for part in layers.values()
            for attribute in ("adapter_layer_names", "other_param_names")
            for name in getattr(part, attribute)
        }
        if tokens:
            self._added.discard("token_adapter")

    @classmethod
    def of(cls, module: nn.Module) -> AdaptedModule | None:
        """Look for adapters in ``module``; return None if there are none."""
        if "peft" not in sys.modules:
            return None
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        modules = {unwrapped(name): part for name, part in module.named_modules()}
        layers = {name: modules[name] for name, part in modules.items() if isinstance(part, BaseTunerLayer)}
        saved = {name: modules[name] for name, part in modules.items() if isinstance(part, ModulesToSaveWrapper)}
        tokens = any(isinstance(part, TrainableTokensWrapper) for part in modules.values())
        return cls(layers, saved, tokens=tokens) if layers or saved else None

    def owner(self, name: str) -> str | None:
        """Return the name of the layer that must be merged before this tensor of it is sent; None if there is none."""
        return _owner(unwrapped(name), self.unmerged)

    def base_name(self, name: str) -> str | None:
        """Return the checkpoint name of a tensor; None if the tensor is an adapter's, or another takes its place."""
        parts = unwrapped(name).split(".")
        if "original_module" in parts or not self._added.isdisjoint(parts):
            return None
        if "modules_to_save" in parts:
            place = parts.index("modules_to_save")
            if parts[place + 1] not in _active(self._saved[".".join(parts[:place])]):
                return None
            del parts[place : place + 2]
        return base_name(".".join(part for part in parts if part != "token_adapter"))

    def needed(self, pairs: Pairs) -> Pairs:
        """Return the tensors from which :meth:`merged` makes base weights, under the names that they have."""
        return [(name, tensor) for name, tensor in pairs if self.owner(name) or self.base_name(name)]

    def merged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return base weights by checkpoint name, merged where adapters are; the module is not changed.

        Args:
            tensors: Whole tensors of those that :meth:`needed` returns, all of a layer together. Merged tensors have
                memory of their own. Tensors on the meta device are named, and not merged.
        """
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if (owner := self.owner(name)) is not None:
                held.setdefault(owner, {})[unwrapped(name).removeprefix(f"{owner}.")] = tensor
        for owner, given in held.items():
            if any(tensor.is_meta for tensor in given.values()):
                held[owner] = {path: torch.empty_like(tensor) for path, tensor in given.items()}
                continue
            copied = _merged_copy(owner, self.unmerged[owner], given)
            held[owner] = {path: attrgetter(path)(copied).detach() for path in given}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            owner, own = self.owner(name), self.base_name(name)
            if own is not None:
                found[own] = tensor if owner is None else held[owner][unwrapped(name).removeprefix(f"{owner}.")]
        return found


@torch.no_grad()
def _merged_copy(name: str, layer: nn.Module, whole: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """Return a copy of a layer with all active adapters merged.

    Args:
        name: The layer's name.
        layer: The layer.
        whole: Values of tensors of which the layer holds a shard, by their path in the layer.

    Raises:
        WeightSyncError: peft cannot merge them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    copied = _copy_of(layer, whole or {})
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


def _require_mergeable(apart: Mapping[str, nn.Module]) -> None:
    """Raise if the unmerged adapters of a layer in ``apart`` cannot be merged into a copy of the layer."""
    both = (
        "call merge_adapter() before the push and unmerge_adapter() after it, or push the adapter alone with LoraSync"
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
        # A layer of target_parameters has its own way to unload nested ones, and merges in place as others do.
        if hasattr(part, "unload_and_optionally_merge_module") and not hasattr(part, "parameter_name"):
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


def _copy_of(layer: nn.Module, whole: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a deep copy of a layer without its hooks, with other values for the tensors in ``whole``."""
    # A hook may refer to the whole model, and FSDP2's state refers to process groups.
    memo: dict[int, object] = {
        id(held): type(held)()
        for part in layer.modules()
        for name, held in vars(part).items()
        if isinstance(held, dict) and (name.endswith("_hooks") or name.startswith("__composable_api"))
    }
    for path, tensor in whole.items():
        shard, made = attrgetter(path)(layer), tensor.clone()
        memo[id(shard)] = nn.Parameter(made, requires_grad=False) if isinstance(shard, nn.Parameter) else made
    # Modules of FSDP2 refuse copy.deepcopy, so copy what each module holds.
    copies = [(part, object.__new__(_plain_type(part))) for part in layer.modules()]
    memo |= {id(part): copied for part, copied in copies}
    for part, copied in copies:
        vars(copied).update(copy.deepcopy(vars(part), memo))
    return copies[0][1]


def _plain_type(part: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 put one of its own in the place."""
    kinds = type(part).__mro__
    names = [kind.__name__ for kind in kinds]
    found: type[nn.Module] = kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]
    return found
