"""vLLM's routes that pause a server, abort requests, and describe it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.sampled import Sampled
from drivetrain_conformance.routes.server_answers import Answer, Field
from drivetrain_conformance.routes.server_under_test import Target

TRIES: Final = 3


@asynccontextmanager
async def paused(target: Target, mode: str) -> AsyncIterator[None]:
    """Pause the server for the block."""
    await target.post("/pause", mode=mode, clear_cache="false")
    try:
        yield
    finally:
        await target.post("/resume")


def require_readable(answer: Answer) -> None:
    """Require a JSON object with its length."""
    answer.json().mapping()
    kind = answer.headers.get("content-type", "")
    assert kind.startswith("application/json"), f"{answer.asked} answers the content type {kind!r}"
    assert "content-length" in answer.headers, f"{answer.asked} answers without Content-Length"


async def short(target: Target) -> Answer:
    """Ask for four tokens; return the answer, whatever its status."""
    body = {"model": target.model, "prompt": [5], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    return await target.ask("POST", "/v1/completions", body)


def long(target: Target) -> dict[str, object]:
    """Return a request that runs until it is interrupted, or for as long as it can."""
    fields = {"max_tokens": target.long, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    return {"model": target.model, "prompt": [5], **fields}


async def interrupted(
    target: Target, path: str, body: Mapping[str, object], interrupt: Callable[[], Awaitable[object]]
) -> list[Field]:
    """Return the choices of a streamed request that is interrupted after its first event, and must end in ``abort``.

    A fast server may end a request before it is interrupted, so there are several tries.
    """
    choices: list[Field] = []
    for _ in range(TRIES):
        events = await target.interrupted(path, body, interrupt)
        choices = [event["choices"][0] for event in events if event["choices"].entries()]
        if choices[-1]["finish_reason"].value != "length":
            break
    choices[-1]["finish_reason"].equals("abort")
    return choices


@route_case
async def control_answers_can_be_read(target: Target) -> None:
    """Answers of control routes are JSON objects with a Content-Length. SkyRL reads no chunked ones."""
    require_readable(await target.get("/is_paused"))
    require_readable(await target.post("/pause", mode="keep", clear_cache="false"))
    require_readable(await target.post("/resume"))


@route_case
async def the_world_size_can_be_read(target: Target) -> None:
    """``/get_world_size`` is a JSON object with a Content-Length. TRL and SkyRL size their NCCL group by it."""
    answer = await target.get("/get_world_size", include_dp="true")
    require_readable(answer)
    assert answer.json()["world_size"].integer() >= 1, answer.shown


@route_case
async def get_may_have_a_body(target: Target) -> None:
    """``GET /get_world_size`` may bring a JSON body. SkyRL sends ``{}``."""
    answer = await target.ask("GET", "/get_world_size", {})
    assert answer.status in (200, 404), answer.shown


@route_case
async def the_configuration_can_be_read(target: Target) -> None:
    """``/server_info`` has the data type, adapters and data parallelism. TRL's async trainer indexes all of them."""
    config = (await target.get("/server_info", config_format="json")).json()["vllm_config"]
    config["model_config"]["dtype"].text()
    config["parallel_config"]["data_parallel_size"].integer()
    for name in ("lora_config", "weight_transfer_config"):
        assert name in config.mapping(), f"{config.path}.{name} is absent"


@route_case
async def health_is_200_during_a_pause(target: Target) -> None:
    """``/health`` is 200 during a pause. TRL polls for ever on any other status."""
    async with paused(target, "keep"):
        await target.get("/health")


@route_case
async def requests_wait_during_a_pause(target: Target) -> None:
    """A request that comes during a pause waits, and is answered after ``/resume``. prime-rl and SkyRL send such."""
    await target.post("/pause", mode="keep", clear_cache="false")
    try:
        answer = await target.requires_waiting(lambda: short(target), lambda: target.post("/resume"))
    finally:
        await target.post("/resume")
    assert answer.status == 200, f"after the pause the request got {answer.shown}"
    assert answer.json()["choices"][0]["token_ids"].ids(), answer.shown


@route_case
async def a_pause_with_keep_goes_on_afterwards(target: Target) -> None:
    """A request that runs when ``/pause?mode=keep`` comes goes on afterwards. prime-rl and SkyRL update so."""

    async def pause() -> None:
        async with paused(target, "keep"):
            (await target.get("/is_paused")).json()["is_paused"].equals(True)

    events = await target.interrupted("/v1/completions", long(target), pause)
    events[-1]["choices"][0]["finish_reason"].equals("length")


@route_case
async def an_aborting_pause_returns_partial_tokens(target: Target) -> None:
    """``/pause?mode=abort`` ends requests with 200, ``abort`` and the tokens so far. AReaL goes on from them."""

    async def pause() -> None:
        async with paused(target, "abort"):
            pass

    choices = await interrupted(target, "/v1/completions", long(target), pause)
    ids = [token for choice in choices if not choice["token_ids"].is_null() for token in choice["token_ids"].ids()]
    assert ids, "the aborted request has no token"


@route_case
async def pauses_repeat(target: Target) -> None:
    """A second ``/pause`` is 200. Trainers that restart find the server paused."""
    async with paused(target, "keep"), paused(target, "keep"):
        pass


@route_case
async def resumes_repeat(target: Target) -> None:
    """``/resume`` without a pause is 200 and leaves the server running. prime-rl resumes in any case."""
    await target.post("/resume")
    await target.post("/resume")
    (await target.get("/is_paused")).json()["is_paused"].equals(False)


@route_case
async def an_unknown_pause_mode_is_a_client_error(target: Target) -> None:
    """An unknown mode of a pause is 4xx, and does not pause. TRL's session repeats what fails with 5xx."""
    try:
        await target.refused("/pause", query={"mode": "sometimes"})
        (await target.get("/is_paused")).json()["is_paused"].equals(False)
    finally:
        await target.post("/resume")


@route_case
async def an_update_without_a_start_is_a_client_error(target: Target) -> None:
    """``/update_weights`` that no update can take is 4xx.

    TRL's session repeats what fails with 5xx, and then waits for a broadcast that never comes.
    """
    lists = {"names": ["of.nobody"], "dtype_names": [], "shapes": []}  # unequal lengths: no server can apply it
    await target.refused("/update_weights", {"update_info": lists})


@route_case
async def a_label_without_a_version_is_a_client_error(target: Target) -> None:
    """``/update_weight_version`` without a version is 4xx. Clients repeat what fails with 5xx."""
    await target.refused("/update_weight_version", {})


@route_case
async def the_weight_version_is_a_string(target: Target) -> None:
    """``/weight_info`` has the version as a string. Trainers compare it with theirs."""
    (await target.get("/weight_info")).json()["weight_version"].text()


@route_case
async def completions_are_aborted_by_id(target: Target) -> None:
    """``/abort_requests`` ends a completion by the ``request_id`` that its client gave. The server is not paused."""
    await _aborts(target, "/v1/completions", long(target))


@route_case
async def generations_are_aborted_by_id(target: Target) -> None:
    """``/abort_requests`` ends an ``/inference/v1/generate`` by the ``request_id`` that its client gave."""
    params = {"max_tokens": target.long, "ignore_eos": True}
    await _aborts(
        target, "/inference/v1/generate", {"model": target.model, "token_ids": [5], "sampling_params": params}
    )


async def _aborts(target: Target, path: str, body: Mapping[str, object]) -> None:
    name = f"conformance-{uuid.uuid4().hex}"

    async def abort() -> None:
        await target.post("/abort_requests", {"request_ids": [name]})

    await interrupted(target, path, {**body, "request_id": name}, abort)
    (await target.get("/is_paused")).json()["is_paused"].equals(False)


@route_case
async def an_abort_of_nobody_is_no_error(target: Target) -> None:
    """``/abort_requests`` of an unknown id is 200. The request may have ended before."""
    await target.post("/abort_requests", {"request_ids": ["of-nobody"]})


@route_case
async def the_prefix_cache_is_reset(target: Target) -> None:
    """``/reset_prefix_cache`` answers ``success`` as a boolean. TRL reads JSON after each update."""
    answer = (await target.post("/reset_prefix_cache")).json()
    assert isinstance(answer["success"].value, bool), answer.shown


@route_case
async def all_requests_are_aborted_without_ids(target: Target) -> None:
    """``/abort_requests`` without ids ends every request in ``abort``, and the server goes on to answer."""

    async def abort() -> None:
        await target.post("/abort_requests", {})

    await interrupted(target, "/v1/completions", long(target), abort)
    answer = await short(target)
    assert answer.status == 200, f"after the abort a request got {answer.shown}"


@route_case
async def an_abort_spares_other_requests(target: Target) -> None:
    """An abort of one request leaves another to end in ``length``. Rollouts share a server."""

    async def abort() -> None:
        await target.post("/abort_requests", {"request_ids": ["of-somebody-else"]})

    body = {**long(target), "request_id": f"conformance-{uuid.uuid4().hex}"}
    events = await target.interrupted("/v1/completions", body, abort)
    last = [event["choices"][0] for event in events if event["choices"].entries()][-1]
    last["finish_reason"].equals("length")


@route_case
async def a_pause_with_wait_lets_requests_end(target: Target) -> None:
    """``/pause?mode=wait`` answers once requests have ended, in ``length``, and the server is paused then."""
    pauses: list[asyncio.Future[Answer]] = []

    async def pause() -> None:
        pauses.append(asyncio.ensure_future(target.post("/pause", mode="wait")))

    try:
        events = await target.interrupted("/v1/completions", long(target), pause)
        await pauses[0]
        (await target.get("/is_paused")).json()["is_paused"].equals(True)
    finally:
        await target.post("/resume")
    last = [event["choices"][0] for event in events if event["choices"].entries()][-1]
    last["finish_reason"].equals("length")


@route_case
async def a_request_that_was_paused_keeps_its_context(target: Target) -> None:
    """A request that a pause of ``keep`` interrupts has the model's logprobs to its end, with its cache and without."""
    material = target.material
    for clear in ("false", "true"):

        async def pause(clear: str = clear) -> None:
            await target.post("/pause", mode="keep", clear_cache=clear)
            await target.post("/resume")

        body = {**long(target), "temperature": 1, "top_p": 1, "top_k": -1}
        events = await target.interrupted("/v1/completions", body, pause)
        choices = [event["choices"][0] for event in events if event["choices"].entries()]
        parts = [choice for choice in choices if choice["token_ids"].value]
        ids = [token for part in parts for token in part["token_ids"].ids()]
        logprobs = [value for part in parts for value in part["logprobs"]["token_logprobs"].numbers()]
        assert len(ids) == target.long, f"the request has {len(ids)} of {target.long} tokens"
        material.require(Sampled([5], ids, logprobs), material.model, material.pushed)
