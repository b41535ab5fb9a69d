"""SGLang's updates from a folder. The model's own weights are pushed back after each case."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.sglang_control import interrupted, paused
from drivetrain_conformance.routes.cases.vllm_weights import PROMPT, TOKENS, long_prompt, require_both_versions
from drivetrain_conformance.routes.sampled import Sampled
from drivetrain_conformance.routes.server_answers import Answer, Field
from drivetrain_conformance.routes.server_under_test import Target

NEUTRAL: Final = {"max_new_tokens": TOKENS, "temperature": 1, "ignore_eos": True}


async def push(target: Target, folder: Path, version: str, **fields: object) -> Field:
    """Load a checkpoint; return the answer, whose ``success`` must be true."""
    body = {"model_path": str(folder), "weight_version": version, **fields}
    answer = (await target.post("/update_weights_from_disk", body)).json()
    answer["success"].equals(True)
    return answer


async def version_of(target: Target) -> str:
    """Return the version that the server states."""
    return (await target.get("/model_info")).json()["weight_version"].text()


@asynccontextmanager
async def restored(target: Target) -> AsyncIterator[str]:
    """Push the model's own weights, under their version, after the block."""
    material, version = target.material, await version_of(target)
    try:
        yield version
    finally:
        await target.post("/continue_generation", {})
        await push(target, material.model, version)


def request(prompt: Sequence[int] = PROMPT, **fields: object) -> dict[str, object]:
    """Return a short request whose answer has the logprobs of its tokens."""
    return {"input_ids": list(prompt), "sampling_params": NEUTRAL, "return_logprob": True, **fields}


def sample_of(answer: Field, prompt: Sequence[int]) -> Sampled:
    """Return the ids of an answer and their logprobs."""
    entries = answer["meta_info"]["output_token_logprobs"].entries()
    return Sampled(prompt, [one[1].integer() for one in entries], [one[0].number() for one in entries])


async def sampled(target: Target, prompt: Sequence[int] = PROMPT, **fields: object) -> Sampled:
    """Return the answer to a short request."""
    return sample_of((await target.post("/generate", request(prompt, **fields))).json(), prompt)


@route_case
async def answers_after_an_update_are_the_new_models(target: Target) -> None:
    """After an update from a folder, the logprobs are those of its checkpoint. slime and AReaL update so."""
    material = target.material
    material.require(await sampled(target), material.model, material.pushed)
    async with restored(target):
        await push(target, material.pushed, "pushed")
        material.require(await sampled(target), material.pushed, material.model)
    material.require(await sampled(target), material.model, material.pushed)


@route_case
async def an_update_gives_the_weights_its_version(target: Target) -> None:
    """``/model_info`` and ``meta_info`` have the pushed version after an update. slime compares it with its own."""
    async with restored(target):
        await push(target, target.material.pushed, "conformance-7")
        found = await version_of(target)
        assert found == "conformance-7", f"the version is {found!r}; expected 'conformance-7'"
        answer = (await target.post("/generate", request())).json()
        answer["meta_info"]["weight_version"].equals("conformance-7")


@route_case
async def cached_prefixes_are_not_stale(target: Target) -> None:
    """A prompt that was cached before an update is computed anew. Trainers rely on ``flush_cache``, which is true."""
    material, prompt = target.material, long_prompt(target)
    for _ in range(2):
        material.require(await sampled(target, prompt), material.model, material.pushed)
    async with restored(target):
        await push(target, material.pushed, "pushed")
        material.require(await sampled(target, prompt), material.pushed, material.model)


@route_case
async def an_update_during_a_pause_can_be_made(target: Target) -> None:
    """An update may come after a pause and a flush, as from slime. A request that waits gets the new weights."""
    material = target.material

    async def update() -> None:
        await target.get("/flush_cache")
        await push(target, material.pushed, "pushed")
        await target.post("/continue_generation", {})

    async def ask() -> Answer:
        return await target.ask("POST", "/generate", request())

    async with restored(target):
        await target.post("/pause_generation", {})
        answer = await target.requires_waiting(ask, update)
        assert answer.status == 200, f"after the update the request got {answer.shown}"
        material.require(sample_of(answer.json(), PROMPT), material.pushed, material.model)


@route_case
async def a_request_in_flight_tells_both_versions(target: Target) -> None:
    """A request that is frozen while an update comes ends in ``length``, with a span of each version over its ids.

    Trainers that correct for staleness read the spans of ``meta_info``.
    """
    body = {"input_ids": [5], "sampling_params": {**NEUTRAL, "max_new_tokens": target.long}}

    async def change() -> None:
        async with paused(target, "retract"):
            await push(target, target.material.pushed, "pushed-in-flight")

    async def spans() -> tuple[Field, str]:
        async with restored(target) as old:
            meta = (await target.interrupted("/generate", body, change))[-1]["meta_info"]
            meta["finish_reason"]["type"].equals("length")
            return meta["weight_versions"], old

    await require_both_versions(spans, "pushed-in-flight", target.long)


@route_case
async def an_update_can_abort_requests(target: Target) -> None:
    """With ``abort_all_requests`` requests end in ``abort``, and the update succeeds. AReaL updates so."""
    material = target.material
    async with restored(target):

        async def change() -> None:
            await push(target, material.pushed, "pushed", abort_all_requests=True)

        await interrupted(target, change)
        material.require(await sampled(target), material.pushed, material.model)


@route_case
async def a_folder_that_is_not_there_changes_nothing(target: Target) -> None:
    """An update from a folder that does not exist is 400 with ``success: false``, and the old weights are served on."""
    material, version = target.material, await version_of(target)
    answer = await target.refused("/update_weights_from_disk", {"model_path": str(material.gone)})
    answer.json()["success"].equals(False)
    answer.json()["message"].text()
    material.require(await sampled(target), material.model, material.pushed)
    found = await version_of(target)
    assert found == version, f"the version is {found!r}; before it was {version!r}"
