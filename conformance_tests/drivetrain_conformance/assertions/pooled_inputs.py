"""Inputs of embeddings and rewards: long ones, batches of several forward passes, and that none is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from drivetrain_conformance.assertions.memory_use import check_steady, held_by
from drivetrain_conformance.harness.testbench import Bench

SHORT_CONTEXT: Final = 128
"""A configured ``context_length`` that is shorter than any model's."""
_LONGEST: Final = 1000
"""Tokens of a long input: several times what some libraries cut inputs to by default."""
_MANY: Final = 12
"""Long inputs of one call, which take more tokens than engines compute at once by default."""
_BATCH: Final = 64
_ROUNDS: Final = 2
_ROOM: Final = 64 * 1024
"""Bytes by which memory may grow with one batch: allocator overhead. Its vectors take some hundred thousand."""


def longest_input(bench: Bench) -> int:
    """Return the length of a long input that the engine takes, in tokens."""
    return min(bench.engine.model_info.context_length - 1, _LONGEST)


def many_lengths(bench: Bench) -> list[int]:
    """Return lengths of inputs that take several forward passes, in no order."""
    most = longest_input(bench)
    lengths = [most - place * most // (4 * _MANY) for place in range(_MANY)]
    bench.rng.shuffle(lengths)
    return lengths


async def check_inputs_leave_nothing(bench: Bench, pool: Callable[[list[list[int]]], Awaitable[object]]) -> None:
    """Raise if memory grows with the inputs that ``pool`` embeds or scores."""

    async def held_after_some() -> dict[str, int]:
        for _ in range(_ROUNDS):
            await pool(bench.prompts(_BATCH, 40))
        return await held_by(bench.engine)

    await held_after_some()  # the first round fills caches
    room = {"bytes of memory": _ROUNDS * _ROOM, "threads": 1, "descriptors": 1}
    await check_steady(held_after_some, room, f"{_ROUNDS * _BATCH} inputs that were embedded or scored")
