"""SGLang's ``/generate``: its answers are those of the engine, in SGLang's words."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import struct
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from drivetrain import InferenceEngine, TokenPrompt
from drivetrain.types.outputs import Completion
from engines import HANGING, until, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [[5, 6, 7], [70, 71, 72]]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


async def answer(client: httpx.AsyncClient, params: Mapping[str, object] | None = None, **body: object) -> Any:
    response = await client.post("/generate", json={"sampling_params": params or GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **body: object) -> list[Any]:
    response = await client.post("/generate", json={"sampling_params": GREEDY, **body, "stream": True})
    assert response.status_code == 200, response.text
    *pieces, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(piece) for piece in pieces]


async def direct(engine: InferenceEngine, *prompts: list[int], **params: object) -> list[Completion]:
    given = [TokenPrompt(token_ids=tuple(one)) for one in prompts or PROMPTS]
    return (await engine.generate(given, {**GREEDY, **params})).completions


# Whole answers -------------------------------------------------------------------------------------------------------


async def test_an_answer_is_the_engines(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = await answer(
        client, input_ids=PROMPTS[0], rid="mine", return_logprob=True, top_logprobs_num=2, logprob_start_len=0
    )
    (expected,) = await direct(engine, PROMPTS[0], logprobs=2, prompt_logprobs=2)
    assert (body["text"], body["output_ids"]) == (expected.text, expected.token_ids)
    meta = body["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 8)
    assert (meta["weight_version"], meta["weight_versions"]) == (
        "initial", [{"version": "initial", "start": 0, "end": 8}],
    )  # fmt: skip
    assert meta["e2e_latency"] > 0
    assert [one[1:] for one in meta["output_token_logprobs"]] == [[one, None] for one in expected.token_ids]
    assert [one[0] for one in meta["output_token_logprobs"]] == pytest.approx(expected.logprobs, abs=1e-4)
    assert expected.top_logprobs is not None
    for found, top in zip(meta["output_top_logprobs"], expected.top_logprobs, strict=True):
        assert [one[1] for one in found] == [token_id for token_id, _ in top]
    first, *others = meta["input_token_logprobs"]
    assert first == [None, PROMPTS[0][0], None]
    assert expected.prompt_logprobs is not None
    assert [one[0] for one in others] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
    assert [one[1] for one in others] == PROMPTS[0][1:]
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == 3


async def test_a_batch_is_a_list_prompt_by_prompt(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    params = {**GREEDY, "temperature": 1.0, "sampling_seed": 3, "n": 2}
    bodies = await answer(client, params, input_ids=PROMPTS)
    expected = await direct(engine, n=2, temperature=1.0, seed=3)
    assert [one["output_ids"] for one in bodies] == [one.token_ids for one in expected]
    several = await answer(client, {**GREEDY, "n": 2}, input_ids=PROMPTS[0])
    assert len(several) == 2
    named = await answer(client, input_ids=PROMPTS, rid="batch")
    assert [one["meta_info"]["id"] for one in named] == ["batch_0", "batch_1"]


async def test_each_prompt_has_its_own_parameters(client: httpx.AsyncClient) -> None:
    bodies = await answer(
        client, input_ids=PROMPTS, rid=["a", "b"],
        sampling_params=[{"max_new_tokens": count, "ignore_eos": True} for count in (3, 5)],
        return_logprob=[True, False], return_text_in_logprobs=True,
    )  # fmt: skip
    assert [len(one["output_ids"]) for one in bodies] == [3, 5]
    assert [one["meta_info"]["id"] for one in bodies] == ["a", "b"]
    assert "output_token_logprobs" not in bodies[1]["meta_info"]
    assert all(isinstance(one[2], str) for one in bodies[0]["meta_info"]["output_token_logprobs"])


async def test_a_text_is_tokenised(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = await answer(client, text="hello", return_prompt_token_ids=True)
    (expected,) = (await engine.generate(["hello"], GREEDY)).completions
    assert (body["text"], body["prompt_token_ids"]) == (expected.text, expected.prompt_token_ids)
    response = await client.put("/generate", json={"text": "hello", "sampling_params": GREEDY})
    assert response.json()["text"] == expected.text


async def test_without_parameters_128_tokens_are_made(client: httpx.AsyncClient) -> None:
    body = (await client.post("/generate", json={"input_ids": [5], "sampling_params": {"ignore_eos": True}})).json()
    assert len(body["output_ids"]) == 128


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1},
        {"top_k": 10**8},
        dict.fromkeys(("top_k", "top_p", "stop", "stop_token_ids", "sampling_seed", "n", "min_p", "logit_bias")),
        {"spaces_between_special_tokens": False, "no_stop_trim": True, "skip_special_tokens": True},
        {"custom_params": {"return_top_p_token_ids": False, "other": 1}, "beam_width": 1, "choice": []},
        {"custom_params": "text"},
    ],
)
async def test_what_trainers_send_without_effect_is_taken(client: httpx.AsyncClient, params: dict[str, object]) -> None:
    plain = await answer(client, input_ids=[5, 6])
    given = await answer(
        client, {**GREEDY, **params}, input_ids=[5, 6], image_data=None, session_id="s", a_later_field={"x": 1}
    )
    assert given["text"] == plain["text"]


def int32(text: str) -> list[int]:
    data = base64.b64decode(text)
    return [*struct.unpack(f"<{len(data) // 4}i", data)]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_ids_left_by_top_p_are_returned_as_slime_reads_them(
    client: httpx.AsyncClient, engine: InferenceEngine, stream: bool
) -> None:
    """slime trains on the ids left to draw each token from, and expects logprobs over these alone."""
    asked = {"temperature": 1.0, "top_p": 0.5, "max_new_tokens": 8, "ignore_eos": True}
    params = {**asked, "sampling_seed": 3, "custom_params": {"return_top_p_token_ids": True}}
    body: dict[str, Any] = {"input_ids": PROMPTS[0], "sampling_params": params, "return_logprob": True}
    if stream:
        *growing, found = await events(client, **body)
        assert not any("top_p_token_ids" in one["meta_info"] for one in growing)
    else:
        found = await answer(client, **body)
    (expected,) = await direct(
        engine, PROMPTS[0], **asked, seed=3, logprobs=0, logprobs_mode="processed", return_sampling_mask=True
    )
    assert found["output_ids"] == expected.token_ids
    meta, mask = found["meta_info"], expected.sampling_mask
    assert mask is not None
    ids, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert [ids[start:end] for start, end in itertools.pairwise(offsets)] == [mask.ids(one) for one in range(8)]
    assert offsets[0] == 0
    assert all(one in mask.ids(position) for position, one in enumerate(found["output_ids"]))
    assert [one[0] for one in meta["output_token_logprobs"]] == pytest.approx(expected.logprobs, abs=1e-4)


async def test_a_stop_string_stays_in_the_ids(client: httpx.AsyncClient) -> None:
    plain = await answer(client, input_ids=[5, 6], return_logprob=True)
    stop = plain["text"][3]
    trimmed = await answer(client, {**GREEDY, "stop": stop}, input_ids=[5, 6], return_logprob=True)
    kept = await answer(client, {**GREEDY, "stop": [stop], "no_stop_trim": True}, input_ids=[5, 6])
    end = plain["text"].index(stop)
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert trimmed["text"] == plain["text"][:end]
    assert kept["text"] == plain["text"][: end + 1]
    assert trimmed["output_ids"] == kept["output_ids"] == plain["output_ids"][: len(kept["output_ids"])]
    assert len(trimmed["meta_info"]["output_token_logprobs"]) == len(trimmed["output_ids"])


async def test_a_stop_token_stays_in_the_ids(client: httpx.AsyncClient) -> None:
    plain = await answer(client, input_ids=[5, 6])
    stop = plain["output_ids"][3]
    trimmed = await answer(client, {**GREEDY, "stop_token_ids": [stop]}, input_ids=[5, 6])
    kept = await answer(client, {**GREEDY, "stop_token_ids": [stop], "no_stop_trim": True}, input_ids=[5, 6])
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert trimmed["output_ids"] == kept["output_ids"]
    assert trimmed["output_ids"][-1] == stop
    assert kept["text"].startswith(trimmed["text"])
    assert len(kept["text"]) > len(trimmed["text"])


async def test_a_prompts_logprobs_begin_where_they_are_asked_for(client: httpx.AsyncClient) -> None:
    entries = []
    for start in (0, 2, -1):
        body = await answer(client, input_ids=PROMPTS[0], return_logprob=True, logprob_start_len=start)
        entries.append(body["meta_info"]["input_token_logprobs"])
    assert [len(one) for one in entries] == [3, 1, 0]
    assert entries[1] == [[None, PROMPTS[0][2], None]]


# Streams -------------------------------------------------------------------------------------------------------------


async def test_each_event_of_a_stream_holds_all_so_far(client: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"input_ids": PROMPTS[0], "return_logprob": True, "top_logprobs_num": 1}
    whole = await answer(client, **asked)
    pieces = await events(client, **asked)
    assert pieces[-1]["text"] == whole["text"]
    assert pieces[-1]["output_ids"] == whole["output_ids"]
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    for before, after in itertools.pairwise(pieces):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert len(before["meta_info"]["output_token_logprobs"]) == len(before["output_ids"])
    assert all("index" not in one for one in pieces)


async def test_the_events_of_a_batch_say_whose_they_are(client: httpx.AsyncClient) -> None:
    params = {**GREEDY, "n": 2, "temperature": 1.0, "sampling_seed": 1}
    whole = await answer(client, params, input_ids=PROMPTS)
    pieces = await events(client, input_ids=PROMPTS, sampling_params=params)
    last = {one["index"]: one["output_ids"] for one in pieces if one["meta_info"]["finish_reason"]}
    assert last == dict(enumerate(one["output_ids"] for one in whole))


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [5], "sampling_params": {"max_tokens": 4}},
        {"input_ids": [5], "sampling_params": {"seed": 4}},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": "four"}},
        {"input_ids": [5], "sampling_params": 4},
    ],
)
async def test_a_body_that_breaks_the_contract_is_refused_in_a_text(
    client: httpx.AsyncClient, body: dict[str, object]
) -> None:
    response = await client.post("/generate", json=body)
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("wrong", [{"input_ids": "five"}, {"rid": 7}, {"stream": "yes"}, {"top_logprobs_num": True}])
async def test_a_field_of_a_wrong_type_is_refused(client: httpx.AsyncClient, wrong: dict[str, object]) -> None:
    response = await client.post("/generate", json={"input_ids": [5], **wrong})
    assert (response.status_code, response.json()["object"]) == (400, "error")
    assert next(iter(wrong)) in response.json()["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": {"top_k": 0, "temperature": 1}}, "top_k"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"repetition_penalty": 3}}, "repetition_penalty"),
        ({"sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        ({"sampling_params": {"beam_width": 4}}, "beam_width"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "Only one"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"custom_logit_processor": "gASVAAAA"}, "pickled"),
        ({"image_data": "http://x/y.png"}, "image_data"),
        ({"token_ids_logprob": [4]}, "token_ids_logprob"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"session_params": {"id": "s"}}, "session_params"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"return_entropy": True}, "return_entropy"),
        ({"return_bytes": True}, "return_bytes"),
        ({"watermark": True}, "watermark"),
        ({"lora_path": "nobody"}, "lora_path"),
        ({"text": "a"}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [[5], []]}, "input_ids[1]"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": [5] * 5000}, "input_ids"),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, "rid"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "a"),
        ({"input_ids": [[5], [6]], "lora_path": ["one", None]}, "lora_path"),
        ({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, "n differs"),
        ({"return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: httpx.AsyncClient, body: dict[str, object], says: str
) -> None:
    for stream in (False, True):
        response = await client.post("/generate", json={"input_ids": [5], **body, "stream": stream})
        assert response.status_code == 400, response.text
        assert says in response.json()["error"]["message"]


# Aborts and adapters -------------------------------------------------------------------------------------------------


async def test_an_abort_reaches_all_ids_that_begin_with_it(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    running = {
        rid: asyncio.create_task(answer(client, LONG, input_ids=[5, 6], rid=rid, return_logprob=True))
        for rid in ("task", "task-2", "other")
    }
    await until_running(engine, 3)
    for body in ({"rid": "tas"}, {"rid": "unknown"}, {"rid": ""}, {}):
        response = await client.post("/abort_request", json=body)
        assert (response.status_code, response.content) == (200, b""), "an id that is unknown is no error"
    assert not any(one.done() for one in running.values()), "none of these names a request"
    assert (await client.post("/abort_request", json={"rid": "task"})).status_code == 200
    for rid in ("task", "task-2"):
        meta = (await running[rid])["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert isinstance(meta["finish_reason"]["message"], str)
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 400
    assert not running["other"].done()
    await client.post("/abort_request", json={"abort_all": True})
    assert (await running["other"])["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_request_can_be_posted_again_after_an_abort(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    whole = await answer(client, LONG, input_ids=[5, 6])
    running = asyncio.create_task(answer(client, LONG, input_ids=[5, 6], return_logprob=True))
    await until_running(engine, 1)
    await client.post("/pause_generation", json={})
    part = await running
    assert part["meta_info"]["finish_reason"]["type"] == "abort"
    ids = [one[1] for one in part["meta_info"]["output_token_logprobs"]]
    again = asyncio.create_task(
        answer(client, {**LONG, "max_new_tokens": 400 - len(ids)}, input_ids=[5, 6, *ids], return_logprob=True)
    )
    await asyncio.sleep(0.05)
    assert not again.done(), "a request that arrives in a pause waits"
    await client.post("/continue_generation", json={})
    assert ids + (await again)["output_ids"] == whole["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    client: httpx.AsyncClient, engine: InferenceEngine, stream: bool
) -> None:
    asked = {"input_ids": [5], "sampling_params": {**LONG, "max_new_tokens": 900}, "stream": stream}
    running = asyncio.create_task(client.post("/generate", json=asked))
    await until_running(engine, 1)
    running.cancel()

    async def idle() -> bool:
        return (await engine.stats()).running == 0

    async with asyncio.timeout(HANGING):
        await until(idle)
    assert running.cancelled()


async def test_an_adapter_is_named_by_lora_path(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    plain = await answer(client, input_ids=PROMPTS[0])
    adapted = await answer(client, input_ids=PROMPTS[0], lora_path="one")
    assert adapted["output_ids"] != plain["output_ids"]
    both = await answer(client, input_ids=[PROMPTS[0], PROMPTS[0]], lora_path=["one", "one"])
    assert [one["output_ids"] for one in both] == [adapted["output_ids"]] * 2
    response = await client.post("/unload_lora_adapter", json={"lora_name": "one"})
    assert response.json()["success"] is True
