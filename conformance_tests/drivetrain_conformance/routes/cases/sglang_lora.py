"""SGLang's routes of LoRA adapters. Each case unloads its adapters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.sglang_weights import NEUTRAL, request, sampled
from drivetrain_conformance.routes.cases.vllm_weights import PROMPT, long_prompt
from drivetrain_conformance.routes.sampled import Sampled
from drivetrain_conformance.routes.server_answers import Answer
from drivetrain_conformance.routes.server_under_test import RouteRefused, Target


def new_name() -> str:
    """Return a name that no adapter has."""
    return f"conformance-{uuid.uuid4().hex}"


async def load(target: Target, name: str, seed: int) -> Answer:
    """Load an adapter under a name; return the answer, whatever its status."""
    body = {"lora_name": name, "lora_path": str(target.material.adapter(seed))}
    return await target.ask("POST", "/load_lora_adapter", body)


async def unload(target: Target, name: str) -> Answer:
    """Unload an adapter; return the answer, whatever its status."""
    return await target.ask("POST", "/unload_lora_adapter", {"lora_name": name})


def require_loaded(answer: Answer, name: str) -> None:
    """Require that an adapter was loaded."""
    answer.require(200)
    body = answer.json()
    body["success"].equals(True)
    assert name in body["loaded_adapters"].mapping(), f"{body['loaded_adapters'].path} lacks {name}: {body.shown}"


@asynccontextmanager
async def adapter(target: Target, seed: int = 1) -> AsyncIterator[str]:
    """Load an adapter under a new name for the block."""
    name = new_name()
    answer = await load(target, name, seed)
    if answer.status in (404, 501) or "lora" in str(answer.json().mapping().get("error", "")).lower():
        raise RouteRefused(f"{answer.asked}: {answer.shown}")
    require_loaded(answer, name)
    try:
        yield name
    finally:
        await unload(target, name)


async def require_refused(target: Target, name: str) -> None:
    """Require that a request to an adapter that is not loaded is 4xx."""
    await target.refused("/generate", request(lora_path=name))


@route_case
async def adapters_and_the_model_are_kept_apart(target: Target) -> None:
    """Requests at once to two adapters by ``lora_path`` and to the model each get their own weights. AReaL asks so."""
    material = target.material
    checkpoints = [material.model, material.merged(1), material.merged(2)]
    async with adapter(target, 1) as one, adapter(target, 2) as two:
        answers = await asyncio.gather(*(sampled(target, lora_path=name) for name in (None, one, two)))
    for answer, served in zip(answers, checkpoints, strict=True):
        material.require(answer, served, *(other for other in checkpoints if other != served))


@route_case
async def completions_name_an_adapter_after_the_model(target: Target) -> None:
    """A completion whose model is ``base:adapter`` gets the adapter. SGLang's OpenAI clients name it so."""
    material = target.material
    async with adapter(target) as name:
        body = {"model": f"{target.model}:{name}", "prompt": list(PROMPT), "max_tokens": 8, "temperature": 1}
        body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        choice = (await target.post("/v1/completions", body)).json()["choices"][0]
        found = Sampled(PROMPT, choice["token_ids"].ids(), choice["logprobs"]["token_logprobs"].numbers())
        material.require(found, material.merged(1), material.model)


@route_case
async def an_adapter_that_was_unloaded_is_refused(target: Target) -> None:
    """After ``/unload_lora_adapter`` a request to the adapter is 4xx. Trainers must not sample a stale policy."""
    async with adapter(target) as name:
        await sampled(target, lora_path=name)
        answer = await unload(target, name)
        answer.require(200)
        assert name not in answer.json()["loaded_adapters"].mapping(), answer.shown
        await require_refused(target, name)


@route_case
async def a_name_can_be_loaded_again_after_an_unload(target: Target) -> None:
    """A name that was unloaded can be loaded with another adapter, whose weights then answer. AReaL reuses names."""
    material = target.material
    async with adapter(target, 1) as name:
        await sampled(target, lora_path=name)
        await unload(target, name)
        require_loaded(await load(target, name, 2), name)
        found = await sampled(target, lora_path=name)
        material.require(found, material.merged(2), material.merged(1), material.model)


@route_case
async def a_name_that_is_taken_keeps_its_word(target: Target) -> None:
    """A loaded name is refused with 400 and answers as before, or gets the new weights. AReaL takes either.

    An answer of 200 with the old weights would be a stale policy.
    """
    material, prompt = target.material, long_prompt(target)
    async with adapter(target, 1) as name:
        for _ in range(2):
            found = await sampled(target, prompt, lora_path=name)
            material.require(found, material.merged(1), material.merged(2))
        answer = await load(target, name, 2)
        assert answer.status in (200, 400), f"{answer.asked} got {answer.shown}; expected 200 or 400"
        served = material.merged(2 if answer.status == 200 else 1)
        others = {material.merged(1), material.merged(2), material.model} - {served}
        material.require(await sampled(target, prompt, lora_path=name), served, *others)


@route_case
async def an_adapter_without_a_folder_is_refused(target: Target) -> None:
    """An adapter whose folder does not exist is 400 with ``success: false``, and requests to it are 4xx."""
    async with adapter(target):
        name = new_name()
        body = {"lora_name": name, "lora_path": str(target.material.gone)}
        answer = await target.refused("/load_lora_adapter", body)
        answer.json()["success"].equals(False)
        answer.json()["error_message"].text()
        await require_refused(target, name)


@route_case
async def unloading_nobody_is_a_client_error(target: Target) -> None:
    """To unload an adapter that is not loaded is 4xx, with a JSON object. AReaL ignores that answer."""
    async with adapter(target):
        (await target.refused("/unload_lora_adapter", {"lora_name": new_name()})).json().mapping()


@route_case
async def an_unload_lets_requests_end(target: Target) -> None:
    """A request that runs while its adapter is unloaded ends in ``length``. AReaL unloads adapters of old versions."""
    async with adapter(target) as name:
        params = {**NEUTRAL, "max_new_tokens": target.long}
        body = {"input_ids": [5], "sampling_params": params, "lora_path": name}
        last = (await target.meanwhile("/generate", body, lambda: unload(target, name)))[-1]
        last["meta_info"]["finish_reason"]["type"].equals("length")
        await require_refused(target, name)
