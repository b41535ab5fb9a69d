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
