"""Inputs of embeddings and rewards: long ones, batches of several forward passes, and calls beside updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pause_and_sleep import PAUSE_CAPABILITY
from drivetrain.errors import InvalidConfig, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, held_by
from drivetrain_conformance.assertions.weight_checks import load_all
from drivetrain_conformance.assets.made_adapters import has_layers, make_adapter
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within

_T = TypeVar("_T")
SHORT_CONTEXT: Final = 128
"""A configured ``context_length`` that is shorter than any model's."""
_LONGEST: Final = 1000
"""Tokens of a long input: several times what some libraries cut inputs to by default."""
_MANY: Final = 12
"""Long inputs of one call, which take more tokens than engines compute at once by default."""
_BATCH: Final = 64
_ROUNDS: Final = 2
_CALLS: Final = 8
"""Further calls, of one input each, between two measurements: a leak may come with every few calls only."""
_UPDATES: Final = 4
"""Updates that are made, each while inputs are embedded or scored."""
_BOUND: Final = 120.0
"""Timeout, in seconds, of a call that waits for an update."""
_ROOM: Final = 64 * 1024
"""Bytes by which memory may grow with one batch, for the allocator; the vectors of a batch take several 100 kB."""


def longest_input(bench: Bench) -> int:
    """Return the length of a long input that the engine takes, in tokens."""
    return min(bench.engine.model_info.context_length - 1, _LONGEST)


def many_lengths(bench: Bench) -> list[int]:
    """Return lengths, in no order, of inputs that take several forward passes together."""
    most = longest_input(bench)
    lengths = [most - place * most // (4 * _MANY) for place in range(_MANY)]
    bench.rng.shuffle(lengths)
    return lengths


async def check_inputs_leave_nothing(bench: Bench, pool: Callable[[list[list[int]]], Awaitable[object]]) -> None:
    """Raise if memory grows with the inputs that ``pool`` embeds or scores."""

    async def held_after_some() -> dict[str, int]:
        for _ in range(_ROUNDS):
            await pool(bench.prompts(_BATCH, 40))
        for prompt in bench.prompts(_CALLS, 2):
            await pool([prompt])
        return await held_by(bench.engine)

    async for _ in after_other_calls(bench.engine):  # after these calls, later calls must not leak
        pass
    await held_after_some()  # the first round fills caches
    room = {"bytes of memory": _ROUNDS * _ROOM, **COUNTED}
    await check_steady(held_after_some, room, f"{_ROUNDS * _BATCH} inputs that were embedded or scored")


async def check_takes_no_adapter(bench: Bench, pool: Callable[[], Awaitable[_T]], off: Callable[[_T, _T], str]) -> None:
    """Raise unless adapters are refused, as no call that embeds or scores takes one, and change nothing.

    Args:
        bench: Its engine has a task other than generation.
        pool: Embeds or scores; the results before and after the refusals are compared.
        off: Says how results differ from expected ones; "" if they do not.
    """
    engine, targets = bench.engine, ("q_proj", "v_proj")
    said = ""
    try:
        bench.create(task=engine.config.task, enable_lora=True)
    except (InvalidConfig, UnsupportedCapability) as error:
        said = str(error)
    assert "enable_lora" in said, f"enable_lora=True was {f'refused without its name: {said}' if said else 'accepted'}"
    before, folder, missing = await pool(), bench.folder("adapter"), ""
    if has_layers(bench.model, targets):
        folder = make_adapter(bench.model, folder, seed=1, targets=targets).path
    try:
        await engine.load_lora_adapter("refused", str(folder))
    except UnsupportedCapability as error:
        missing = error.capability
    assert missing == Capability.LORA.value, f"an adapter was {f'refused for {missing}' if missing else 'accepted'}"
    difference = off(await pool(), before)
    assert not difference, f"after an adapter was refused: {difference}"


async def after_other_calls(engine: InferenceEngine) -> AsyncGenerator[str, None]:
    """Yield after each kind of call that may come before others: pauses, a sleep of the cache, a reset."""
    for mode, capability in PAUSE_CAPABILITY.items():
        if engine.supports(capability):
            await engine.pause_generation(mode)
            await engine.continue_generation()
            yield f"a pause in mode {mode.value}"
    if engine.supports(Capability.SLEEP_KV_CACHE):
        await engine.sleep([MemoryTag.KV_CACHE])
        await engine.wake_up([MemoryTag.KV_CACHE])
        yield "a sleep of the cache"
    if engine.supports(Capability.PREFIX_CACHE):
        await engine.reset_prefix_cache()
        yield "a reset of the prefix cache"


async def check_one_version(
    bench: Bench,
    pool: Callable[[list[list[int]]], Awaitable[list[_T]]],
    expect: Callable[[list[list[int]], Path], list[_T]],
    off: Callable[[list[_T], list[_T]], str],
    checkpoints: Sequence[tuple[Path, Path]],
) -> None:
    """Raise if a call mixes numbers of two weight versions when an update lands while it is under way.

    Args:
        bench: The bench, whose engine serves the first model.
        pool: Embeds or scores inputs.
        expect: Computes the numbers of inputs by a model.
        off: Says how numbers differ from those that were expected; "" if they do not.
        checkpoints: Two models, each as the folder of the model and the folder to load it from.
    """
    engine, inputs = bench.engine, [bench.prompt(length) for length in many_lengths(bench)]
    expected, times = [expect(inputs, model) for model, _ in checkpoints], 1
    for number in range(_UPDATES):
        _, folder = checkpoints[1 - number % 2]
        calling = asyncio.ensure_future(pool(times * inputs))
        await engine.load_weights_from_disk(str(folder), f"while-{number}")
        was_late = calling.done()
        async with within(seconds=_BOUND):
            numbers = await calling
        wrong = [off(numbers, times * of_model) for of_model in expected]
        assert not all(wrong), f"numbers of one call are of several weight versions: {wrong[0]}; {wrong[1]}"
        if was_late:  # the engine is so fast that the call had ended before the update
            times *= 2
    async with engine.weight_update(from_disk(checkpoints[1][1], "open")) as update:
        calling = asyncio.ensure_future(pool(inputs[:2]))
        await asyncio.sleep(0.05)
        await load_all(update)
    async with within(seconds=_BOUND):
        wrong_after = off(await calling, expected[1][:2])
    assert not wrong_after, f"a call in the middle of an update has numbers of other weights: {wrong_after}"
