"""Read an adapter as a push sends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from drivetrain.checks.extras import from_extra
from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain_weight_sync.shards.pieces import is_sharded
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.trainer.held_policy import held_policy

if TYPE_CHECKING:
    from pydantic import JsonValue

    from drivetrain_weight_sync.trainer.source import Actor


_Holder = tuple[list[str], nn.Module]
"""Attributes that lead to a tensor from peft's container of all adapters of a layer, and that container."""


class PushedAdapter(Protocol):
    """An adapter that a trainer changes between pushes."""

    @property
    def config(self) -> Mapping[str, JsonValue]: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """A LoRA adapter of a trainer that does not use peft. Every push sends the tensors' values at that time.

    If the tensors are DTensors, every rank pushes together, as from a peft model that is sharded.
    """

    config: Mapping[str, JsonValue]
    """Fields of peft's ``adapter_config.json``; ``peft_type`` must be ``"LORA"``."""
    tensors: Mapping[str, torch.Tensor]
    """By the names that peft gives them in a folder: ``base_model.model.LAYER.lora_A.weight`` ``[rank, inputs]`` and
    ``base_model.model.LAYER.lora_B.weight`` ``[outputs, rank]``."""


class PeftAdapter:
    """One adapter of a peft model.

    Args:
        model: The model, or a module or another object that holds it. It is looked for once.
        name: The adapter's name.

    Raises:
        InvalidRequest: the model has no adapter of that name, or holds several peft models.
    """

    def __init__(self, model: nn.Module | Actor, name: str) -> None:
        peft_model = _peft_model_in(held_policy(model, "model"))
        adapters = getattr(peft_model, "peft_config", None)
        if not isinstance(adapters, dict) or name not in adapters:
            found = ", ".join(adapters) if isinstance(adapters, dict) else "none, and it is no peft model"
            raise InvalidRequest(f"the model has no adapter {name!r}; it has: {found}", field="adapter")
        self._model = peft_model
        self._name = name
        self._found: tuple[Mapping[str, JsonValue], dict[str, _Holder]] | None = None
        """The adapter's configuration, and what holds each of its tensors, when they were looked up."""

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Fields of ``adapter_config.json``, less those at their default, which an older peft may not know.

        Raises:
            WeightSyncError: the adapter was deleted.
        """
        config: Any = self._model.peft_config.get(self._name)
        if config is None:
            raise WeightSyncError(f"the model has no adapter {self._name!r} any more; connect one that it has")
        return adapter_fields(config.to_dict(), type(config)().to_dict())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The adapter's tensors by peft's names, in the model's memory. Those of a sharded model are DTensors.

        Raises:
            WeightSyncError: the adapter was deleted.
        """
        # peft walks through the state of the whole model, which takes tens of milliseconds in a deep one.
        config, model = self.config, self._model
        if self._found is None or self._found[0] != config:
            state = self._state()
            if any(is_sharded(tensor) for tensor in state.values()):
                return state  # empty shards of several tensors have one address
            paths = {_place(parameter): path for path, parameter in model.named_parameters() if ".lora_" in path}
            held = {name: paths[_place(tensor)] for name, tensor in state.items() if _place(tensor) in paths}
            found = {name: _holder(model, path) for name, path in held.items()}
            self._found = (config, found) if len(found) == len(state) else None
            return state
        return {name: _held_by(holder).detach() for name, holder in self._found[1].items()}

    @torch.no_grad()
    def _state(self) -> dict[str, torch.Tensor]:
        with from_extra("lora", "LoraSync"):
            from peft import get_peft_model_state_dict

        # By default peft also returns the base embedding if the adapter targets it.
        state = get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in cast("Mapping[str, torch.Tensor]", state).items()}


def adapter_fields(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return the fields of ``adapter_config.json``, less those at their default, which an older peft may not know.

    Args:
        given: The fields of a peft configuration, as its ``to_dict`` returns them.
        defaults: The same of a configuration without arguments.
    """
    fields, usual = _as_json(given), _as_json(defaults)
    return {
        field: value
        for field, value in fields.items()
        if field in ("peft_type", "r", "lora_alpha") or field not in usual or value != usual[field]
    }


def _peft_model_in(model: Any) -> Any:
    """Return the peft model that ``model`` wraps; ``model`` if there is none.

    Raises:
        InvalidRequest: there are several, and none of them holds the others.
    """
    if "peft" not in sys.modules or not isinstance(model, nn.Module):
        return model
    from peft import PeftModel

    if isinstance(model, PeftModel):
        return model
    found: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, PeftModel) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = part
    if len(found) > 1:
        raise InvalidRequest(
            f"model is a {type(model).__name__} with several peft models ({listed(found)}); pass the one whose adapter "
            "the engine serves",
            field="model",
        )
    return next(iter(found.values()), model)


def _holder(model: nn.Module, path: str) -> _Holder:
    layer, _, rest = path.partition(".lora_")
    container, *attributes = rest.split(".")
    return attributes, model.get_submodule(f"{layer}.lora_{container}")


def _held_by(holder: _Holder) -> torch.Tensor:
    attributes, container = holder
    return cast("torch.Tensor", reduce(getattr, attributes, container))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _as_json(fields: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return the fields as they are once written to a file and read again."""
    decoded: dict[str, JsonValue] = json.loads(json.dumps(fields, default=_plain))
    return decoded


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value))
    raise TypeError(f"{type(value).__name__} cannot be written to adapter_config.json")
