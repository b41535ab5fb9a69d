"""The routes that generate: what the engine answers, as vLLM writes it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from documented_answers import Document
from drivetrain import InferenceEngine, SamplingParams, TokenPrompt, create_engine
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.testing import tiny_model
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.vllm.payloads import read_chat
from engines import HANGING
from models_with_tools import model_that_reads_tools

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [[5, 6, 7, 8], [90, 91]]
GREEDY = {"temperature": 0, "max_tokens": 8}
SCORED = SamplingParams(temperature=0, max_new_tokens=8, prompt_logprobs=1, return_prompt_ranks=True)


async def answer(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, path: str, **body: object) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *pieces, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(piece) for piece in pieces]


async def direct(engine: InferenceEngine, **params: object) -> Any:
    fields = {"temperature": 0, "max_new_tokens": 8, **params}
    return (await engine.generate([TokenPrompt(token_ids=tuple(one)) for one in PROMPTS], fields)).completions


# Completions ---------------------------------------------------------------------------------------------------------


async def test_completions_are_those_of_the_engine(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = await answer(
        client, "/v1/completions", prompt=PROMPTS, n=2, **{**GREEDY, "temperature": 1.0}, seed=3, logprobs=0,
        return_token_ids=True, return_tokens_as_token_ids=True,
    )  # fmt: skip
    expected = await direct(engine, n=2, temperature=1.0, seed=3, logprobs=0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3], "prompt by prompt, sample by sample"
    for choice, completion in zip(body["choices"], expected, strict=True):
        assert choice["token_ids"] == completion.token_ids
        assert choice["prompt_token_ids"] == completion.prompt_token_ids
        assert choice["text"] == completion.text
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == pytest.approx(completion.logprobs, abs=1e-4)
        assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in completion.token_ids]
        assert [list(one) for one in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]], (
            "without k, vLLM writes dictionaries of the sampled token, and TRL zips them"
        )
    assert body["usage"]["prompt_tokens"] == 6


async def test_ids_come_only_if_they_are_asked_for(client: httpx.AsyncClient) -> None:
    (choice,) = (await answer(client, "/v1/completions", prompt=[5], **GREEDY))["choices"]
    assert choice["token_ids"] is None
    assert choice["prompt_token_ids"] is None
    body = await answer(client, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **GREEDY)
    assert body["prompt_token_ids"] is None
    assert body["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    "tolerated",
    [
        {"top_k": -1},
        {"top_k": None, "top_p": None, "seed": None, "stop": None, "n": None, "logit_bias": None},
        {"use_beam_search": False, "truncate_prompt_tokens": None, "bad_words": [], "suffix": ""},
        {"a_field_of_a_later_release": {"x": 1}, "cache_salt": "step-3", "session_id": "s", "stream_interval": 1},
        {"model": "policy"},
        {"stream": False, "stream_options": {}},
        {"stream_options": None},
        {"include_stop_str_in_output": True},
        {"store": True, "service_tier": "flex", "metadata": {"run": 7}, "user": 7, "verbosity": "low"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "watermarking": False},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
    ],
)
async def test_what_changes_nothing_is_taken(client: httpx.AsyncClient, tolerated: dict[str, object]) -> None:
    plain = await answer(client, "/v1/completions", prompt=[5, 6], **GREEDY)
    given = await answer(client, "/v1/completions", prompt=[5, 6], **{**GREEDY, **tolerated})
    assert given["choices"][0]["text"] == plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("refused", "param"),
    [
        ({"bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}, "repetition_detection"),
        ({"watermarking": True}, "watermarking"),
        ({"return_token_offsets": True}, "return_token_offsets"),
        ({"best_of": 2}, "best_of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format"),
        ({"prompt": []}, "prompt"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, refused: dict[str, object], param: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": [5], **GREEDY, **refused})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["param"].startswith(param)
    assert "\n" not in error["message"]
    assert response.json()["drivetrain"] == {"error": "InvalidRequest"}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/absent"}])
async def test_a_schema_that_cannot_be_followed_is_refused_on_every_route(
    client: httpx.AsyncClient, schema: dict[str, object]
) -> None:
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {**said, "response_format": form},
        "/v1/chat/completions/render": {**said, "response_format": form},
        "/sessions/s/v1/chat/completions": {**said, "response_format": form},
        "/sessions/s/v1/messages": {**said, "output_format": {"type": "json_schema", "schema": schema}},
        "/sessions/s/v1/responses": {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        },
        "/generate": {"text": "a", "sampling_params": {"json_schema": json.dumps(schema)}},
    }
    for path, body in asked.items():
        response = await client.post(path, json=body)
        assert response.status_code == 400, f"{path}: {response.text}"
        assert "$ref" in response.json()["error"]["message"], path


async def test_fields_that_leave_no_token_to_draw_are_the_requests_fault(client: httpx.AsyncClient) -> None:
    fields = {"structured_outputs": {"regex": "a"}, "min_tokens": 4, "max_tokens": 8}
    response = await client.post("/v1/completions", json={"prompt": [5], **fields})
    assert response.status_code == 400
    assert response.json()["drivetrain"] == {"error": "NoTokenAllowed"}


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": [5], "model": "another"})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"
    for name in ("../one", "one/..", ".", "", "/etc"):
        response = await client.post("/v1/completions", json={"prompt": [5], "model": name})
        assert response.status_code == 404, name


async def test_a_negative_seed_is_one(client: httpx.AsyncClient) -> None:
    ids = [
        (await answer(client, "/v1/completions", prompt=[5], seed=seed, return_token_ids=True, max_tokens=16))
        for seed in (-(2**63), -7, -7)
    ]
    texts = [one["choices"][0]["token_ids"] for one in ids]
    assert texts[1] == texts[2] != texts[0]


async def test_true_asks_for_logprobs_as_a_number_does(client: httpx.AsyncClient) -> None:
    bodies = [
        await answer(client, "/v1/completions", prompt=[5], **GREEDY, logprobs=logprobs) for logprobs in (True, 1)
    ]
    assert bodies[0]["choices"][0]["logprobs"] == bodies[1]["choices"][0]["logprobs"] is not None


async def test_masks_and_grammars_hold(client: httpx.AsyncClient) -> None:
    body = await answer(
        client, "/v1/completions", prompt=[5], max_tokens=6, allowed_token_ids=[70, 71], return_token_ids=True
    )
    assert set(body["choices"][0]["token_ids"]) <= {70, 71}


async def test_a_prompts_logprobs_name_its_tokens(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = await answer(client, "/v1/completions", prompt=PROMPTS[0], **GREEDY, prompt_logprobs=1)
    (expected,) = (await engine.generate([PROMPTS[0]], SCORED)).completions
    assert expected.prompt_logprobs is not None
    assert expected.prompt_ranks is not None
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    scores = zip(expected.prompt_logprobs[1:], expected.prompt_ranks[1:], strict=True)
    for entries, token_id, (logprob, rank) in zip(others, PROMPTS[0][1:], scores, strict=True):
        assert next(iter(entries)) == str(token_id)
        assert entries[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert entries[str(token_id)]["rank"] == rank
        assert min(entry["rank"] for entry in entries.values()) == 1
    assert max(rank or 0 for rank in expected.prompt_ranks) > 1, "every token is the most likely one"


async def test_a_stop_string_is_the_reason(client: httpx.AsyncClient) -> None:
    whole = (await answer(client, "/v1/completions", prompt=[5, 6], **GREEDY))["choices"][0]["text"]
    stop = whole[3]
    (choice,) = (await answer(client, "/v1/completions", prompt=[5, 6], **GREEDY, stop=stop))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == whole[: whole.index(stop)]


# Streams -------------------------------------------------------------------------------------------------------------


async def test_a_stream_put_together_is_the_whole_answer(client: httpx.AsyncClient) -> None:
    asked = {"prompt": PROMPTS, "n": 2, "seed": 4, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    whole = await answer(client, "/v1/completions", **asked)
    pieces = await events(client, "/v1/completions", **asked, stream_options={"include_usage": True})
    *pieces, last = pieces
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [one["choices"][0] for one in pieces if one["choices"][0]["index"] == choice["index"]]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"], "the first chunk tells the prompt"
        assert all(one["prompt_token_ids"] is None for one in mine[1:])
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [token_id for one in mine for token_id in one["token_ids"]] == choice["token_ids"]
        logprobs = [value for one in mine if one["logprobs"] for value in one["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


async def test_each_chunk_tells_the_usage_and_the_first_the_ids_of_a_prompt_with_media() -> None:
    png = io.BytesIO()
    Image.new("RGB", (28, 28)).save(png, "png")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": content}], **GREEDY, "return_token_ids": True}
    seeing = create_engine("transformers", model=str(tiny_model("qwen2_vl")))
    async with seeing as engine, Server(engine, ServerConfig(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
            streamed = {**body, "stream": True, "stream_options": options}
            text = (await client.post("/v1/chat/completions", json=streamed)).text
            whole = (await client.post("/v1/chat/completions", json=body)).json()
    *chunks, last = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert len(chunks) > 1
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    sampled = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert sampled == sorted(sampled)
    assert sampled[-1] == last["usage"]["completion_tokens"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"], "with the image's placeholders"
    assert len(whole["prompt_token_ids"]) == last["usage"]["prompt_tokens"]


async def test_each_chunk_tells_the_usage_so_far_if_it_is_asked_to(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    of_each: dict[str, tuple[dict[str, object], list[int]]] = {
        "/v1/completions": ({"prompt": ["ab", "cde"], "n": 2, **GREEDY}, [2, 2, 3, 3]),
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "n": 2, **GREEDY}, [20, 20]),
        "/inference/v1/generate": ({"token_ids": [5, 6, 7], "sampling_params": {"n": 2, **GREEDY}}, [3, 3]),
    }
    for path, (body, prompts) in of_each.items():
        response = await client.post(path, json={**body, "stream": True, "stream_options": options})
        pieces = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        *chunks, last = pieces
        assert last["choices"] == []
        sampled = [0] * len(prompts)
        for piece in chunks:
            (choice,) = piece["choices"]
            usage = piece["usage"]
            index = choice["index"]
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (
                prompts[index], prompts[index] + usage["completion_tokens"],
            ), path  # fmt: skip
            assert usage["completion_tokens"] >= sampled[index]
            sampled[index] = usage["completion_tokens"]
            assert choice.get("token_ids") is None or path == "/inference/v1/generate"
        assert sum(sampled) == last["usage"]["completion_tokens"] > 0
        plain = await client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        found = [json.loads(line[6:]) for line in plain.text.split("\n\n") if line.startswith("data: {")]
        assert {str(piece["usage"]) for piece in found[:-1]} == {"None"}


async def test_a_stream_that_is_refused_has_a_status(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": [5], "stream": True, "temperature": -1})
    assert response.status_code == 400
    response = await client.post("/v1/completions", json={"prompt": [10**6], "stream": True})
    assert response.status_code == 400
    assert "prompt" in response.json()["error"]["param"]


# Chat ----------------------------------------------------------------------------------------------------------------


async def test_chats_are_those_of_the_engine(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = await answer(
        client, "/v1/chat/completions", messages=messages, **GREEDY, logprobs=True, top_logprobs=2, tool_choice="auto",
        return_token_ids=True, return_tokens_as_token_ids=True, reasoning_effort="low", tools=None,
    )  # fmt: skip
    (expected,) = (
        await engine.generate([messages], SamplingParams(temperature=0, max_new_tokens=8, logprobs=2))
    ).completions
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.token_ids
    assert choice["message"]["content"] == expected.text
    assert choice["message"]["tool_calls"] == []
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token_id}" for token_id in expected.token_ids]
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    pieces = await events(client, "/v1/chat/completions", messages=messages, **GREEDY, return_token_ids=True)
    assert pieces[0]["prompt_token_ids"] == expected.prompt_token_ids
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces) == expected.text
    assert [i for one in pieces for i in one["choices"][0]["token_ids"] or []] == expected.token_ids


# Token ids in, token ids out -----------------------------------------------------------------------------------------


async def test_what_would_change_a_chats_prompt_is_refused(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hello"}]
    flags = ("add_special_tokens", "echo", "return_prompt_text", "return_mm_kwargs")
    for field in ("chat_template", "documents", "mm_processor_kwargs", "mm_payload", *flags):
        value = True if field in flags else ["x"]
        response = await client.post("/v1/chat/completions", json={"messages": messages, field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_labels_of_a_chat_are_taken_with_any_value(client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
    labels = {"prompt_cache_key": "k", "store": True, "verbosity": "low", "service_tier": "flex", "metadata": {"a": 1}}
    plain = await answer(client, "/v1/chat/completions", **chat)
    given = await answer(client, "/v1/chat/completions", **chat, **labels)
    assert given["choices"][0]["message"] == plain["choices"][0]["message"]


def test_the_template_gets_the_reasoning_effort_if_it_reads_it() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
    assert read_chat(body, "{{ reasoning_effort }}", stream=False).chat_template_kwargs == {"reasoning_effort": "low"}
    assert read_chat(body, "{{ messages }}", stream=False).chat_template_kwargs == {}
    given = {**body, "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert read_chat(given, "{{ reasoning_effort }}", stream=False).chat_template_kwargs["reasoning_effort"] == "high"


def test_the_template_is_told_not_to_think_for_an_effort_of_none() -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "a"}]}
    template = "{{ enable_thinking }}"
    for effort, thinks in (("none", False), ("low", True)):
        asked = read_chat({**body, "reasoning_effort": effort}, template, stream=False)
        assert asked.chat_template_kwargs == {"enable_thinking": thinks}
    given = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert read_chat({**body, **given}, template, stream=False).chat_template_kwargs == {"enable_thinking": True}


MISPLACED: list[tuple[dict[str, object], str]] = [
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {"include_usage": False}}, "stream_options"),
    ({"stream": True, "stream_options": "usage"}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "maybe"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
]


@pytest.mark.parametrize(("fields", "param"), MISPLACED)
async def test_options_of_a_stream_are_read_or_refused(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    said = {"messages": [{"role": "user", "content": "a"}], **GREEDY}
    for path, body in (
        ("/v1/completions", {"prompt": [5], **GREEDY}),
        ("/v1/chat/completions", said),
        ("/sessions/options/v1/chat/completions", said),
        ("/v1/completions/render", {"prompt": [5], **GREEDY}),
        ("/v1/chat/completions/render", said),
    ):
        response = await client.post(path, json={**body, **fields})
        assert response.status_code == 400, path
        assert response.json()["error"]["param"] == param, path


@pytest.mark.parametrize("options", ["usage", {"include_usage": "maybe"}, {"continuous_usage_stats": 1}])
async def test_wrong_options_of_a_stream_of_ids_are_refused(client: httpx.AsyncClient, options: object) -> None:
    body = {"token_ids": [5], "sampling_params": GREEDY, "stream": True, "stream_options": options}
    response = await client.post("/inference/v1/generate", json=body)
    assert response.status_code == 400
    assert "stream_options" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": -1}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"reasoning_effort": {"effort": "low"}}, "reasoning_effort"),
    ],
)
async def test_fields_of_a_chat_that_cannot_be_read_are_refused(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    response = await client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_ids_in_ids_out(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "output_kind": 2, "detokenize": False}
    body = await answer(
        client, "/inference/v1/generate", token_ids=PROMPTS[0], sampling_params=params, request_id="mine"
    )
    (expected, _) = await direct(engine, logprobs=1)
    (choice,) = body["choices"]
    assert body["request_id"].endswith("mine")
    assert choice["token_ids"] == expected.token_ids
    assert choice["weight_versions"] == [{"version": "initial", "start": 0, "end": 8}]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{one['token_id']}" for one in content], (
        "clients of earlier releases read the string, later ones the number"
    )
    assert [one["token_id"] for one in content] == expected.token_ids
    assert [one["logprob"] for one in content] == pytest.approx(expected.logprobs, abs=1e-4)
    pieces = await events(client, "/inference/v1/generate", token_ids=PROMPTS[0], sampling_params=params)
    assert [i for one in pieces for i in one["choices"][0]["token_ids"]] == expected.token_ids


async def test_given_ids_are_scored_at_the_prompts_tokens(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    prompt, ids = [5, 9, 7, 60, 61], [[1, 2, -1], [3, 3, 4]]
    params = {"max_tokens": 1, "prompt_logprob_token_ids": ids, "prompt_logprob_start": 2}
    body = await answer(client, "/inference/v1/generate", token_ids=prompt, sampling_params=params)
    found = np.load(io.BytesIO(base64.b64decode(body["prompt_token_id_logprobs"])), allow_pickle=False)
    (scored,) = (await engine.compute_logprobs([prompt], at=[np.maximum(ids, 0)], last_n=2)).completions
    assert scored.scores is not None
    expected = scored.scores.at_logprobs.copy()
    expected[0, 2] = -np.inf
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.dtype == np.float32
    assert len(body["choices"][0]["token_ids"]) == 1
    plain = await answer(client, "/inference/v1/generate", token_ids=prompt, sampling_params={"max_tokens": 1})
    assert plain["prompt_token_id_logprobs"] is None


@pytest.mark.parametrize(("n", "more"), [(1, {}), (3, {}), (1, {"prompt_logprobs": 1}), (3, {"prompt_logprobs": 0})])
async def test_scores_and_tokens_come_of_one_request_of_the_engine(
    client: httpx.AsyncClient,
    engine: InferenceEngine,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    more: dict[str, object],
) -> None:
    prompt, ids = [5, 9, 7, 60, 61], [[1, 2], [3, 3], [4, 5], [6, 7]]
    asked: list[GenerateRequest] = []
    generate = engine.parts.backend.generate

    async def counted(request: GenerateRequest) -> GenerateResult:
        asked.append(request)
        return await generate(request)

    monkeypatch.setattr(engine.parts.backend, "generate", counted)
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 0, "n": n, **more}
    both = params | {"prompt_logprob_token_ids": ids}
    body = await answer(client, "/inference/v1/generate", token_ids=prompt, sampling_params=both, request_id="mine")
    assert len(asked) == n
    assert sum(request.scoring is not None for request in asked) == 1, "the first completion alone is scored"
    plain = await answer(client, "/inference/v1/generate", token_ids=prompt, sampling_params=params)
    assert [one["token_ids"] for one in body["choices"]] == [one["token_ids"] for one in plain["choices"]]
    assert body["prompt_logprobs"] == plain["prompt_logprobs"]
    found = np.load(io.BytesIO(base64.b64decode(body["prompt_token_id_logprobs"])), allow_pickle=False)
    (scored,) = (await engine.compute_logprobs([prompt], at=[ids], last_n=4)).completions
    assert scored.scores is not None
    np.testing.assert_allclose(found, scored.scores.at_logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "more"),
    [
        ([[1], [2]], {}),
        ([[1], [2], [3]], {"prompt_logprob_start": 1}),
        ([[1], [2], [3, 4]], {}),
        ([[], [], []], {}),
        ([[1], [2], [-2]], {}),
        ([[1], [2], [260]], {}),
        ([[1], [2], [0.5]], {}),
        ([[1], [2], ["a"]], {}),
        ("ids", {}),
        (None, {"prompt_logprob_start": 0}),
        ([[1], [2], [3]], {"prompt_logprob_start": -1}),
        ([[1], [2], [3]], {"prompt_logprob_start": True}),
    ],
)
async def test_wrong_ids_to_score_are_refused(client: httpx.AsyncClient, ids: object, more: dict[str, object]) -> None:
    params = {"max_tokens": 1, "prompt_logprob_token_ids": ids, **more}
    response = await client.post("/inference/v1/generate", json={"token_ids": [5, 6, 7, 8], "sampling_params": params})
    assert response.status_code == 400
    assert "prompt_logprob_" in response.json()["error"]["message"]


async def test_streams_score_no_ids(client: httpx.AsyncClient) -> None:
    params = {"max_tokens": 1, "prompt_logprob_token_ids": [[1]]}
    body = {"token_ids": [5, 6], "sampling_params": params, "stream": True}
    assert (await client.post("/inference/v1/generate", json=body)).status_code == 400


async def test_without_max_tokens_it_goes_up_to_the_context(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    params = {"temperature": 0, "max_tokens": None, "ignore_eos": True}
    length = engine.model_info.context_length
    prompt = [5] * (length - 20)
    body = await answer(client, "/inference/v1/generate", token_ids=prompt, sampling_params=params)
    assert len(body["choices"][0]["token_ids"]) == 20


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [5]}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": None}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"top_p": 2}}, "top_p"),
        ({"token_ids": [5], "sampling_params": {}, "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [5], "sampling_params": {}, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [5], "sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"token_ids": [5], "sampling_params": {"trace_decode_token_ids": [5]}}, "trace_decode_token_ids"),
        ({"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [10**6], "sampling_params": {}}, "token_ids"),
    ],
)
async def test_a_wrong_request_for_ids_is_refused(client: httpx.AsyncClient, body: object, says: str) -> None:
    response = await client.post("/inference/v1/generate", json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


async def test_text_to_ids_and_back(client: httpx.AsyncClient, engine: InferenceEngine) -> None:
    body = await answer(client, "/tokenize", prompt="hello", return_token_strs=True)
    assert (body["count"], body["max_model_len"]) == (5, engine.model_info.context_length)
    assert await answer(client, "/detokenize", tokens=body["tokens"]) == {"prompt": "hello"}
    messages = [{"role": "user", "content": "hello"}]
    chat = await answer(client, "/tokenize", messages=messages)
    answered = await answer(client, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert chat["tokens"] == answered["prompt_token_ids"]
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"messages": 3}), ("/detokenize", {"tokens": ["a"]})):
        assert (await client.post(path, json=wrong)).status_code == 400


# Demanded calls ------------------------------------------------------------------------------------------------------

_SURE: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": _SURE}} for name in ("tell", "ask")]
TELL = {"type": "function", "function": {"name": "tell"}}
DEMANDING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": TOOLS,
    "max_tokens": 400,
    "n": 2,
    "seed": 3,
    # Ends an array as soon as it may, and forbids spaces: a model with random weights would go on.
    "logit_bias": {"93": 100, "9": -100, "10": -100, "13": -100, "32": -100},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model is shown the tools. Its answers are compared with the server's document."""
    folder = model_that_reads_tools(tmp_path_factory.mktemp("models") / "tools")
    async with (
        create_engine("transformers", model=str(folder)) as engine,
        Server(engine, ServerConfig(port=0)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        document = Document((await client.get("/openapi.json")).json())

        async def compare(response: httpx.Response) -> None:
            await response.aread()
            assert document.errors(response) == []

        client.event_hooks = {"response": [compare]}
        yield client


@pytest.mark.parametrize(
    ("fields", "reason", "most"),
    [
        ({"tool_choice": "required"}, "tool_calls", 100),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls", 1),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_calls", 100),
        ({"tool_choice": TELL}, "stop", 1),
    ],
)
async def test_a_demanded_call_comes(told: httpx.AsyncClient, fields: dict[str, Any], reason: str, most: int) -> None:
    asked = {**DEMANDING, **fields}
    body = await answer(told, "/v1/chat/completions", **asked)
    pieces = await events(told, "/v1/chat/completions", **asked)
    for choice in body["choices"]:
        calls = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", reason)
        assert 1 <= len(calls) <= most
        for call in calls:
            assert call["function"]["name"] in (("tell",) if fields["tool_choice"] == TELL else ("tell", "ask"))
            assert json.loads(call["function"]["arguments"]).keys() == {"sure"}
        own = [one for piece in pieces for one in piece["choices"] if one["index"] == choice["index"]]
        deltas = [part for one in own for part in one["delta"].get("tool_calls", [])]
        assert [part["function"]["name"] for part in deltas if "id" in part] == [c["function"]["name"] for c in calls]
        for index, call in enumerate(calls):
            arguments = [part["function"]["arguments"] for part in deltas if part["index"] == index]
            assert "".join(arguments) == call["function"]["arguments"]
            assert len(arguments) > 1, "arguments come as they are sampled"
        assert own[-1]["finish_reason"] == reason
        assert not any(one["delta"].get("content") for one in own)


@pytest.mark.parametrize(
    ("choice", "parameters", "kind"),
    [
        ("required", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, list),
        ("required", {"type": "string", "enum": ["a}", "b]"]}, str),
        ("required", {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "boolean"}]}, int),
        ("required", None, dict),
        (TELL, {"type": "boolean"}, bool),
    ],
)
async def test_arguments_of_a_demanded_call_are_any_json(
    told: httpx.AsyncClient, parameters: object, kind: type, choice: object
) -> None:
    tools = [{"type": "function", "function": {"name": "tell", "parameters": parameters}}]
    bias = {**DEMANDING["logit_bias"], "34": 0 if kind is str else -100, "125": 100}
    asked = {**DEMANDING, "tools": tools, "tool_choice": choice, "n": 1, "logit_bias": bias}
    body = await answer(told, "/v1/chat/completions", **asked)
    pieces = await events(told, "/v1/chat/completions", **asked)
    call, *_ = body["choices"][0]["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), kind)
    deltas = [part for piece in pieces for one in piece["choices"] for part in one["delta"].get("tool_calls", [])]
    streamed = "".join(part["function"]["arguments"] for part in deltas if part["index"] == 0)
    assert streamed == call["function"]["arguments"]


@pytest.mark.parametrize("parameters", [True, False, [], "object"])
async def test_parameters_are_an_object(told: httpx.AsyncClient, parameters: object) -> None:
    tools = [{"type": "function", "function": {"name": "tell", "parameters": parameters}}]
    response = await told.post("/v1/chat/completions", json={**DEMANDING, "tools": tools, "tool_choice": "required"})
    assert response.status_code == 400
    assert "parameters is no JSON schema" in response.text


async def test_a_demanded_call_that_was_cut_off_is_left_out(told: httpx.AsyncClient) -> None:
    body = await answer(told, "/v1/chat/completions", **{**DEMANDING, "max_tokens": 3}, tool_choice="required")
    for choice in body["choices"]:
        assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([], "length")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": TELL, "structured_outputs": {"regex": "a"}}, "tool_choice"),
    ],
)
async def test_a_call_that_cannot_be_demanded_is_refused(
    told: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    response = await told.post("/v1/chat/completions", json={**DEMANDING, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


# Logprobs of the whole vocabulary, and echo --------------------------------------------------------------------------


async def test_minus_one_asks_for_the_logprobs_of_the_whole_vocabulary(
    client: httpx.AsyncClient, engine: InferenceEngine
) -> None:
    size = engine.model_info.vocab_size
    short = {"temperature": 0, "max_tokens": 2, "return_tokens_as_token_ids": True}
    messages = [{"role": "user", "content": "a"}]
    text = await answer(client, "/v1/completions", prompt=[5, 6], **short, logprobs=-1, prompt_logprobs=-1)
    chat = await answer(client, "/v1/chat/completions", messages=messages, **short, logprobs=True, top_logprobs=-1)
    params = {"temperature": 0, "max_tokens": 2, "logprobs": -1, "prompt_logprobs": -1}
    ids = await answer(client, "/inference/v1/generate", token_ids=[5, 6], sampling_params=params)
    (choice,) = text["choices"]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"]] == [size] * 2
    assert [one and len(one) for one in choice["prompt_logprobs"]] == [None, size]
    assert [len(one["top_logprobs"]) for one in chat["choices"][0]["logprobs"]["content"]] == [size] * 2
    assert [len(one["top_logprobs"]) for one in ids["choices"][0]["logprobs"]["content"]] == [size] * 2
    assert [one and len(one) for one in ids["prompt_logprobs"]] == [None, size]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("completions", {"logprobs": -2}, "logprobs"),
        ("completions", {"prompt_logprobs": -2}, "prompt_logprobs"),
        ("completions", {"logprobs": 10**6}, "logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"top_logprobs": -1}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ],
)
async def test_other_counts_of_logprobs_are_refused(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str
) -> None:
    body = {"prompt": [5], "messages": [{"role": "user", "content": "a"}], **GREEDY, **fields}
    response = await client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompts_text_or_its_ids(client: httpx.AsyncClient, stream: bool) -> None:
    prompts, plain = ["abc", [100, 101]], {"temperature": 0, "max_tokens": 3, "n": 2, "logprobs": 1}
    alone = await answer(client, "/v1/completions", prompt=prompts, **plain)
    for with_ids, before in ((False, "abc"), (True, "")):
        asked = {"prompt": prompts, **plain, "echo": True, "return_token_ids": with_ids}
        if stream:
            found = [piece["choices"][0] for piece in await events(client, "/v1/completions", **asked)]
            whole = [put_together([one for one in found if one["index"] == index]) for index in range(4)]
        else:
            whole = (await answer(client, "/v1/completions", **asked))["choices"]
        assert len(whole) == 4
        for choice, expected in zip(whole, alone["choices"], strict=True):
            shown = before if expected["index"] < 2 else before and "de"
            assert choice["text"] == shown + expected["text"]
            length = 3 if expected["index"] < 2 else 2
            logprobs, sampled = choice["logprobs"], expected["logprobs"]
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["tokens"][length:] == sampled["tokens"]
            assert logprobs["token_logprobs"][length:] == pytest.approx(sampled["token_logprobs"], abs=1e-4)
            assert logprobs["text_offset"][length] == length, "also if the prompt's text is left out"
            if stream or with_ids:  # in a stream, vLLM always tells them
                assert choice["prompt_token_ids"] == ([97, 98, 99] if length == 3 else [100, 101])


def put_together(pieces: list[Any]) -> Any:
    first, *others = pieces
    assert "prompt_token_ids" in first
    assert not any(one["prompt_token_ids"] for one in others)
    logprobs: dict[str, list[Any]] = {}
    for one in pieces:
        for name, values in (one["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return {**first, "text": "".join(one["text"] for one in pieces), "logprobs": logprobs}


async def test_a_streamed_echo_without_logprobs_comes_as_it_is_sampled(client: httpx.AsyncClient) -> None:
    pieces = await events(client, "/v1/completions", prompt="abc", temperature=0, max_tokens=6, echo=True)
    texts = [piece["choices"][0]["text"] for piece in pieces]
    assert texts[0].startswith("abc")
    assert len(texts) > 3
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [97, 98, 99]


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_a_streamed_echo_can_be_the_prompt_alone(client: httpx.AsyncClient, logprobs: int | None) -> None:
    asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": logprobs}
    first, last = [piece["choices"][0] for piece in await events(client, "/v1/completions", **asked)]
    assert (first["text"], last["text"], last["finish_reason"]) == ("abc", "", "length")
    assert logprobs is None or first["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_echoed_ids_stand_in_the_logprobs_as_ids(client: httpx.AsyncClient) -> None:
    asked = {"prompt": [5, 6], **GREEDY, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    (whole,) = (await answer(client, "/v1/completions", **asked, return_token_ids=True))["choices"]
    streamed = await events(client, "/v1/completions", **asked, return_token_ids=True)
    for choice in (whole, streamed[0]["choices"][0]):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{one}" for one in [5, 6, *whole["token_ids"]]]
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert token in top
            assert all(name.startswith("token_id:") for name in top)
