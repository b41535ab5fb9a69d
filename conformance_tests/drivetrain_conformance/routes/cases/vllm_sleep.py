"""vLLM's sleep, and the memory that waking up brings back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.vllm_control import short
from drivetrain_conformance.routes.cases.vllm_weights import push, restored, sampled, version_of
from drivetrain_conformance.routes.server_answers import Answer
from drivetrain_conformance.routes.server_under_test import Target


@asynccontextmanager
async def asleep(target: Target) -> AsyncIterator[bool]:
    """Put the server to sleep for the block, and leave it awake with its weights; yield if it kept them.

    A server that cannot keep its weights, and says so by 501, sleeps at level 2; then they are pushed back.

    Raises:
        CannotRun: the weights would be lost, and the model's folder was not given.
    """
    keeps = (await target.ask("POST", "/sleep", query={"level": "1"})).status != 501
    version = await version_of(target)
    lost = None if keeps else target.material.model
    if lost is not None:
        await target.post("/sleep", level="2")
    try:
        yield keeps
    finally:
        await target.post("/wake_up")
        if lost is not None:
            await push(target, lost, version)
            await target.post("/resume")


async def require_asleep(target: Target, expected: bool) -> None:
    """Require what ``/is_sleeping`` answers."""
    (await target.get("/is_sleeping")).json()["is_sleeping"].equals(expected)


def ids_of(answer: Answer) -> list[int]:
    """Return the ids of an answer, whose status must be 200."""
    answer.require(200)
    return answer.json()["choices"][0]["token_ids"].ids()


async def greedy(target: Target) -> list[int]:
    """Return the ids of a short greedy answer."""
    return ids_of(await short(target))


@route_case
async def a_sleep_ends_when_the_server_wakes_up(target: Target) -> None:
    """``/is_sleeping`` is true from ``/sleep`` to ``/wake_up``, and then requests run. SkyRL sleeps between phases."""
    async with asleep(target):
        await require_asleep(target, True)
    await require_asleep(target, False)
    await greedy(target)


@route_case
async def answers_after_a_sleep_of_level_1_are_as_before(target: Target) -> None:
    """A sleep of level 1 keeps the weights: a greedy request has the same answer afterwards."""
    before = await greedy(target)
    await target.post("/sleep", level="1")
    await target.post("/wake_up")
    after = await greedy(target)
    assert after == before, f"after the sleep the ids are {after}; before it they were {before}"


@route_case
async def health_is_200_during_a_sleep(target: Target) -> None:
    """``/health`` is 200 during a sleep. TRL polls for ever on any other status."""
    async with asleep(target):
        await target.get("/health")


@route_case
async def requests_during_a_sleep_wait_or_are_refused(target: Target) -> None:
    """A request that comes during a sleep is refused with 503, or waits and is answered as after the sleep.

    Weights and cache are gone meanwhile, so an answer would be of no model.
    """
    before = await greedy(target)
    async with asleep(target):
        waiting = asyncio.ensure_future(short(target))
        await asyncio.wait([waiting], timeout=0.5)
        if waiting.done():
            found = waiting.result()
            assert found.status == 503, f"a request during a sleep got {found.shown}; expected that it waits, or 503"
    answer = await waiting
    if answer.status != 503:
        ids = ids_of(answer)
        assert ids == before, f"the request that waited has the ids {ids}; before the sleep they were {before}"


@route_case
async def memory_wakes_up_by_tags(target: Target) -> None:
    """With ``tags=weights`` the server still sleeps; with ``tags=kv_cache`` after it, it is awake. SkyRL wakes so."""
    async with asleep(target) as keeps:
        await target.post("/wake_up", tags="weights")
        await require_asleep(target, True)
        await target.post("/wake_up", tags="kv_cache")
        if keeps:
            await require_asleep(target, False)
    await require_asleep(target, False)
    await greedy(target)


@route_case
async def a_sleep_of_level_2_is_filled_by_an_update(target: Target) -> None:
    """After a sleep of level 2, weights pushed before the cache wakes up are those that answer. SkyRL colocates so."""
    material = target.material
    async with restored(target):
        await target.post("/sleep", level="2")
        try:
            await target.post("/wake_up", tags="weights")
            await push(target, material.pushed, "slept-and-pushed")
        finally:
            await target.post("/wake_up")
            await target.post("/resume")
        material.require(await sampled(target), material.pushed, material.model)


@route_case
async def waking_up_repeats(target: Target) -> None:
    """``/wake_up`` of a server that is awake is 200. Trainers that restart send it."""
    await target.post("/wake_up")
    await require_asleep(target, False)


@route_case
async def an_unknown_level_is_a_client_error(target: Target) -> None:
    """A level beyond 2 is 4xx, and the server does not sleep. Clients repeat what fails with 5xx."""
    try:
        await target.refused("/sleep", query={"level": "3"})
        await require_asleep(target, False)
    finally:
        await target.post("/wake_up")
        await target.post("/resume")
