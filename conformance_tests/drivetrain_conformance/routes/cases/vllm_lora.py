"""vLLM's routes of LoRA adapters. Each case unloads its adapters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.vllm_control import long
from drivetrain_conformance.routes.cases.vllm_weights import long_prompt, sampled
from drivetrain_conformance.routes.server_answers import Answer, Field
from drivetrain_conformance.routes.server_under_test import Target


def new_name() -> str:
    """Return a name that no adapter has."""
    return f"conformance-{uuid.uuid4().hex}"


async def load(target: Target, name: str, seed: int, **fields: object) -> Answer:
    """Load an adapter under a name; return the answer, whatever its status."""
    body = {"lora_name": name, "lora_path": str(target.material.adapter(seed)), **fields}
    return await target.ask("POST", "/v1/load_lora_adapter", body)


async def unload(target: Target, name: str) -> Answer:
    """Unload an adapter; return the answer, whatever its status."""
    return await target.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})


@asynccontextmanager
async def adapter(target: Target, seed: int = 1) -> AsyncIterator[str]:
    """Load an adapter under a new name for the block."""
    name = new_name()
    await target.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(target.material.adapter(seed))})
    try:
        yield name
    finally:
        await unload(target, name)


async def card_of(target: Target, name: str) -> Field | None:
    """Return the card of a model that ``/v1/models`` lists; None if it lists none."""
    cards = (await target.get("/v1/models")).json()["data"].entries()
    return next((card for card in cards if card["id"].value == name), None)


async def require_not_found(target: Target, name: str) -> None:
    """Require that a request to an adapter is 404, and that no card names it."""
    body = {"model": name, "prompt": [5], "max_tokens": 1}
    answer = await target.ask("POST", "/v1/completions", body)
    assert answer.status == 404, f"a request to an adapter that is not loaded got {answer.shown}; expected 404"
    assert await card_of(target, name) is None, f"/v1/models still lists {name}"


@route_case
async def an_adapter_is_listed_after_the_model(target: Target) -> None:
    """A loaded adapter has a card whose ``parent`` is the model, and the model's card stays first. TRL reads it."""
    async with adapter(target) as name:
        card = await card_of(target, name)
        assert card is not None, f"/v1/models does not list the adapter {name}"
        card["parent"].text()
        (await target.get("/v1/models")).json()["data"][0]["id"].equals(target.model)


@route_case
async def adapters_and_the_model_are_kept_apart(target: Target) -> None:
    """Requests at once to two adapters and to the model each get their own weights. SkyRL and TRL name them so."""
    material = target.material
    checkpoints = [material.model, material.merged(1), material.merged(2)]
    async with adapter(target, 1) as one, adapter(target, 2) as two:
        answers = await asyncio.gather(*(sampled(target, name) for name in (target.model, one, two)))
    for answer, served in zip(answers, checkpoints, strict=True):
        material.require(answer, served, *(other for other in checkpoints if other != served))


@route_case
async def an_adapter_that_was_unloaded_is_not_found(target: Target) -> None:
    """After ``/v1/unload_lora_adapter`` a request to the adapter is 404. Trainers must not sample a stale policy."""
    async with adapter(target) as name:
        await sampled(target, name)
        (await unload(target, name)).require(200)
        await require_not_found(target, name)


@route_case
async def a_name_can_be_loaded_again_after_an_unload(target: Target) -> None:
    """A name that was unloaded can be loaded with another adapter, whose weights then answer. AReaL reuses names."""
    material = target.material
    async with adapter(target, 1) as name:
        await sampled(target, name)
        await unload(target, name)
        (await load(target, name, 2)).require(200)
        material.require(await sampled(target, name), material.merged(2), material.merged(1), material.model)


@route_case
async def an_adapter_without_a_folder_is_not_found(target: Target) -> None:
    """An adapter whose folder does not exist is 404, and is not listed. prime-rl tries again after 404."""
    async with adapter(target):  # a server without adapters answers 404 too
        name = new_name()
        body = {"lora_name": name, "lora_path": str(target.material.gone)}
        (await target.ask("POST", "/v1/load_lora_adapter", body)).require(404)
        await require_not_found(target, name)


@route_case
async def unloading_nobody_is_not_found(target: Target) -> None:
    """To unload an adapter that is not loaded is 404. TRL's async trainer and prime-rl ignore that status."""
    async with adapter(target):
        (await unload(target, new_name())).require(404)


@route_case
async def a_name_that_is_taken_is_refused(target: Target) -> None:
    """A loaded name without ``load_inplace`` is 400, and its adapter goes on to answer."""
    material = target.material
    async with adapter(target, 1) as name:
        (await load(target, name, 2)).require(400)
        material.require(await sampled(target, name), material.merged(1), material.merged(2))


@route_case
async def an_adapter_is_replaced_in_place(target: Target) -> None:
    """With ``load_inplace`` a name gets the new weights, also for prompts that are cached. SkyRL reloads one name."""
    material, prompt = target.material, long_prompt(target)
    async with adapter(target, 1) as name:
        for _ in range(2):
            material.require(await sampled(target, name, prompt), material.merged(1), material.merged(2))
        (await load(target, name, 2, load_inplace=True)).require(200)
        material.require(await sampled(target, name, prompt), material.merged(2), material.merged(1), material.model)


@route_case
async def an_unload_lets_requests_end(target: Target) -> None:
    """A request that runs while its adapter is unloaded ends in ``length``. TRL unloads adapters of old versions."""
    async with adapter(target) as name:
        body = {**long(target), "model": name}
        events = await target.meanwhile("/v1/completions", body, lambda: unload(target, name))
        last = [event["choices"][0] for event in events if event["choices"].entries()][-1]
        last["finish_reason"].equals("length")
        await require_not_found(target, name)
