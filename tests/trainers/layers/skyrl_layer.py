# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: E402
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""SkyRL's engine layer: each test shows one row of docs/explanation/trainers-engine-layers.md by its own code."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # SkyRL is for Python 3.12; pydantic refuses the one of 3.11

import aiohttp
import pytest
from omegaconf import OmegaConf
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import SamplingParams
from skyrl.train.generators.utils import apply_overlong_filtering

from request_recorder import Recorder, Request, recording


def vllm_answers(request: Request) -> Any:
    """Answer as vLLM's server does, with one token that was cut off by an abort."""
    if request.path == "/detokenize":
        return {"prompt": "x"}
    logprobs = {"content": [{"logprob": -0.5}]}
    return {"choices": [{"token_ids": [7], "finish_reason": "abort", "logprobs": logprobs}]}


@pytest.fixture
def server() -> Iterator[Recorder]:
    with recording(vllm_answers) as recorder:
        yield recorder


def with_client(use: Callable[[RemoteInferenceClient], Awaitable[Any]], *servers: Recorder, **settings: Any) -> Any:
    """Call SkyRL's client, whose data goes to the first server."""

    async def run() -> Any:
        urls = [server.url for server in servers]
        client = RemoteInferenceClient(urls[0], urls, data_parallel_size=1, **settings)
        try:
            return await use(client)
        finally:
            await client.teardown()

    return asyncio.run(run())


def batch(**params: Any) -> Any:
    return {"prompt_token_ids": [[1, 2], [1, 2]], "sampling_params": params}


def test_the_repetition_penalty_is_dropped() -> None:
    made = get_sampling_params_for_backend("vllm", SamplingParams(repetition_penalty=1.3))
    assert "repetition_penalty" not in made
    assert set(made) == {
        "min_tokens", "skip_special_tokens", "include_stop_str_in_output", "max_tokens", "temperature", "top_p",
        "top_k", "min_p", "logprobs", "stop",
    }  # fmt: skip
    fields = {"stop": None, "max_generate_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    other = OmegaConf.create({**fields, "logprobs": 1, "repetition_penalty": 1.3})
    assert get_sampling_params_for_backend("vllm", other)["repetition_penalty"] == 1.3


def test_three_values_cannot_be_set_by_additional_kwargs() -> None:
    asked = {"min_tokens": 0, "skip_special_tokens": False, "include_stop_str_in_output": False, "seed": 7}
    made = get_sampling_params_for_backend("vllm", SamplingParams(additional_kwargs=asked))
    assert (made["min_tokens"], made["skip_special_tokens"], made["include_stop_str_in_output"]) == (1, True, True)
    assert made["seed"] == 7


def test_prompts_of_a_group_share_a_seed(server: Recorder) -> None:
    with_client(lambda client: client.generate(batch(seed=7)), server)
    bodies = server.bodies("/inference/v1/generate")
    assert [body["sampling_params"]["seed"] for body in bodies] == [7, 7]
    assert bodies[0] == bodies[1]


def test_several_samples_are_refused(server: Recorder) -> None:
    with pytest.raises(ValueError, match="n > 1 is not supported"):
        with_client(lambda client: client.generate(batch(n=2)), server)


def test_no_version_comes_with_an_answer(server: Recorder) -> None:
    answer = with_client(lambda client: client.generate(batch(logprobs=1)), server)
    assert set(answer) == {
        "responses", "stop_reasons", "response_ids", "response_logprobs", "rollout_expert_indices"
    }  # fmt: skip
    assert answer["stop_reasons"] == ["abort", "abort"]
    client = RemoteInferenceClient("", [""], data_parallel_size=1)
    client.increment_weight_version()
    assert client.weight_version == 1  # counted by the client


def test_all_but_stop_is_masked_if_overlong_completions_are() -> None:
    assert apply_overlong_filtering([[1, 1], [1, 1], [1, 1]], ["stop", "length", "abort"]) == [[1, 1], [0, 0], [0, 0]]


def test_requests_have_no_timeout(server: Recorder) -> None:
    async def total(client: RemoteInferenceClient) -> Any:
        return (await client._get_session()).timeout.total

    assert with_client(total, server) is None


def test_a_request_whose_connection_broke_is_sent_again(server: Recorder) -> None:
    server.statuses["/inference/v1/generate"] = [0]
    one = {"prompt_token_ids": [[1, 2]], "sampling_params": {"seed": 7}}
    with_client(lambda client: client.generate(one), server)
    first, second = server.bodies("/inference/v1/generate")
    assert first == second


def test_an_error_of_the_server_is_aiohttps(server: Recorder) -> None:
    server.statuses["/inference/v1/generate"] = [500]
    one = {"prompt_token_ids": [[1, 2]], "sampling_params": {}}
    with pytest.raises(aiohttp.ClientResponseError, match="status 500"):
        with_client(lambda client: client.generate(one), server)


def test_a_pause_that_one_server_refused_holds_on_the_others(server: Recorder) -> None:
    with recording(vllm_answers) as second:
        second.statuses["/pause"] = [500]
        with pytest.raises(aiohttp.ClientResponseError):
            with_client(lambda client: client.pause(), server, second)
        assert (server.paths(), second.paths()) == (["/pause"], ["/pause"])  # and no /resume


def test_a_pause_keeps_requests_and_caches(server: Recorder) -> None:
    with_client(lambda client: client.pause_generation(), server)
    assert server.requests[-1].query == {"mode": ["keep"], "clear_cache": ["false"]}


def test_sleep_discards_weights_but_for_adapters(server: Recorder) -> None:
    with_client(lambda client: client.sleep(), server)
    with_client(lambda client: client.sleep(), server, uses_lora_weight_sync=True)
    assert [request.query["level"] for request in server.requests] == [["2"], ["1"]]
