"""The same requests to a real vLLM server and to ours: the same statuses, and every field that vLLM writes.

Run in the environment that holds vLLM: ``make test-vllm-routes``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from vllm_cpu_server import launch_of

from drivetrain import EngineConfig, create_engine
from drivetrain_conformance.harness.server_suite import Server as VLLMServer
from drivetrain_serving import Server, ServerConfig
from models_with_tools import model_that_reads_tools
from two_servers import Answers, Asked, answers, compare

MESSAGES: Final = [{"role": "user", "content": "hello"}]
SHORT: Final = {"max_tokens": 4, "temperature": 0}


# Fields of other features: audio, key-value transfer, speculative decoding, annotations.
_CHAT: Final = (
    *("choices.[].message.annotations", "choices.[].message.audio", "choices.[].message.function_call"),
    *("service_tier", "kv_transfer_params"),
)
# Sampling parameters that have their defaults, and fields of vLLM's own between its processes.
_DEFAULTS: Final = (
    *("bad_words", "frequency_penalty", "min_p", "output_kind", "presence_penalty", "repetition_penalty", "skip_clone"),
    *("skip_reading_prefix_cache", "stop", "stop_token_ids", "temperature", "top_p"),
)
_RENDERED: Final = tuple(f"{part}sampling_params.{name}" for part in ("", "[].") for name in _DEFAULTS)
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"],
        "additionalProperties": False,
    }}}
    for name in ("tell", "ask")
]  # fmt: skip
"""Functions whose calls are short, so that a model with random weights comes to their end."""
TELL: Final = {"type": "function", "function": {"name": "tell"}}
TOLD: Final = {
    "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 200,
    "logit_bias": {"93": 100, "9": -100, "10": -100, "13": -100, "32": -100},
}  # fmt: skip
"""The bias ends an array as soon as it may, and forbids white space."""
LISTED, TRUE, NULL = (
    {"type": "function", "function": {"name": "tell", "parameters": parameters}}
    for parameters in ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}, True, None)
)
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
ECHOED: Final = {"prompt": [5, 6], **SHORT, "echo": True}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def _chat(name: str, **fields: object) -> Asked:
    return Asked(name, "POST", "/v1/chat/completions", {**TOLD, **fields}, _CHAT)


def _echo(name: str, **fields: object) -> Asked:
    return Asked(name, "POST", "/v1/completions", {**ECHOED, **fields})


GENERATED: Final = {
    "request_id": "r",
    "choices": [
        {"index": 0, "token_ids": [104, 105], "finish_reason": "length", "logprobs": {"content": [
            {"token_id": one, "logprob": -1.5, "rank": 1, "top_logprobs": [{"token_id": 9, "logprob": -1, "rank": 1}]}
            for one in (104, 105)
        ]}}
    ],
}  # fmt: skip
USAGE: Final = {"request_id": "r", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
CHUNK: Final[dict[str, Any]] = {"stream": True, "generate_chunk": GENERATED, "prompt_token_ids": [5, 6]}
STATE: Final = {"role_sent": True, "output_token_ids": [104, 101], "output_chunk_lens": [1, 1]}
CALL: Final = list(b'[{"name":"tell","parameters":{"sure":true}}]')
_TOLD_CHAT: Final = {"messages": MESSAGES}
_CALLED: Final = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
_TEXTS: Final = "/v1/completions"
_OF_VLLMS_STATE: Final = ("prev_tokens", "logprob_context_token_ids", "last_tool_call_ids")


def _generated(**fields: object) -> dict[str, object]:
    return {"request_id": "r", "choices": [{"index": 0, "finish_reason": "stop", **fields}]}


def _derender(name: str, path: str = "/v1/chat/completions", /, **body: object) -> Asked:
    # Audio and annotations, and parts of the state that only vLLM's own decoder and parsers read.
    lacks = (*_CHAT, *(f"stream_state.{name}" for name in _OF_VLLMS_STATE))
    return Asked(f"derendered {name}", "POST", f"{path}/derender", body, lacks)


ASKED: Final = (
    Asked("health", "GET", "/health"),
    Asked("version", "GET", "/version"),
    Asked("models", "GET", "/v1/models"),
    Asked("world size", "GET", "/get_world_size"),
    Asked("is paused", "GET", "/is_paused"),
    Asked("load", "GET", "/load"),
    Asked("unknown route", "GET", "/nowhere", None, ("detail",)),  # FastAPI's body, not vLLM's
    Asked("tokenize", "POST", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    Asked("tokenize a chat", "POST", "/tokenize", {"messages": MESSAGES}),
    Asked("detokenize", "POST", "/detokenize", {"tokens": [104, 105]}),
    Asked("completion", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT}),
    Asked(
        "completion with ids", "POST", "/v1/completions",
        {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 4, "logprobs": 0, "return_token_ids": True,
         "return_tokens_as_token_ids": True},
    ),
    Asked("logprobs", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT, "logprobs": 2}),
    Asked("true logprobs", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT, "logprobs": True}),
    Asked("prompt logprobs", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT, "prompt_logprobs": 1}),
    Asked("nulls", "POST", "/v1/completions", {"prompt": [5], "max_tokens": 4, "seed": None, "stop": None}),
    Asked("top_k of -1", "POST", "/v1/completions", {"prompt": [5], "max_tokens": 4, "top_k": -1}),
    Asked("unknown field", "POST", "/v1/completions", {"prompt": [5], **SHORT, "of_a_later_release": 1}),
    Asked("stop", "POST", "/v1/completions", {"prompt": [5], "max_tokens": 200, "stop": ["a", "e"], "seed": 1}),
    Asked("stream", "POST", "/v1/completions", {"prompt": [5], **SHORT, "stream": True, "return_token_ids": True}),
    Asked(
        "stream with usage", "POST", "/v1/completions",
        {"prompt": [5], **SHORT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    Asked("chat", "POST", "/v1/chat/completions", {"messages": MESSAGES, **SHORT}, _CHAT),
    Asked(
        "chat with ids", "POST", "/v1/chat/completions",
        {"messages": MESSAGES, **SHORT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True,
         "return_tokens_as_token_ids": True},
        _CHAT,
    ),
    Asked("chat stream", "POST", "/v1/chat/completions", {"messages": MESSAGES, **SHORT, "stream": True}),
    _chat("required call", tool_choice="required"),
    _chat("required call, streamed", tool_choice="required", **STREAMED),
    _chat("required calls, two choices", tool_choice="required", n=2, temperature=1, seed=3),
    _chat("one required call", tool_choice="required", parallel_tool_calls=False),
    _chat("one required call, streamed", tool_choice="required", parallel_tool_calls=False, stream=True),
    _chat("required call with ids", tool_choice="required", return_token_ids=True, logprobs=True, top_logprobs=1),
    _chat("required call, cut off", tool_choice="required", max_tokens=3),
    _chat("call of a function", tool_choice=TELL),
    _chat("call of a function, streamed", tool_choice=TELL, **STREAMED),
    _chat("required call with a list, streamed", tools=[LISTED], tool_choice="required", stream=True),
    _chat("call of a function with a list", tools=[LISTED], tool_choice=TELL),
    _chat("parameters that are no object", tools=[TRUE], tool_choice="required"),
    _chat("parameters that are null", tools=[NULL], tool_choice="required"),
    _chat("call of a function, cut off", tool_choice=TELL, max_tokens=3),
    _chat("one call at most", tool_choice="auto", parallel_tool_calls=False, max_tokens=4),
    _chat("calls allowed", tool_choice="auto", parallel_tool_calls=True, max_tokens=4, stream=True),
    _chat("unknown function", tool_choice={"type": "function", "function": {"name": "none"}}),
    _chat("function without a name", tool_choice={"type": "function", "function": {}}),
    _chat("function that is no object", tool_choice={"type": "function", "function": "tell"}),
    _chat("unknown choice", tool_choice="any"),
    _chat("required call without tools", tool_choice="required", tools=None),
    _chat("function without tools", tool_choice=TELL, tools=None),
    _chat("required call with a format", tool_choice="required", response_format=_SCHEMA),
    _chat("call of a function with a grammar", tool_choice=TELL, structured_outputs={"regex": "a"}),
    _chat("all top logprobs", tools=None, max_tokens=2, logprobs=True, top_logprobs=-1),
    _chat("all top logprobs without logprobs", tools=None, top_logprobs=-1),
    _chat("all logprobs of a chat's prompt", tools=None, max_tokens=2, prompt_logprobs=-1),
    Asked("all logprobs", "POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "logprobs": -1}),
    Asked("all prompt logprobs", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT, "prompt_logprobs": -1}),
    Asked("fewer than no logprobs", "POST", "/v1/completions", {"prompt": [5, 6], **SHORT, "logprobs": -2}),
    Asked("fewer than no prompt logprobs", "POST", "/v1/completions", {"prompt": [5], **SHORT, "prompt_logprobs": -2}),
    Asked("more logprobs than ids", "POST", "/v1/completions", {"prompt": [5], **SHORT, "logprobs": 100000}),
    Asked("streamed prompt logprobs", "POST", "/v1/completions",
          {"prompt": [5], **SHORT, "prompt_logprobs": 1, "stream": True}),
    _echo("echo"),
    _echo("echo with logprobs", logprobs=1),
    _echo("echo with ids", logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True),
    _echo("echo alone", max_tokens=0, logprobs=0),
    _echo("streamed echo", **STREAMED),
    _echo("streamed echo with logprobs", logprobs=1, **STREAMED),
    _echo("streamed echo with ids", logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, stream=True),
    # Not both: vLLM 0.32 ends a stream of several choices with an error if it echoes logprobs.
    _echo("streamed echo of several", prompt=[[5, 6], [7]], n=2, temperature=1, **STREAMED),
    _echo("streamed echo of several with logprobs", prompt=[[5, 6], [7]], logprobs=0, **STREAMED),
    _echo("streamed echo alone", max_tokens=0, logprobs=1, stream=True),
    Asked(
        "ids in, ids out", "POST", "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {**SHORT, "logprobs": 1}},
        ("choices.[].sampling_mask", "ec_transfer_params"),
    ),
    Asked("stream of ids", "POST", "/inference/v1/generate",
          {"token_ids": [5, 6], "sampling_params": SHORT, "stream": True}),
    Asked(
        "stream with usage in each chunk", "POST", "/v1/completions",
        {"prompt": [5], **SHORT, "stream": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    Asked(
        "chat stream with usage in each chunk", "POST", "/v1/chat/completions",
        {"messages": MESSAGES, **SHORT, "stream": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    *(
        Asked(f"{name}: {path}", "POST", path, {**body, **fields}, (*_CHAT, *_RENDERED))
        for path, body in (
            ("/v1/completions", {"prompt": [5], **SHORT}),
            ("/v1/chat/completions", {"messages": MESSAGES, **SHORT}),
            ("/v1/chat/completions/render", {"messages": MESSAGES, **SHORT}),
        )
        for name, fields in (
            ("options of no stream", {"stream_options": {"include_usage": True}}),
            ("false options of no stream", {"stream": False, "stream_options": {"include_usage": False}}),
            ("no options of no stream", {"stream": None, "stream_options": {}}),
            ("options that are no object", {"stream": True, "stream_options": "usage"}),
            ("option that is no boolean", {"stream": True, "stream_options": {"include_usage": "maybe"}}),
            ("no allowed ids", {"allowed_token_ids": []}),
        )
        if not (path.endswith("render") and name == "no allowed ids")  # vLLM looks at them when it generates
    ),
    _chat("top logprobs without logprobs", tools=None, top_logprobs=1),
    _chat("no top logprobs without logprobs", tools=None, max_tokens=4, top_logprobs=0),
    _chat("both ends of a prompt", tools=None, add_generation_prompt=True, continue_final_message=True),
    _chat("usage in each chunk alone", tools=None, max_tokens=4, stream=True,
          stream_options={"continuous_usage_stats": True}),
    Asked("options of no stream of ids", "POST", "/inference/v1/generate",
          {"token_ids": [5], "sampling_params": SHORT, "stream_options": {"include_usage": True}},
          ("choices.[].sampling_mask", "ec_transfer_params")),
    Asked("no allowed ids of ids", "POST", "/inference/v1/generate",
          {"token_ids": [5], "sampling_params": {**SHORT, "allowed_token_ids": []}}),
    Asked("id of a header", "POST", "/v1/completions", {"prompt": [5], **SHORT}, headers={"X-Request-Id": "mine"}),
    Asked(
        "rendered chat", "POST", "/v1/chat/completions/render",
        {"messages": MESSAGES, **SHORT, "stop": ["x"], "logprobs": True, "top_logprobs": 2, "seed": 3}, _RENDERED,
        headers={"X-Request-Id": "mine"},
    ),
    Asked(
        "rendered stream", "POST", "/v1/chat/completions/render",
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}, _RENDERED,
    ),
    Asked("rendered completions", "POST", "/v1/completions/render",
          {"prompt": [[5, 6], [7]], **SHORT, "request_id": "two"}, _RENDERED),
    Asked("rendered beams", "POST", "/v1/completions/render", {"prompt": [5], "use_beam_search": True}),
    Asked("rendered for an unknown model", "POST", "/v1/completions/render", {"prompt": [5], "model": "another"}),
    Asked("too long to render", "POST", "/v1/completions/render", {"prompt": [5] * 5000}),
    Asked("wrong value to render", "POST", "/v1/completions/render", {"prompt": [5], "temperature": -1}),
    _derender("chat", generate_response=GENERATED, chat_request=_TOLD_CHAT, prompt_token_ids=[5, 6], prompt_tokens=2),
    _derender("chat of an unknown model", generate_response=GENERATED, chat_request=_TOLD_CHAT, model="another"),
    _derender("chat without a response", chat_request=_TOLD_CHAT),
    _derender("chat without ids", generate_response=_generated(token_ids=[]), chat_request=_TOLD_CHAT),
    _derender("chat that is too long", generate_response=_generated(token_ids=[5] * 5000), chat_request=_TOLD_CHAT),
    _derender("chat of another mode", generate_response={**GENERATED, "output_mode": "text"}, chat_request=_TOLD_CHAT),
    _derender("required call", generate_response=_generated(token_ids=CALL), chat_request=_CALLED),
    _derender("first chunk", **CHUNK, chat_request=_TOLD_CHAT),
    _derender("next chunk", **CHUNK, chat_request=_TOLD_CHAT, stream_state=STATE),
    _derender("last chunk", **CHUNK | {"generate_chunk": USAGE}, chat_request=_TOLD_CHAT, stream_state=STATE),
    _derender("chunk of a call", **CHUNK | {"generate_chunk": _generated(token_ids=CALL)}, chat_request=_CALLED),
    _derender("chunk of two", **CHUNK | {"generate_chunk": {**GENERATED, "choices": [{"index": 0}, {"index": 1}]}},
              chat_request=_TOLD_CHAT),
    _derender("wrong state", **CHUNK, chat_request=_TOLD_CHAT, stream_state={"output_token_ids": [5]}),
    _derender("completions", _TEXTS, generate_responses=[GENERATED, GENERATED], prompt_tokens=[2, 3]),
    _derender("no completions", _TEXTS, generate_responses=[]),
    _derender("counts of others", _TEXTS, generate_responses=[GENERATED], prompt_tokens=[1, 2]),
    _derender("chunk of text", _TEXTS, stream=True, generate_chunk=GENERATED, prompt_token_ids=[5, 6]),
    _derender("last chunk of text", _TEXTS, stream=True, generate_chunk=USAGE),
    Asked("abort of generations", "POST", "/inference/v1/abort_requests", {"request_ids": ["none"]}),
    Asked("abort of no generations", "POST", "/inference/v1/abort_requests", {"request_ids": []}),
    Asked("abort of generations without ids", "POST", "/inference/v1/abort_requests", {}),
    Asked("no json", "POST", "/v1/completions", None, headers={"content-type": "application/json"}),
    Asked("wrong type", "POST", "/v1/completions", {"prompt": [5], "max_tokens": "four"}),
    Asked("wrong value", "POST", "/v1/completions", {"prompt": [5], "temperature": -1}),
    Asked("unknown model", "POST", "/v1/completions", {"prompt": [5], "model": "another"}),
    Asked("too long", "POST", "/v1/completions", {"prompt": [5] * 5000}),
    Asked("null temperature of ids", "POST", "/inference/v1/generate",
          {"token_ids": [5], "sampling_params": {"temperature": None}}),
    Asked("no token ids", "POST", "/inference/v1/generate", {"sampling_params": {}}),
    Asked("wrong mode of a pause", "POST", "/pause?mode=sometimes"),
    Asked("pause", "POST", "/pause?mode=keep&clear_cache=false"),
    Asked("paused", "GET", "/is_paused"),
    Asked("resume", "POST", "/resume"),
    Asked("reset", "POST", "/reset_prefix_cache"),
    Asked("abort", "POST", "/abort_requests", {"request_ids": ["none"]}),
    Asked("version of weights", "GET", "/weight_info"),
    Asked("label", "POST", "/update_weight_version", {"new_version": "renamed"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    folder = str(model_that_reads_tools(tmp_path_factory.mktemp("models") / "tools"))
    config = EngineConfig(backend="vllm-server", model=folder, endpoint="http://unused")
    # Demanded calls are JSON with this parser; others have a syntax of their own.
    theirs = VLLMServer(launch_of(config, tool_call_parser="pythonic", enable_auto_tool_choice=True))
    try:
        of_vllm = answers(theirs.endpoint, ASKED)
    finally:
        theirs.stop()

    async def serve() -> dict[str, tuple[int, object]]:
        async with create_engine("transformers", model=folder) as engine, Server(engine, ServerConfig(port=0)) as ours:
            return await asyncio.to_thread(answers, ours.url, ASKED)

    return of_vllm, asyncio.run(serve())


def _ends(answer: object) -> list[object]:
    """Return the names of the calls of an answer, whole or streamed, and its finish reasons."""
    assert isinstance(answer, list | dict)
    pieces = [piece for piece in answer if piece != "[DONE]"] if isinstance(answer, list) else [answer]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    calls = [call["function"].get("name") for one in said for call in one.get("tool_calls") or []]
    return [*filter(None, calls), *filter(None, (choice["finish_reason"] for choice in choices))]


@pytest.mark.parametrize("name", ["required call", "one required call", "call of a function", "required call, cut off"])
def test_demanded_calls_end_as_vllms_do(name: str, both: tuple[Answers, Answers]) -> None:
    theirs, ours = (_ends(answers[name][1]) for answers in both)
    assert ours == theirs
    if "cut off" not in name:
        streamed = f"{name}, streamed"
        assert len(theirs) > 1, "vLLM's model made no call"
        assert [_ends(answers[streamed][1]) for answers in both] == [theirs, theirs]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.name)
def test_ours_answers_as_vllm_does(asked: Asked, both: Any) -> None:
    compare(asked, *both)


@pytest.mark.parametrize("name", ["id of a header", "rendered chat", "rendered completions"])
def test_requests_have_the_same_ids(name: str, both: Any) -> None:
    def ids(body: Any) -> list[str]:
        return [one.get("id") or one["request_id"] for one in (body if isinstance(body, list) else [body])]

    theirs, ours = (ids(answers_of[name][1]) for answers_of in both)
    assert ours == theirs


@pytest.mark.parametrize("name", ["stream with usage in each chunk", "chat stream with usage in each chunk"])
def test_each_chunk_counts_the_same_prompt(name: str, both: Any) -> None:
    theirs, ours = (
        {piece["usage"]["prompt_tokens"] for piece in answers_of[name][1] if piece != "[DONE]"} for answers_of in both
    )
    assert ours == theirs


def test_rendered_requests_have_the_same_prompt(both: Any) -> None:
    theirs, ours = (answers_of["rendered chat"][1] for answers_of in both)
    assert ours["token_ids"] == theirs["token_ids"]
    assert {name: theirs["sampling_params"][name] for name in ours["sampling_params"]} == ours["sampling_params"]
