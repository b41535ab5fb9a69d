"""Long service: memory, threads and descriptors do not grow with requests, and the event loop is not blocked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.sampling import JsonSchema, RegexGrammar, SamplingParams
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, held_by
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, until_idle, until_running

ROUNDS: Final = 4
"""Rounds of requests between two measurements."""
ROOM: Final = 48 * 1024
"""Bytes by which memory may grow in one round of about 14 requests: allocator overhead."""
_PARTS: Final = 250
_DRAWN_BY_GRAMMAR: Final = 12
_SAMPLES_BY_GRAMMAR: Final = 32
"""Tokens of a sample that a grammar constrains, and such samples between two measurements."""

_IDLE: Final = 0.05
"""Share of a core that an engine without requests may take of the trainer's process."""
_WINDOWS: Final = 4
_WINDOW: Final = 0.25
"""Seconds of one look at an idle process."""


@case(slow=True)
async def requests_leave_nothing_behind(bench: Bench) -> None:
    """Batches, streams, and aborted, cancelled and refused requests leak no memory, thread or descriptor.

    Nor do requests with a grammar, and sequences that are scored. None of them leaves mappings of files, or tasks or
    timers in the event loop.
    """
    # Long prompts: if a request that ended early leaves its prompt behind, the memory shows it.
    prompts = bench.prompts(4, min(400, bench.engine.model_info.context_length // 2))

    async def held_after_some() -> dict[str, int]:
        for _ in range(ROUNDS):
            await _requests_of_every_kind(bench, prompts)
        await _grammars_and_scores(bench, prompts)
        return await held_by(bench.engine)

    await held_after_some()  # the first round fills caches
    room = {"bytes of memory": ROUNDS * ROOM, "bytes of KV cache": 0, **COUNTED}
    await check_steady(held_after_some, room, f"{ROUNDS} rounds of requests")


@case()
async def requests_do_not_hold_the_event_loop(bench: Bench) -> None:
    """Serving requests of every kind, and refusing overlong ones, does not block the trainer's event loop.

    Nor does a grammar that takes long to compile. An engine that has nothing to do does not compute in the trainer's
    process.
    """
    # So long that work in the loop for each token of a prompt shows.
    prompts = bench.prompts(4, min(2000, bench.engine.model_info.context_length // 2))
    await _requests_of_every_kind(bench, prompts)
    too_long: tuple[str | range, ...] = ("a " * 500_000, range(10**9))
    async with check_it_runs():
        await _requests_of_every_kind(bench, prompts)
        for prompt in too_long:
            with refused(InvalidRequest, field="prompts", naming="context length"):
                await bench.engine.generate(prompt)
    if bench.claims(Capability.STRUCTURED_JSON):
        async with check_it_runs():
            await _request_with_a_large_schema(bench)
    await until_idle(bench.engine)
    await _check_rests()


async def _request_with_a_large_schema(bench: Bench) -> None:
    """Generate a token by a schema whose compilation takes some seconds; an engine may refuse it as too large."""
    text = {"type": "string", "maxLength": 40}
    part = {"type": "object", "properties": {f"field_{number}": text for number in range(10)}}
    schema = {"type": "object", "properties": {f"part_{number}": part for number in range(_PARTS)}}
    params = SamplingParams(max_new_tokens=1, structured_output=JsonSchema(json_schema=json.dumps(schema)))
    with suppress(InvalidRequest):
        await bench.engine.generate(bench.prompt(), params)


async def _grammars_and_scores(bench: Bench, prompts: Sequence[list[int]]) -> None:
    """Generate hundreds of tokens by a grammar, and score long sequences: enough in one call for a leak to show."""
    if bench.claims(Capability.STRUCTURED_REGEX):
        grammar = RegexGrammar(regex=f"[a-z]{{{_DRAWN_BY_GRAMMAR}}}")
        params = SamplingParams(max_new_tokens=_DRAWN_BY_GRAMMAR, n=_SAMPLES_BY_GRAMMAR, structured_output=grammar)
        await bench.engine.generate(prompts[0], params)
    if bench.claims(Capability.SCORE_TOKENS) and bench.claims(Capability.SCORE_AT):
        await bench.engine.compute_logprobs([list(prompt) for prompt in prompts], temperature=0.7, top_k=4)


async def _requests_of_every_kind(bench: Bench, prompts: Sequence[list[int]]) -> None:
    engine, long = bench.engine, bench.long(prompt_length=len(prompts[0]))
    await engine.generate(prompts, SamplingParams(n=2, max_new_tokens=3))
    with refused(InvalidRequest):
        await engine.generate([])
    cancelled = await until_running(engine, 1, lambda: engine.generate(prompts[0], long))
    cancelled.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    if bench.claims(Capability.STREAMING):
        async with aclosing(engine.generate_stream(prompts[1], bench.long(64))) as closed_early:
            await anext(closed_early)
        async for _ in engine.generate_stream(prompts[1], SamplingParams(max_new_tokens=3)):
            pass
    if bench.claims(Capability.ABORT):
        async with bench.in_flight([prompts[2]], long, tokens=0, request_ids=["aborted"]) as aborted:
            await engine.abort("aborted")
            await aborted
    for mode in (*bench.freezes(), *[PauseMode.ABORT] * bench.claims(Capability.PAUSE_ABORT)):
        await engine.pause_generation(mode)
        await engine.continue_generation()


async def _check_rests() -> None:
    """Raise if this process computes though nothing is asked of it, as a thread does that polls without a pause.

    The least busy of several windows counts. On a busy machine a polling thread gets less of a core, and looks better.
    """
    shares: list[float] = []
    for _ in range(_WINDOWS):
        began, computed = time.monotonic(), time.process_time()
        await asyncio.sleep(_WINDOW)
        shares.append((time.process_time() - computed) / (time.monotonic() - began))
    least = min(shares)
    assert least <= _IDLE, (
        f"an idle engine takes {least:.0%} of a core of the trainer's process; at most {_IDLE:.0%} is fine"
    )
