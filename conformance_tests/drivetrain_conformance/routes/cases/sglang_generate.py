"""SGLang's ``/generate``."""

from __future__ import annotations

from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.openai import BIG_SEED
from drivetrain_conformance.routes.server_answers import Field
from drivetrain_conformance.routes.server_under_test import Target

SHORT: Final = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


async def generate(target: Target, params: object = SHORT, **fields: object) -> Field:
    """Return the answer to a request of at most four tokens."""
    return (await target.post("/generate", {"input_ids": [5, 6], "sampling_params": params, **fields})).json()


@route_case
async def meta_info_has_the_fields_that_trainers_read(target: Target) -> None:
    """``meta_info`` has id, finish reason, counts and weight version. slime and AReaL read them."""
    answer = await generate(target)
    answer["text"].text()
    meta = answer["meta_info"]
    meta["id"].text()
    meta["prompt_tokens"].equals(2)
    meta["completion_tokens"].equals(len(answer["output_ids"].ids()))
    meta["cached_tokens"].integer()
    meta["weight_version"].text()


@route_case
async def tokens_come_with_finite_logprobs(target: Target) -> None:
    """``output_token_logprobs`` has ``[logprob, id, text or null]`` for each id of ``output_ids``.

    slime and AReaL take the ids from there.
    """
    answer = await generate(target, return_logprob=True)
    entries = answer["meta_info"]["output_token_logprobs"].entries()
    ids = [entry[1].integer() for entry in entries]
    answer["output_ids"].equals(ids)
    for entry in entries:
        assert entry[0].number() <= 0, entry.shown
        assert len(entry.entries()) == 3, f"{entry.path} is {entry.shown}; expected three entries"


@route_case
async def prompt_logprobs_begin_with_null(target: Target) -> None:
    """``input_token_logprobs`` from position 0 has an entry for each id of the prompt, the first logprob null.

    AReaL scores by it, and slime drops the first.
    """
    answer = await generate(target, input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=0)
    entries = answer["meta_info"]["input_token_logprobs"].entries()
    ids = [entry[1].integer() for entry in entries]
    assert ids == [5, 6, 7], f"input_token_logprobs has the ids {ids}; the prompt is [5, 6, 7]"
    assert entries[0][0].is_null(), f"the first logprob is {entries[0][0].shown}; expected null"
    for entry in entries[1:]:
        entry[0].number()


@route_case
async def a_length_says_how_long(target: Target) -> None:
    """A request that reaches ``max_new_tokens`` ends in ``{"type": "length", "length": n}``. slime matches the type."""
    reason = (await generate(target))["meta_info"]["finish_reason"]
    reason["type"].equals("length")
    reason["length"].equals(4)


@route_case
async def a_stop_token_is_named_and_kept(target: Target) -> None:
    """A stop token ends in ``{"type": "stop", "matched": id}``, and is the last id. Trainers train on it."""
    fields = {"max_new_tokens": 4, "temperature": 0}
    token = (await generate(target))["output_ids"].ids()[0]
    answer = await generate(target, {**fields, "stop_token_ids": [token]}, return_logprob=True)
    reason = answer["meta_info"]["finish_reason"]
    reason["type"].equals("stop")
    reason["matched"].equals(token)
    answer["output_ids"].equals([token])
    answer["meta_info"]["output_token_logprobs"][0][1].equals(token)


@route_case
async def a_batch_is_a_list_in_order(target: Target) -> None:
    """A list of prompts is answered by a list in their order. SGLang's own clients send such."""
    alone = [(await generate(target, input_ids=prompt))["output_ids"].ids() for prompt in ([5, 6], [7])]
    answers = (await generate(target, input_ids=[[5, 6], [7]])).entries()
    found = [answer["output_ids"].ids() for answer in answers]
    assert found == alone, f"the list holds {found}; alone the prompts give {alone}"


@route_case
async def requests_keep_their_ids(target: Target) -> None:
    """``meta_info.id`` is the request's ``rid``. slime and AReaL abort by it."""
    answer = await generate(target, rid="conformance-of-routes")
    answer["meta_info"]["id"].equals("conformance-of-routes")


@route_case
async def every_field_may_be_null(target: Target) -> None:
    """Sampling parameters, media and ids may be null. AReaL sends ``image_data: null``, slime ``stop: null``."""
    names = ("stop", "stop_token_ids", "temperature", "top_k", "top_p", "sampling_seed")
    params = {"max_new_tokens": 4, **dict.fromkeys(names)}
    await generate(target, params, image_data=None, rid=None, lora_path=None)


@route_case
async def slimes_parameters_are_taken(target: Target) -> None:
    """The sampling parameters of slime are taken, ``top_k: -1`` and ``no_stop_trim`` among them."""
    more = {"top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None, "skip_special_tokens": True}
    await generate(target, {**SHORT, **more, "no_stop_trim": True, "spaces_between_special_tokens": False})


@route_case
async def areals_parameters_are_taken(target: Target) -> None:
    """The sampling parameters of AReaL are taken, ``top_k: 100000000`` among them."""
    more = {"top_p": 1.0, "top_k": 10**8, "ignore_eos": False, "frequency_penalty": 0.0, "stop_token_ids": []}
    await generate(target, {**SHORT, **more, "skip_special_tokens": True}, image_data=None)


@route_case
async def unknown_fields_are_ignored(target: Target) -> None:
    """Unknown fields beside ``sampling_params`` are ignored. Trainers send fields of later releases."""
    await generate(target, of_a_later_release=1)


@route_case
async def seeds_have_63_bits(target: Target) -> None:
    """``sampling_seed`` may have 63 bits, and two such requests sample alike. Trainers draw such seeds."""
    params = {"max_new_tokens": 8, "temperature": 1, "sampling_seed": BIG_SEED}
    first = (await generate(target, params))["output_ids"].ids()
    (await generate(target, params))["output_ids"].equals(first)


@route_case
async def a_stream_ends_in_a_finish_reason_and_done(target: Target) -> None:
    """A stream's last event has the finish reason, earlier ones null, and ``[DONE]`` follows. Gateways read so."""
    async with target.streaming("/generate", {"input_ids": [5, 6], "sampling_params": SHORT}) as stream:
        events = await stream.rest()
    assert stream.is_done, "the stream ends without [DONE]"
    events[-1]["meta_info"]["finish_reason"]["type"].equals("length")
    for event in events[:-1]:
        assert event["meta_info"]["finish_reason"].is_null(), event.shown


@route_case
async def an_unknown_parameter_is_a_client_error(target: Target) -> None:
    """An unknown key of ``sampling_params`` is 4xx, with a JSON object. slime repeats any failure 60 times."""
    body = {"input_ids": [5], "sampling_params": {"of_nobody": 4}}
    (await target.refused("/generate", body)).json().mapping()


@route_case
async def a_wrong_type_is_a_client_error(target: Target) -> None:
    """A parameter of a wrong type is 4xx, with a JSON object. Clients repeat what fails with 5xx."""
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": "four"}}
    (await target.refused("/generate", body)).json().mapping()


@route_case
async def no_prompt_is_a_client_error(target: Target) -> None:
    """A request without a prompt is 4xx, with a JSON object. Clients repeat what fails with 5xx."""
    (await target.refused("/generate", {"sampling_params": SHORT})).json().mapping()


@route_case
async def no_json_is_a_client_error(target: Target) -> None:
    """A body that is no JSON is 4xx. Clients repeat what fails with 5xx."""
    await target.refused("/generate", '{"input_ids":')
