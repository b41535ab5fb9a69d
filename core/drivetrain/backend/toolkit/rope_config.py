"""Checks of rotary embeddings whose frequencies depend on sequence length, from a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

from drivetrain.errors import EngineStartError, InvalidConfig

_TWO_SETS: Final = ("longrope", "su")


def short_rope_length(fields: Mapping[str, object]) -> int | None:
    """Return the length up to which longrope uses its short factors; None: the model has one set of frequencies.

    A longer sequence uses the long factors for all of its tokens.

    Args:
        fields: Fields of the model's ``config.json``, or of its text part.
    """
    for rope in _ropes(fields):
        if _kind(rope) in _TWO_SETS:
            own = rope.get("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
            if isinstance(own, int):
                return own
    return None


def plain_rope(fields: Mapping[str, object], *, nested: bool) -> dict[str, object]:
    """Return configuration overrides that turn a dynamic rotary embedding into a plain one.

    Within the context length transformers does not scale a dynamic embedding. Engines that scale it at every length
    would give wrong results.

    Args:
        fields: As for :func:`short_rope_length`.
        nested: True if the fields belong to ``text_config``.

    Returns:
        Fields to override; empty if the rotary embedding is not dynamic.
    """
    dynamic = [rope for rope in _ropes(fields) if _kind(rope) == "dynamic" and "alpha" not in rope]
    if not dynamic:
        return {}
    kept = {name: dynamic[0][name] for name in ("rope_theta", "partial_rotary_factor") if name in dynamic[0]}
    if "rope_theta" not in kept and "rope_theta" in fields:
        kept["rope_theta"] = fields["rope_theta"]
    plain: dict[str, object] = {"rope_parameters": {"rope_type": "default", **kept}}
    return {"text_config": plain} if nested else plain


def require_short_rope(context_length: int, fields: Mapping[str, object], engine: str) -> None:
    """Raise if sequences could need different longrope frequencies, which ``engine`` cannot choose per row.

    Args:
        context_length: Maximum number of tokens, prompt and output together.
        fields: As for :func:`short_rope_length`.
        engine: Name of the engine.

    Raises:
        InvalidConfig: The context is too long; the message names the longest length that works.
    """
    short = short_rope_length(fields)
    if short is not None and context_length > short:
        raise InvalidConfig(
            f"context_length={context_length}: this model's rotary embedding (longrope) has other frequencies for "
            f"sequences of more than {short} tokens, and {engine} takes one set for all sequences of a batch, so that "
            f"answers would be wrong; give context_length={short} or less, or use the transformers backend",
            field="context_length",
        )


def require_plain_rope(fields: Mapping[str, object], overridden: bool, server: str) -> None:
    """Raise if a server scales a dynamic rotary embedding at every length.

    Args:
        fields: As for :func:`short_rope_length`.
        overridden: True if the server was launched with another rotary embedding than in ``fields``.
        server: Name of the server.

    Raises:
        EngineStartError: The server would scale it; the message gives the override to launch it with.
    """
    plain = plain_rope(fields, nested=False)
    if plain and not overridden:
        raise EngineStartError(
            f"this model's rotary embedding (dynamic) is scaled beyond the context length only, and {server} scales it "
            f"at every length, so that answers would be wrong; launch it with its configuration overridden by "
            f"{json.dumps(plain)}"
        )


def _ropes(fields: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the configuration's rotary embeddings: one, or one per layer type."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling")
    if not isinstance(given, Mapping):
        return
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]


def _kind(rope: Mapping[str, object]) -> object:
    return rope.get("rope_type", rope.get("type"))
