"""Configuration fields that an engine has no equivalent for are refused by name, unless they ask for nothing."""

from __future__ import annotations

import pytest

from drivetrain import Capability, EngineConfig
from drivetrain.engine.config_checks import check_config
from drivetrain.errors import InvalidConfig

CACHES = frozenset({Capability.PREFIX_CACHE})


def check(can: frozenset[Capability], **fields: object) -> None:
    check_config(EngineConfig.from_mapping({"backend": "plain", "model": "m", **fields}), {}, can)


@pytest.mark.parametrize(
    ("can", "fields"),
    [
        (frozenset(), {"enable_prefix_caching": False}),
        (frozenset(), {"enable_prefix_caching": True}),
        (frozenset(), {"enable_sleep": False}),
        (CACHES, {"enable_sleep": False, "max_loras": 2, "max_lora_rank": 8, "deterministic": False}),
        (CACHES | {Capability.LORA}, {"enable_lora": False, "max_loras": 2}),
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(can: frozenset[Capability], fields: dict[str, object]) -> None:
    check(can, **fields)


@pytest.mark.parametrize(
    ("can", "fields", "named"),
    [
        (CACHES, {"enable_prefix_caching": False}, "enable_prefix_caching=False"),
        (CACHES | {Capability.LORA}, {"enable_lora": True, "max_loras": 2}, "max_loras=2"),
        (CACHES, {"max_num_seqs": 3}, "max_num_seqs=3"),
    ],
)
def test_a_field_that_asks_for_something_is_refused(
    can: frozenset[Capability], fields: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"{named}: the plain backend has no equivalent"):
        check(can, **fields)


@pytest.mark.parametrize("task", ["embed", "reward"])
def test_adapters_are_refused_where_no_call_takes_one(task: str) -> None:
    can = frozenset({Capability.EMBED, Capability.REWARD_SCORE, Capability.LORA})
    with pytest.raises(InvalidConfig, match=f"enable_lora=True: no call of an engine with task='{task}'"):
        check(can, enable_lora=True, task=task)
