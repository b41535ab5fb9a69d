"""vLLM's updates from a folder. The model's own weights are pushed back after each case."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.vllm_control import TRIES, paused
from drivetrain_conformance.routes.sampled import Sampled
from drivetrain_conformance.routes.server_answers import Field
from drivetrain_conformance.routes.server_under_test import RouteRefused, Target

PROMPT: Final = tuple(range(5, 25))
TOKENS: Final = 8


async def push(target: Target, folder: Path, version: str) -> None:
    """Load a checkpoint: by ``weight_dir``, as prime-rl does, or where that is unknown by the method of vLLM's workers.

    Raises:
        RouteRefused: the server takes neither.
    """
    body = {"weight_dir": str(folder), "weight_version": version}
    answer = await target.ask("POST", "/update_weights", body)
    if answer.status == 200:
        return
    if "update_info" not in answer.content.decode(errors="replace"):
        raise (
            RouteRefused(f"{answer.asked}: {answer.shown}")
            if answer.status == 404
            else AssertionError(f"{answer.asked} got {answer.shown}; expected 200")
        )
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    await target.post("/collective_rpc", reload)
    await target.post("/update_weight_version", {"new_version": version})


async def version_of(target: Target) -> str:
    """Return the version that the server states."""
    return (await target.get("/weight_info")).json()["weight_version"].text()


async def update(target: Target, folder: Path, version: str) -> None:
    """Update as a trainer does: pause, push, reset the prefix cache, resume."""
    async with paused(target, "keep"):
        await push(target, folder, version)
        await target.post("/reset_prefix_cache")


@asynccontextmanager
async def restored(target: Target) -> AsyncIterator[str]:
    """Push the model's own weights, under their version, after the block."""
    material, version = target.material, await version_of(target)
    try:
        yield version
    finally:
        await target.post("/resume")
        await update(target, material.model, version)


async def sampled(target: Target, model: str = "", prompt: Sequence[int] = PROMPT) -> Sampled:
    """Return an answer of ``model``, by default the served one, with the logprobs of its tokens."""
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "ignore_eos": True}
    asked = {"max_tokens": TOKENS, "logprobs": 0, "return_token_ids": True}
    body = {"model": model or target.model, "prompt": list(prompt), **neutral, **asked}
    choice = (await target.post("/v1/completions", body)).json()["choices"][0]
    return Sampled(prompt, choice["token_ids"].ids(), choice["logprobs"]["token_logprobs"].numbers())


def long_prompt(target: Target) -> list[int]:
    """Return a prompt of several blocks of a prefix cache."""
    return [5 + index % 50 for index in range(min(300, target.long - 4 * TOKENS))]


@route_case
async def answers_after_an_update_are_the_new_models(target: Target) -> None:
    """After an update from a folder, the logprobs are those of its checkpoint. Every trainer relies on it."""
    material = target.material
    material.require(await sampled(target), material.model, material.pushed)
    async with restored(target):
        await update(target, material.pushed, "pushed")
        material.require(await sampled(target), material.pushed, material.model)
    material.require(await sampled(target), material.model, material.pushed)


@route_case
async def an_update_gives_the_weights_its_version(target: Target) -> None:
    """``/weight_info`` has the pushed version after an update. Trainers compare it with theirs."""
    async with restored(target):
        await update(target, target.material.pushed, "conformance-7")
        found = await version_of(target)
        assert found == "conformance-7", f"the version is {found!r}; expected 'conformance-7'"


@route_case
async def cached_prefixes_are_not_stale(target: Target) -> None:
    """A prompt that was cached before an update, with the cache reset, is computed anew. TRL resets it each step."""
    material, prompt = target.material, long_prompt(target)
    for _ in range(2):
        material.require(await sampled(target, prompt=prompt), material.model, material.pushed)
    async with restored(target):
        await update(target, material.pushed, "pushed")
        material.require(await sampled(target, prompt=prompt), material.pushed, material.model)


@route_case
async def requests_that_wait_get_the_new_weights(target: Target) -> None:
    """A request that comes during the pause of an update is answered by the new weights. prime-rl sends such."""
    material = target.material
    body = {"model": target.model, "prompt": list(PROMPT), "max_tokens": TOKENS, "logprobs": 0, "temperature": 1}
    body |= {"top_p": 1, "top_k": -1, "ignore_eos": True, "return_token_ids": True}

    async def resume() -> None:
        await push(target, material.pushed, "pushed")
        await target.post("/reset_prefix_cache")
        await target.post("/resume")

    async with restored(target):
        await target.post("/pause", mode="keep", clear_cache="false")
        answer = await target.requires_waiting(lambda: target.ask("POST", "/v1/completions", body), resume)
        assert answer.status == 200, f"after the update the request got {answer.shown}"
        choice = answer.json()["choices"][0]
        found = Sampled(PROMPT, choice["token_ids"].ids(), choice["logprobs"]["token_logprobs"].numbers())
        material.require(found, material.pushed, material.model)


@route_case
async def a_request_in_flight_tells_both_versions(target: Target) -> None:
    """A request that an update interrupts ends in ``length``, with a span of each version over its ids.

    prime-rl and trainers that correct for staleness read the spans.
    """
    params = {"max_tokens": target.long, "ignore_eos": True, "temperature": 1}
    body = {"model": target.model, "token_ids": [5], "sampling_params": params}

    async def change() -> None:
        await update(target, target.material.pushed, "pushed-in-flight")

    async def spans() -> tuple[Field, str]:
        async with restored(target) as old:
            events = await target.interrupted("/inference/v1/generate", body, change)
            choices = [event["choices"][0] for event in events if event["choices"].entries()]
            choices[-1]["finish_reason"].equals("length")
            return choices[-1]["weight_versions"], old

    await require_both_versions(spans, "pushed-in-flight", target.long)


async def require_both_versions(spans: Callable[[], Awaitable[tuple[Field, str]]], new: str, length: int) -> None:
    """Require a span of the old version and one of the new, if need be in another try.

    Args:
        spans: Interrupts a request by an update, and returns its spans and the version from before.
        new: The version of the update.
        length: Tokens of the request.
    """
    found, old = await spans()
    for _ in range(TRIES - 1):
        if len(found.entries()) > 1:  # otherwise it may have ended before the update
            break
        found, old = await spans()
    require_spans(found, [old, new], length)


def require_spans(found: Field, versions: list[str], length: int) -> None:
    """Require one span of each version, in order, that cover ``length`` tokens without a gap."""
    spans = found.entries()
    named = [span["version"].text() for span in spans]
    assert named == versions, f"{found.path} names the versions {named}; expected {versions}"
    ends = [0, *(span["end"].integer() for span in spans)]
    for span, begin in zip(spans, ends, strict=False):
        span["start"].equals(begin)
        assert span["end"].integer() > begin, f"{span.path} is empty"
    assert ends[-1] == length, f"{found.path} covers {ends[-1]} of {length} tokens"


@route_case
async def a_folder_that_is_not_there_changes_nothing(target: Target) -> None:
    """An update from a folder that does not exist is 4xx, and the old weights and their version are served on.

    Only by ``weight_dir``: with the method of vLLM's workers, the server would not come back.
    """
    material, version = target.material, await version_of(target)
    answer = await target.refused("/update_weights", {"weight_dir": str(material.gone)})
    if "update_info" in answer.content.decode(errors="replace") and "weight_dir" not in answer.content.decode():
        raise RouteRefused(f"{answer.asked}: {answer.shown}")
    await target.post("/resume")
    material.require(await sampled(target), material.model, material.pushed)
    found = await version_of(target)
    assert found == version, f"the version is {found!r}; before it was {version!r}"
