"""SGLang's routes that pause a server, abort requests, and describe it."""

from __future__ import annotations

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
async def paused(target: Target, mode: str = "") -> AsyncIterator[None]:
    """Pause the server for the block; by default as slime does, without a mode."""
    await target.post("/pause_generation", {"mode": mode} if mode else {})
    try:
        yield
    finally:
        await target.post("/continue_generation", {})


def require_readable(answer: Answer) -> Field:
    """Require JSON with its length, and return it."""
    assert "content-length" in answer.headers, f"{answer.asked} answers without Content-Length"
    return answer.json()


async def short(target: Target) -> Answer:
    """Ask for four tokens; return the answer, whatever its status."""
    params = {"max_new_tokens": 4, "temperature": 0}
    return await target.ask("POST", "/generate", {"input_ids": [5], "sampling_params": params})


async def interrupted(target: Target, interrupt: Callable[[], Awaitable[object]], **fields: object) -> Field:
    """Return the last event of a streamed request that is interrupted after its first, and must end in an abort.

    A fast server may end a request before it is interrupted, so there are several tries.
    """
    params = {"max_new_tokens": target.long, "ignore_eos": True}
    body: Mapping[str, object] = {"input_ids": [5], "sampling_params": params, "return_logprob": True, **fields}
    last = (await target.interrupted("/generate", body, interrupt))[-1]
    for _ in range(TRIES - 1):
        if last["meta_info"]["finish_reason"]["type"].value != "length":
            break
        last = (await target.interrupted("/generate", body, interrupt))[-1]
    reason = last["meta_info"]["finish_reason"]
    reason["type"].equals("abort")
    message = reason.mapping().get("message", "")
    assert isinstance(message, str), f"{reason.path}.message is {message!r}; AReaL expects a string"
    return last


@route_case
async def health_is_200_during_a_pause(target: Target) -> None:
    """``/health`` is 200 during a pause without a mode. slime's monitor kills an engine that answers otherwise."""
    async with paused(target):
        await target.get("/health")


@route_case
async def health_is_200_while_requests_are_frozen(target: Target) -> None:
    """``/health`` is 200 during a pause in place. AReaL pauses so, and its start waits for 200."""
    async with paused(target, "in_place"):
        await target.get("/health")


@route_case
async def get_health_may_have_a_body(target: Target) -> None:
    """``GET /health`` may bring a JSON body. AReaL sends ``{}``."""
    answer = await target.ask("GET", "/health", {})
    assert answer.status == 200, answer.shown


@route_case
async def control_answers_can_be_read(target: Target) -> None:
    """Pauses, and their ends, answer a JSON object with Content-Length. slime parses every answer."""
    require_readable(await target.post("/pause_generation", {})).mapping()
    require_readable(await target.post("/continue_generation", {})).mapping()


@route_case
async def the_arguments_can_be_read(target: Target) -> None:
    """``/server_info`` has ``tp_size``, ``pp_size`` and ``enable_memory_saver: false``. slime asserts equality."""
    answer = (await target.get("/server_info")).json()
    for name in ("tp_size", "pp_size"):
        assert answer[name].integer() >= 1, answer[name].shown
    assert isinstance(answer["enable_memory_saver"].value, bool), answer["enable_memory_saver"].shown


@route_case
async def the_model_can_be_read(target: Target) -> None:
    """``/model_info`` has the path, ``is_generation: true`` and the weight version. Routers read it."""
    answer = (await target.get("/model_info")).json()
    answer["model_path"].text()
    answer["is_generation"].equals(True)
    answer["weight_version"].text()


@route_case
async def loads_can_be_summed(target: Target) -> None:
    """``/v1/loads`` has running and waiting requests as integers. slime sums them until 0, and aborts meanwhile."""
    for load in (await target.get("/v1/loads", include="core")).json()["loads"].entries():
        load["num_running_reqs"].integer()
        load["num_waiting_reqs"].integer()


@route_case
async def requests_wait_during_a_pause(target: Target) -> None:
    """A request that comes during a pause waits, and is answered after ``/continue_generation``. AReaL sends such."""
    for mode in ("abort", "in_place"):
        await target.post("/pause_generation", {"mode": mode})
        resumed = False

        async def resume() -> None:
            nonlocal resumed
            await target.post("/continue_generation", {})
            resumed = True

        try:
            answer = await target.requires_waiting(lambda: short(target), resume)
        finally:
            if not resumed:
                await resume()
        assert answer.status == 200, f"after the pause ({mode}) the request got {answer.shown}"
        assert answer.json()["output_ids"].ids(), answer.shown


@route_case
async def a_pause_in_place_goes_on_afterwards(target: Target) -> None:
    """A request that runs when a pause in place comes goes on afterwards. AReaL updates so."""

    async def pause() -> None:
        async with paused(target, "in_place"):
            pass

    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": target.long, "ignore_eos": True}}
    events = await target.interrupted("/generate", body, pause)
    events[-1]["meta_info"]["finish_reason"]["type"].equals("length")


@route_case
async def an_aborting_pause_returns_partial_tokens(target: Target) -> None:
    """A pause without a mode ends requests with 200, ``abort``, and the tokens so far with their logprobs.

    AReaL and slime go on from them.
    """

    async def pause() -> None:
        async with paused(target):
            pass

    last = await interrupted(target, pause)
    entries = last["meta_info"]["output_token_logprobs"].entries()
    assert entries, "the aborted request has no token"
    last["output_ids"].equals([entry[1].integer() for entry in entries])


@route_case
async def pauses_repeat_in_another_mode(target: Target) -> None:
    """A pause in place after one without a mode is 200. AReaL sends both."""
    async with paused(target):
        await target.post("/pause_generation", {"mode": "in_place"})


@route_case
async def resumes_repeat(target: Target) -> None:
    """``/continue_generation`` without a pause is 200, and the server generates. Trainers resume in any case."""
    await target.post("/continue_generation", {})
    await target.post("/continue_generation", {})
    answer = await short(target)
    assert answer.status == 200, answer.shown


@route_case
async def requests_are_aborted_by_id(target: Target) -> None:
    """``/abort_request`` ends a request by its ``rid`` with 200 and the tokens so far. AReaL goes on from them."""
    rid = f"conformance-{uuid.uuid4().hex}"

    async def abort() -> None:
        await target.post("/abort_request", {"rid": rid})

    last = await interrupted(target, abort, rid=rid)
    last["meta_info"]["id"].equals(rid)


@route_case
async def an_abort_of_nobody_is_no_error(target: Target) -> None:
    """``/abort_request`` of an unknown ``rid`` is 200. The request may have ended before."""
    await target.post("/abort_request", {"rid": f"conformance-{uuid.uuid4().hex}"})


@route_case
async def the_cache_is_flushed_by_get(target: Target) -> None:
    """``GET /flush_cache`` is 200 during a pause without a mode. slime asks 60 times, and then gives up."""
    async with paused(target):
        await target.get("/flush_cache")


@route_case
async def an_unknown_pause_mode_is_a_client_error(target: Target) -> None:
    """An unknown mode of a pause is 4xx. Clients repeat what fails with 5xx."""
    try:
        await target.refused("/pause_generation", {"mode": "sometimes"})
    finally:
        await target.post("/continue_generation", {})


@route_case
async def an_update_of_an_unknown_group_is_a_client_error(target: Target) -> None:
    """An update by a group that was never formed is 4xx, with a JSON object. slime repeats nothing, AReaL all."""
    lists: dict[str, object] = {"names": [], "dtypes": [], "shapes": []}
    body = {**lists, "group_name": f"conformance-{uuid.uuid4().hex}", "flush_cache": False}
    (await target.refused("/update_weights_from_distributed", body)).json().mapping()


@route_case
async def a_group_of_nobody_is_a_client_error(target: Target) -> None:
    """To destroy an unknown group is 4xx, with a JSON object. slime does so before it forms one."""
    body = {"group_name": f"conformance-{uuid.uuid4().hex}"}
    (await target.refused("/destroy_weights_update_group", body)).json().mapping()


@route_case
async def a_label_without_a_version_is_a_client_error(target: Target) -> None:
    """``/update_weight_version`` without a version is 4xx. Clients repeat what fails with 5xx."""
    await target.refused("/update_weight_version", {})


@route_case
async def all_requests_are_aborted(target: Target) -> None:
    """``/abort_request`` with ``abort_all`` ends every request in ``abort``. slime ends its rollouts so."""

    async def abort() -> None:
        await target.post("/abort_request", {"abort_all": True})

    await interrupted(target, abort)
    answer = await short(target)
    assert answer.status == 200, f"after the abort a request got {answer.shown}"


@route_case
async def an_abort_spares_other_requests(target: Target) -> None:
    """An abort of one ``rid`` leaves another request to end in ``length``. Rollouts share a server."""

    async def abort() -> None:
        await target.post("/abort_request", {"rid": "of-somebody-else"})

    params = {"max_new_tokens": target.long, "ignore_eos": True}
    body = {"input_ids": [5], "sampling_params": params, "rid": f"conformance-{uuid.uuid4().hex}"}
    last = (await target.interrupted("/generate", body, abort))[-1]
    last["meta_info"]["finish_reason"]["type"].equals("length")


@route_case
async def a_request_that_was_paused_keeps_its_context(target: Target) -> None:
    """A request that a pause interrupts, in place or with its cache freed, has the model's logprobs to its end."""
    material = target.material
    for mode in ("in_place", "retract"):

        async def pause(mode: str = mode) -> None:
            async with paused(target, mode):
                pass

        params = {"max_new_tokens": target.long, "ignore_eos": True, "temperature": 1}
        body = {"input_ids": [5], "sampling_params": params, "return_logprob": True}
        entries = (await target.interrupted("/generate", body, pause))[-1]["meta_info"][
            "output_token_logprobs"
        ].entries()
        ids, logprobs = [one[1].integer() for one in entries], [one[0].number() for one in entries]
        assert len(ids) == target.long, f"the request has {len(ids)} of {target.long} tokens"
        material.require(Sampled([5], ids, logprobs), material.model, material.pushed)
