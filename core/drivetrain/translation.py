"""What backends have in common when they translate to and from an engine's words. Pure functions over plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.config import EngineConfig
from drivetrain.errors import InvalidConfig, InvalidRequest
from drivetrain.outputs import VersionSpan


def with_engine_kwargs(
    config: EngineConfig, relied_on: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The engine's arguments: the backend's defaults, what ``engine_kwargs`` says instead, and what is relied on.

    Raises:
        InvalidConfig: ``engine_kwargs`` sets what the configuration has a field for, or what the backend relies on.
    """
    both = sorted(relied_on.keys() & config.engine_kwargs.keys())
    if both:
        raise InvalidConfig(
            f"engine_kwargs holds {', '.join(both)}, which the backend sets itself; use the fields of the "
            "configuration, or leave it out",
            field="engine_kwargs",
        )
    return {**defaults, **relied_on, **config.engine_kwargs}


def spreads_experts(config: EngineConfig) -> bool:
    """Whether each rank of the engine is to hold whole experts, where it would hold a part of each.

    Raises:
        InvalidConfig: they are to be spread over some of the ranks only.
    """
    experts, ranks = config.expert_parallel_size, config.tensor_parallel_size
    if experts not in (1, ranks):
        raise InvalidConfig(
            f"expert_parallel_size={experts} with tensor_parallel_size={ranks}: experts are spread over all ranks of "
            "the engine or over none; give both the same size, or leave it out",
            field="expert_parallel_size",
        )
    return experts > 1


def require_experts(config: EngineConfig, fields: Iterable[str]) -> None:
    """Raise :class:`InvalidConfig` if experts are to be spread over ranks and the model has none.

    Args:
        config: The configuration.
        fields: Names of the fields of the model's own ``config.json``; a mixture's say how many experts there are.
    """
    if config.expert_parallel_size > 1 and not any("expert" in field for field in fields):
        raise InvalidConfig(
            f"expert_parallel_size={config.expert_parallel_size}: the model has no experts to spread; leave it out",
            field="expert_parallel_size",
        )


def context_length_of(own: int, configured: int | None) -> int:
    """Most tokens of prompt and output together: the configured limit, or the model's own.

    Raises:
        InvalidConfig: more is asked for than the model has.
    """
    if configured is None:
        return own
    if configured > own:
        raise InvalidConfig(
            f"context_length={configured} is more than the model's {own}; lower it or leave it out",
            field="context_length",
        )
    return configured


def version_spans(ends: Iterable[tuple[str, float]], count: int) -> list[VersionSpan]:
    """The spans of a sample of ``count`` tokens, of versions and how many tokens there were at the end of each."""
    found: list[VersionSpan] = []
    for version, replaced in ends:
        begin, end = found[-1].end if found else 0, int(min(replaced, count))
        if end <= begin:
            continue
        if found and found[-1].version == version:
            begin = found.pop().start
        found.append(VersionSpan(version, begin, end))
    return found


def shortened(vector: list[float], dimensions: int) -> list[float]:
    """The first numbers of an embedding, at length 1 again, as Matryoshka models are used.

    Raises:
        InvalidRequest: it has fewer.
    """
    if dimensions > len(vector):
        raise InvalidRequest(
            f"dimensions={dimensions} is more than the model's {len(vector)}; ask for fewer", field="dimensions"
        )
    kept = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in kept)) or 1.0
    return [value / norm for value in kept]
