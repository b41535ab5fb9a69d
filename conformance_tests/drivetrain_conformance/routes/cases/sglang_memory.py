"""SGLang's routes that release memory between phases and resume it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.sglang_control import paused, require_readable, short
from drivetrain_conformance.routes.cases.sglang_weights import push, restored, sampled
from drivetrain_conformance.routes.server_under_test import Target


@asynccontextmanager
async def without_cache(target: Target) -> AsyncIterator[None]:
    """Release the memory of the KV cache for the block, and resume it whatever happens."""
    body = {"tags": ["kv_cache"]}
    await target.post("/release_memory_occupation", body)
    try:
        yield
    finally:
        await target.post("/resume_memory_occupation", body)


async def greedy(target: Target) -> list[int]:
    """Return the ids of a short greedy answer."""
    answer = await short(target)
    answer.require(200)
    return answer.json()["output_ids"].ids()


@route_case
async def answers_of_memory_can_be_read(target: Target) -> None:
    """Releases and resumptions of memory answer JSON with Content-Length. slime parses every answer."""
    async with paused(target):
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            require_readable(await target.post(path, {"tags": ["kv_cache"]}))


@route_case
async def the_cache_can_be_released_alone(target: Target) -> None:
    """With the tag ``kv_cache`` the weights stay: a greedy request has the same answer afterwards."""
    before = await greedy(target)
    async with paused(target), without_cache(target):
        pass
    after = await greedy(target)
    assert after == before, f"after the release the ids are {after}; before it they were {before}"


@route_case
async def released_weights_are_filled_by_an_update(target: Target) -> None:
    """Weights pushed after a release, before the cache is resumed, are those that answer. slime colocates so."""
    material = target.material
    async with restored(target):
        await target.post("/pause_generation", {})
        await target.post("/release_memory_occupation", {})
        try:
            await target.post("/resume_memory_occupation", {"tags": ["weights"]})
            await push(target, material.pushed, "pushed", flush_cache=False)
        finally:
            await target.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await target.post("/continue_generation", {})
        material.require(await sampled(target), material.pushed, material.model)


@route_case
async def health_is_200_while_memory_is_released(target: Target) -> None:
    """``/health`` is 200 while memory is released. slime's monitor kills an engine that answers otherwise."""
    async with paused(target), without_cache(target):
        await target.get("/health")


@route_case
async def requests_while_memory_is_released_wait(target: Target) -> None:
    """A request that comes while a paused server has no memory waits, or is refused with 503. AReaL sends such."""
    async with paused(target):
        async with without_cache(target):
            waiting = asyncio.ensure_future(short(target))
            await asyncio.wait([waiting], timeout=0.5)
            if waiting.done():
                found = waiting.result()
                assert found.status == 503, (
                    f"a request without memory got {found.shown}; expected that it waits, or 503"
                )
    answer = await waiting
    assert answer.status in (200, 503), f"after the pause the request got {answer.shown}"


@route_case
async def an_unknown_tag_is_a_client_error(target: Target) -> None:
    """An unknown tag is 4xx, and the server goes on to answer. Clients repeat what fails with 5xx."""
    async with paused(target):
        await target.refused("/release_memory_occupation", {"tags": ["of-nobody"]})
    await greedy(target)
