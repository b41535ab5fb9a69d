"""Deterministic results: every row is computed alone, in forward passes whose shapes depend on its own tokens only.

Rounding depends on the shapes of a forward pass. With ``deterministic=True`` a prompt is computed in chunks that begin
at multiples of a fixed length, and each later token in a pass of its own. A cached prefix ends where a chunk begins. A
retracted row computes its prompt in the same chunks again, and then its generated tokens one at a time. So each number
comes from the same passes over the same values, beside any other work of the engine.
"""

from __future__ import annotations

from typing import Final

from torch import nn

from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig
from drivetrain_transformers.longrope import rope_types
from drivetrain_transformers.model import LoadedModel

CHUNK: Final = 128
"""Most prompt tokens of one forward pass, and the length in whose multiples prefixes are cached."""


def chunk_of(model: LoadedModel, config: EngineConfig) -> int | None:
    """Return the length of a deterministic engine's chunks; None if rows may share forward passes.

    Longrope models choose their factors by a row's whole length, and some recurrent ones run what follows a cached
    prefix token by token. Their prompts are one chunk.

    Raises:
        InvalidConfig: the model keeps values of earlier requests.
    """
    if not config.deterministic:
        return None
    _refuse_dynamic_rope(model.module)
    if model.short_length is not None or not model.continues:
        return model.info.context_length
    return min(CHUNK, config.max_num_batched_tokens or CHUNK)


def _refuse_dynamic_rope(module: nn.Module) -> None:
    kinds = {kind for part in module.modules() for kind in rope_types(part).values()}
    if any("dynamic" in kind for kind in kinds):
        raise InvalidConfig(
            f"deterministic=True: {type(module).__name__} has rope_type='dynamic', whose frequencies stay those of the "
            "longest sequence so far; leave deterministic out, or give a model with another rope_type",
            field="deterministic",
        )
