"""Sampling params that float32 or int32 cannot hold, or that allow no token, are refused by name."""

from __future__ import annotations

import json

import pytest

from drivetrain import InvalidRequest, ModelInfo, SamplingParams
from drivetrain.engine.validation import check_sampling_params, check_some_token_is_left

INFO = ModelInfo(8, 64, (7,), "float32", "tiny", 1, "cpu")


@pytest.mark.parametrize("value", [0.0, 1e-6, 1.0, 1e30])
def test_temperatures_at_the_bounds_are_taken(value: float) -> None:
    assert check_sampling_params({"temperature": value}).temperature == value


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.org/schema.json"},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"anyOf": [{"type": "null"}, {"$ref": "other.json#/x"}]},
    ],
)
def test_a_reference_that_leads_out_of_a_schema_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref"):
        check_sampling_params({"structured_output": {"kind": "json_schema", "json_schema": json.dumps(schema)}})


def test_references_within_a_schema_are_taken() -> None:
    schema = {
        "$defs": {"a": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/a"}, "enum": {"enum": ["$ref"]}},
    }
    check_sampling_params({"structured_output": {"kind": "json_schema", "json_schema": json.dumps(schema)}})


def test_a_mask_of_stop_ids_alone_contradicts_min_new_tokens() -> None:
    mask = {"kind": "action_mask", "allowed_token_ids": [5, 7]}
    params = SamplingParams.model_validate({"logit_processors": [mask], "min_new_tokens": 2, "stop_token_ids": [5]})
    with pytest.raises(InvalidRequest, match="min_new_tokens=2"):
        check_some_token_is_left(params, (5, 7), INFO)
    check_some_token_is_left(params, (7,), INFO)


def test_a_ban_of_the_whole_vocabulary_is_refused() -> None:
    ban = {"kind": "disallowed_tokens", "token_ids": list(range(8))}
    params = SamplingParams.model_validate({"logit_processors": [ban]})
    with pytest.raises(InvalidRequest, match="whole vocabulary"):
        check_some_token_is_left(params, (), INFO)
