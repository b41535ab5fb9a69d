"""Serving for long: memory, threads and descriptors that grow with requests, and an event loop that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.memory_use import check_steady, descriptors_of, held_bytes, threads_of
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, until_idle, until_running

ROUNDS: Final = 4
"""Rounds of requests between two measurements."""
ROOM: Final = 48 * 1024
"""Bytes by which one round may leave more memory held: allocators' own. A round makes some 14 requests."""
LONGEST: Final = 0.5
"""Seconds for which a request may hold the trainer's event loop."""


@case()
async def requests_leave_nothing_behind(bench: Bench) -> None:
    """Batches, streams, aborted, cancelled and refused requests leave no memory, thread or descriptor behind."""
    prompts = bench.prompts(4)

    async def held_after_some() -> dict[str, int]:
        for _ in range(ROUNDS):
            await _requests_of_every_kind(bench, prompts)
        return await _held(bench.engine)

    await held_after_some()  # caches of all sorts fill at first
    # Pools take a thread more now and then. A leak takes one with every round.
    room = {"bytes of memory": ROUNDS * ROOM, "bytes of KV cache": 0, "threads": 1, "descriptors": 1}
    await check_steady(held_after_some, room, f"{ROUNDS} rounds of requests")


@case()
async def requests_do_not_hold_the_event_loop(bench: Bench) -> None:
    """While requests of every kind are served, and long ones are refused, the trainer's event loop goes on."""
    prompts = bench.prompts(4)
    await _requests_of_every_kind(bench, prompts)
    too_long: tuple[str | range, ...] = ("a " * 500_000, range(10**9))
    async with check_it_runs(LONGEST):
        await _requests_of_every_kind(bench, prompts)
        for prompt in too_long:
            with refused(InvalidRequest, field="prompts", naming="context length"):
                await bench.engine.generate(prompt)


async def _requests_of_every_kind(bench: Bench, prompts: Sequence[list[int]]) -> None:
    engine = bench.engine
    await engine.generate(prompts, SamplingParams(n=2, max_new_tokens=3))
    with refused(InvalidRequest):
        await engine.generate([])
    cancelled = await until_running(engine, 1, lambda: engine.generate(prompts[0], bench.long()))
    cancelled.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    if bench.claims(Capability.STREAMING):
        async with aclosing(engine.generate_stream(prompts[1], bench.long(64))) as closed_early:
            await anext(closed_early)
        async for _ in engine.generate_stream(prompts[1], SamplingParams(max_new_tokens=3)):
            pass
    if bench.claims(Capability.ABORT):
        async with bench.in_flight([prompts[2]], bench.long(), tokens=0.0, request_ids=["aborted"]) as aborted:
            await engine.abort("aborted")
            await aborted


async def _held(engine: InferenceEngine) -> dict[str, int]:
    """Bytes, threads and descriptors of the processes of an engine that has nothing to do."""
    await until_idle(engine)
    return {
        "bytes of memory": held_bytes(engine),
        "bytes of KV cache": (await engine.stats()).kv_cache_bytes,
        "threads": threads_of(engine),
        "descriptors": descriptors_of(engine),
    }
