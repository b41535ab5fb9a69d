"""Longrope per row: transformers would use the frequencies of a batch's longest row for all rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drivetrain.errors import EngineStartError

CosSin = tuple[torch.Tensor, torch.Tensor]


def choose_factors_by_row(module: PreTrainedModel, short_length: int) -> None:
    """Make each row of a batch use the factors for its own length: short ones up to ``short_length`` tokens.

    Raises:
        EngineStartError: the model's rotary embedding has an unknown form.
    """
    found = [part for part in module.modules() if "longrope" in rope_types(part).values()]
    for rotary in found:
        # Older releases of transformers wrap forward in two decorators, one of them torch.no_grad.
        plain = inspect.unwrap(type(rotary).forward)
        if plain is type(rotary).forward:
            found = []
            break
        rotary.forward = _by_row(rotary, plain, short_length)
    if not found:
        raise EngineStartError(
            f"{type(module).__name__} has longrope in a form that the transformers backend cannot apply per row; "
            f"give context_length={short_length} or less, for which one set of factors serves all rows"
        )


def rope_types(part: nn.Module) -> dict[str | None, str]:
    """Return the rope types of a module by layer type; empty if it is no rotary embedding."""
    types = getattr(part, "rope_type", None)
    if isinstance(types, str):
        return {None: types}
    return dict(types) if isinstance(types, dict) else {}


def _by_row(rotary: nn.Module, plain: Callable[..., CosSin], short_length: int) -> Callable[..., CosSin]:
    types = rope_types(rotary)
    longs: dict[str | None, torch.Tensor] = {}

    def frequencies(layer_type: str | None, device: torch.device) -> tuple[str, torch.Tensor, torch.Tensor]:
        prefix = "" if layer_type is None else f"{layer_type}_"
        if layer_type not in longs:
            given = {} if layer_type is None else {"layer_type": layer_type}
            init = ROPE_INIT_FUNCTIONS["longrope"]
            longs[layer_type] = init(rotary.config, device, seq_len=short_length + 1, **given)[0]
        return f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").to(device), longs[layer_type]

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> CosSin:
        given = {} if layer_type is None else {"layer_type": layer_type}
        if types[layer_type] != "longrope":
            return plain(rotary, x, position_ids, **given)
        name, *sets = frequencies(layer_type, x.device)
        made = []
        for chosen in sets:
            setattr(rotary, name, chosen)
            made.append(plain(rotary, x, position_ids, **given))
        # A row's length is its last position plus one.
        is_long = (position_ids.amax(-1) >= short_length)[:, None, None]
        (short_cos, short_sin), (long_cos, long_sin) = made
        return torch.where(is_long, long_cos, short_cos), torch.where(is_long, long_sin, short_sin)

    return forward
