"""Detect rotary embeddings that depend on length from a model's configuration."""

from __future__ import annotations

import pytest

from drivetrain.backend.toolkit.rope_config import plain_rope, require_short_rope, short_rope_length
from drivetrain.errors import InvalidConfig

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [8.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, None),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_parameters": DYNAMIC}, None),
        ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}}, 64),
        ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"full": {**LONGROPE, "original_max_position_embeddings": 64}, "local": DYNAMIC}}, 64),
    ],
)
def test_where_short_factors_end(fields: dict[str, object], length: int | None) -> None:
    assert short_rope_length(fields) == length


def test_an_engine_with_one_set_of_factors_serves_short_sequences_only() -> None:
    fields: dict[str, object] = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}}
    require_short_rope(64, fields, "Engine")
    require_short_rope(4096, {"rope_parameters": DYNAMIC}, "Engine")
    with pytest.raises(InvalidConfig, match=r"longrope.*more than 64 tokens, and Engine .*give context_length=64"):
        require_short_rope(65, fields, "Engine")


def test_a_dynamic_one_is_plain_within_the_context() -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert plain_rope({"rope_parameters": DYNAMIC}, nested=False) == plain
    assert plain_rope({"rope_parameters": DYNAMIC}, nested=True) == {"text_config": plain}
    assert plain_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e5}, nested=False) == plain
    assert plain_rope({"rope_parameters": {**DYNAMIC, "alpha": 1000.0}}, nested=False) == {}
    assert plain_rope({"rope_parameters": LONGROPE}, nested=False) == {}
