"""The same requests to a real vLLM server and to ours: the same statuses, and every field that vLLM writes.

Run in the environment that holds vLLM: ``make test-vllm-routes``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from vllm_cpu_server import launch_of

from drivetrain import EngineConfig, create_engine
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness.server_suite import Server as VLLMServer
from drivetrain_serving import Server, ServerConfig
from two_servers import Asked, answers, compare

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
def both() -> tuple[dict[str, tuple[int, object]], dict[str, tuple[int, object]]]:
    folder = str(tiny_model("qwen2"))
    theirs = VLLMServer(launch_of(EngineConfig(backend="vllm-server", model=folder, endpoint="http://unused")))
    try:
        of_vllm = answers(theirs.endpoint, ASKED)
    finally:
        theirs.stop()

    async def serve() -> dict[str, tuple[int, object]]:
        async with create_engine("transformers", model=folder) as engine, Server(engine, ServerConfig(port=0)) as ours:
            return await asyncio.to_thread(answers, ours.url, ASKED)

    return of_vllm, asyncio.run(serve())


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
