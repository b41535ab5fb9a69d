# pyright: reportMissingImports=false
"""rLLM's model gateway in front of ``drivetrain serve``: ``make test-gyms``."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
import uvicorn
from rllm_model_gateway.client import GatewayClient  # type: ignore[import-not-found]
from rllm_model_gateway.models import GatewayConfig, TraceRecord, WorkerConfig  # type: ignore[import-not-found]
from rllm_model_gateway.server import create_app  # type: ignore[import-not-found]

from tool_conversation import ANSWER, CALL, QUESTION, TOOLS, Score, require_own_logprobs, text_of

MESSAGES: Final[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def gateway(url: str) -> Iterator[GatewayClient]:
    """A client of rLLM's gateway, which keeps its traces in memory."""
    config = GatewayConfig(workers=[WorkerConfig(url=url)], store_worker="memory", sync_traces=True)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(config), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        with GatewayClient(f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def require_training_data(trace: TraceRecord, score: Score) -> None:
    """Require a trace's ids, and the logprobs that transformers computes for them."""
    assert trace.logprobs is not None
    require_own_logprobs(score, trace.prompt_token_ids, trace.completion_token_ids, trace.logprobs)
    assert trace.token_counts["completion"] == len(trace.completion_token_ids)


def agent(gateway: GatewayClient, session: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.get_session_url(session), api_key="none", max_retries=0)


def test_an_agents_turns_are_traced(gateway: GatewayClient, score: Score) -> None:
    session = gateway.create_session()
    messages = list(MESSAGES)
    with agent(gateway, session) as client:
        for _ in range(2):
            answer: Any = client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, temperature=0, max_tokens=200
            )
            (choice,) = answer.choices
            messages.append(choice.message)
            for call in choice.message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    assert messages[-1].content == ANSWER
    traces = gateway.get_session_traces(session)
    assert [text_of(trace.completion_token_ids) for trace in traces] == [f"{CALL}\n", f"{ANSWER}\n"]
    for trace in traces:
        require_training_data(trace, score)
    first, second = traces
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(known)] == known, "the second turn does not extend the first"


def test_a_stream_is_traced(gateway: GatewayClient, score: Score) -> None:
    session = gateway.create_session()
    with agent(gateway, session) as client:
        stream: Any = client.chat.completions.create(
            model="policy", messages=MESSAGES, temperature=1, seed=3, max_tokens=16, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert [chunk for chunk in stream]
    while not (traces := gateway.get_session_traces(session)):  # the gateway stores a stream's trace after its end
        time.sleep(0.01)
    require_training_data(traces[0], score)


def test_the_gateway_sees_the_server_healthy(gateway: GatewayClient) -> None:
    (worker,) = gateway.list_workers()
    assert worker.healthy
