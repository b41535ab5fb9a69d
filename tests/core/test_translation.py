"""Translation helpers that all backends share."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from drivetrain import EngineConfig, InvalidConfig, InvalidRequest, VersionSpan
from drivetrain.backend.toolkit.translation import (
    as_slice,
    context_length_of,
    eos_token_ids,
    require_experts,
    shortened,
    version_spans,
    with_engine_kwargs,
)
from drivetrain.testing import tiny_model


@pytest.mark.parametrize(
    ("ends", "spans"),
    [
        ([("c", math.inf)], [VersionSpan("c", 0, 3)]),
        ([("a", 1), ("c", math.inf)], [VersionSpan("a", 0, 1), VersionSpan("c", 1, 3)]),
        ([("a", 0), ("c", math.inf)], [VersionSpan("c", 0, 3)]),
        ([("a", 3), ("c", math.inf)], [VersionSpan("a", 0, 3)]),
        ([("a", math.inf), ("c", math.inf)], [VersionSpan("a", 0, 3)]),
        (
            [("a", 1), ("b", 2), ("c", math.inf)],
            [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2), VersionSpan("c", 2, 3)],
        ),
        ([("a", 1), ("b", 1), ("c", math.inf)], [VersionSpan("a", 0, 1), VersionSpan("c", 1, 3)]),
        ([("a", 1), ("c", 2), ("c", math.inf)], [VersionSpan("a", 0, 1), VersionSpan("c", 1, 3)]),
    ],
)
def test_each_version_made_what_was_there_when_it_was_replaced(
    ends: list[tuple[str, float]], spans: list[VersionSpan]
) -> None:
    assert version_spans(ends, 3) == spans


def test_engine_kwargs_replace_defaults_and_nothing_else() -> None:
    config = EngineConfig.from_mapping({"backend": "b", "model": "m", "engine_kwargs": {"block_size": 64}})
    assert with_engine_kwargs(config, {"model": "m"}, {"block_size": 32}) == {"model": "m", "block_size": 64}
    with pytest.raises(InvalidConfig, match="block_size"):
        with_engine_kwargs(config, {"block_size": 16}, {})
    with pytest.raises(InvalidConfig, match="block_size, which would have no effect: leave it out"):
        with_engine_kwargs(config, {}, {}, {"block_size": "leave it out"})


def test_a_context_is_no_longer_than_the_models() -> None:
    assert context_length_of(64, None) == 64
    assert context_length_of(64, 32) == 32
    with pytest.raises(InvalidConfig, match="context_length=65"):
        context_length_of(64, 65)


def test_a_shortened_embedding_has_length_one() -> None:
    assert shortened([3.0, 4.0, 12.0], 2) == pytest.approx([0.6, 0.8])
    with pytest.raises(InvalidRequest, match="dimensions=4"):
        shortened([3.0, 4.0, 12.0], 4)


@pytest.mark.parametrize(("architecture", "has_experts"), [("qwen2", False), ("llama", False), ("qwen3_moe", True)])
def test_experts_are_spread_only_of_a_model_that_has_some(architecture: str, has_experts: bool) -> None:
    fields = json.loads((tiny_model(architecture) / "config.json").read_text())
    require_experts(EngineConfig(backend="some", model="m"), fields)
    spread = EngineConfig(backend="some", model="m", tensor_parallel_size=2, expert_parallel_size=2)
    with nullcontext() if has_experts else pytest.raises(InvalidConfig, match="no experts to spread"):
        require_experts(spread, fields)


def test_eos_ids_are_those_that_any_source_names() -> None:
    none, one, two = (SimpleNamespace(eos_token_id=named) for named in (None, 3, [4, 3, 5]))
    assert eos_token_ids(none, one) == (3,)
    assert eos_token_ids(two, none, one, object()) == (4, 3, 5)
    assert eos_token_ids(none) == ()
    assert eos_token_ids({"eos_token_id": [4, 3]}, {"eos_token_id": 5}, {}) == (4, 3, 5)


@pytest.mark.parametrize("numbers", [[], [3], [2, 3, 4], [4, 3, 2], [2, 4], [1, 1]])
def test_a_slice_selects_the_same_as_its_numbers(numbers: list[int]) -> None:
    every = list(range(6))
    index = as_slice(numbers)
    assert (every[index] if isinstance(index, slice) else [every[number] for number in index]) == numbers
    assert isinstance(index, slice) == (numbers in ([3], [2, 3, 4]))
