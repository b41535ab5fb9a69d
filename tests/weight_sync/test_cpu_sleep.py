"""Memory on a CPU that sleeps and wakes up as a whole, also if memory runs out half-way."""

from __future__ import annotations

import pytest
import torch

from drivetrain.types.modes import MemoryTag
from drivetrain_weight_sync.receiver.cpu_sleep import HostMemory
from scarce_memory import no_more_memory_than

WEIGHTS, CACHE = frozenset({MemoryTag.WEIGHTS}), frozenset({MemoryTag.KV_CACHE})
LARGE = 64 << 20
"""Bytes of a storage that the C library maps, and returns when it is freed."""


def storages(count: int) -> list[torch.UntypedStorage]:
    return [torch.ones(LARGE, dtype=torch.uint8).untyped_storage() for _ in range(count)]


def sizes(*held: list[torch.UntypedStorage]) -> list[int]:
    return [storage.nbytes() // LARGE for one in held for storage in one]


def test_memory_that_wakes_up_half_way_sleeps_on_and_wakes_up_later() -> None:
    weights, cache = storages(3), storages(1)
    memory = HostMemory({MemoryTag.WEIGHTS: weights, MemoryTag.KV_CACHE: cache})
    memory.free(WEIGHTS | CACHE)
    memory.wake_up(CACHE)
    for _ in range(2):
        with no_more_memory_than(LARGE * 3 // 2), pytest.raises(RuntimeError, match="allocate memory"):
            memory.wake_up(WEIGHTS)
        assert sizes(weights, cache) == [0, 0, 0, 1]
        memory.free(WEIGHTS)
    memory.wake_up(WEIGHTS)
    assert sizes(weights, cache) == [1, 1, 1, 1]


def test_two_kinds_of_memory_that_wake_up_together_both_sleep_on() -> None:
    weights, cache = storages(1), storages(1)
    memory = HostMemory({MemoryTag.WEIGHTS: weights, MemoryTag.KV_CACHE: cache})
    memory.free(WEIGHTS | CACHE)
    with no_more_memory_than(LARGE * 3 // 2), pytest.raises(RuntimeError, match="allocate memory"):
        memory.wake_up(WEIGHTS | CACHE)
    assert sizes(weights, cache) == [0, 0]
    memory.wake_up(WEIGHTS | CACHE)
    assert sizes(weights, cache) == [1, 1]


def test_memory_that_cannot_be_freed_is_not_freed_in_part() -> None:
    fixed = torch.frombuffer(bytearray(LARGE), dtype=torch.uint8).untyped_storage()
    weights = [*storages(1), fixed]
    memory = HostMemory({MemoryTag.WEIGHTS: weights})
    with pytest.raises(RuntimeError, match="1 storages of weights cannot be resized, and nothing was freed"):
        memory.keep(WEIGHTS)
    assert sizes(weights) == [1, 1]
