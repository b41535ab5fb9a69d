"""Record the experts that the layers of a mixture are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from drivetrain.errors import EngineInternalError

_CHOICES: Final = ("top_k_index", "router_indices", "selected_experts")
"""Names of the parameter of an experts module's ``forward`` that holds the chosen experts, by model."""


class ExpertChoices:
    """Records the experts that each token is given to, layer by layer."""

    def __init__(self, module: nn.Module) -> None:
        found = ((layer, _parameter(layer)) for layer in module.modules())
        self._layers = [(layer, *parameter) for layer, parameter in found if parameter is not None]

    def __bool__(self) -> bool:
        """Return whether the model has layers whose choices can be seen."""
        return bool(self._layers)

    @contextmanager
    def recorded(self, rows: int) -> Iterator[list[torch.Tensor]]:
        """Record one forward pass of so many rows.

        Yields:
            A list that gets each layer's experts, of shape (rows, tokens, experts per token).
        """
        chosen: list[torch.Tensor] = []
        with ExitStack() as hooks:
            for layer, name, position in self._layers:

                def keep(
                    _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name, at: int = position
                ) -> None:
                    ids: torch.Tensor = named[name] if name in named else given[at]
                    chosen.append(ids.reshape(rows, -1, ids.shape[-1]))

                hooks.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield chosen
        if len(chosen) != len(self._layers):
            raise EngineInternalError(f"{len(self._layers)} layers have experts, and {len(chosen)} called them once")


def _parameter(layer: nn.Module) -> tuple[str, int] | None:
    """Return the name and the position of the parameter that holds the chosen experts, if there is one."""
    names = list(inspect.signature(layer.forward).parameters)
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)
