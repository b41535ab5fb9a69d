"""Two processes that answer for a real engine: ``make test-front-ends BACKEND=transformers``, ``vllm`` or ``sglang``.

Run in the environment that holds the engine. One engine serves all tests, which leave it ready, idle and with its own
weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from drivetrain import Capability, InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from engines import require_ready_and_idle, until_idle, until_running
from front_ends import Running, two_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKEND: Final = os.environ["BACKEND"]
PROMPT: Final = [5, 6, 7]
EIGHT: Final[dict[str, object]] = {
    **{"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True},
    **{"logprobs": 0, "return_token_ids": True},
}
LONG: Final[dict[str, object]] = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
GREEDY: Final = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True, logprobs=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[InferenceEngine, Running]]:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"max_num_seqs": 16, "context_length": 1024}
    async with create_engine(BACKEND, model=str(tiny_model("qwen2")), **sizes) as engine:
        async with two_processes(engine) as running:
            yield engine, running


@pytest_asyncio.fixture(loop_scope="module")
async def engine(served: tuple[InferenceEngine, Running]) -> AsyncIterator[InferenceEngine]:
    yield served[0]
    await require_ready_and_idle(served[0])


@pytest.fixture
def running(served: tuple[InferenceEngine, Running]) -> Running:
    return served[1]


async def by_python(engine: InferenceEngine) -> tuple[list[int], list[float]]:
    (completion,) = (await engine.generate([PROMPT], GREEDY)).completions
    return completion.token_ids, completion.logprobs or []


def answered(answer: httpx.Response) -> tuple[list[int], list[float]]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    logprobs = choice["logprobs"] or {"token_logprobs": []}
    return choice["token_ids"] or [], logprobs["token_logprobs"]


def same(found: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]) -> bool:
    return found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-4)


async def test_each_process_answers_as_the_engine_does(engine: InferenceEngine, running: Running) -> None:
    expected = await by_python(engine)
    for answer in await running.in_each("/v1/completions", **EIGHT):
        assert same(answered(answer), expected)
    streams = await running.in_each("/v1/completions", **EIGHT, stream=True)
    for stream in streams:
        chunks = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
        assert chunks.pop() == "[DONE]"
        pieces = [httpx.Response(200, text=chunk) for chunk in chunks]
        ids = [token for piece in pieces for token in answered(piece)[0]]
        logprobs = [value for piece in pieces for value in answered(piece)[1]]
        assert same((ids, logprobs), expected)


async def test_many_requests_of_both_processes_at_once(engine: InferenceEngine, running: Running) -> None:
    expected = await by_python(engine)
    for answers in await asyncio.gather(*(running.in_each("/v1/completions", **EIGHT) for _ in range(20))):
        assert all(same(answered(answer), expected) for answer in answers)


async def test_requests_of_both_processes_are_aborted_by_id(engine: InferenceEngine, running: Running) -> None:
    asking = asyncio.create_task(running.in_each("/v1/completions", **LONG, request_id="mine"))
    await until_running(engine, 2)
    assert (await running.client.post("/abort_requests", json={"request_ids": ["mine"]})).status_code == 200
    assert [one.json()["choices"][0]["finish_reason"] for one in await asking] == ["abort", "abort"]


async def test_clients_that_leave_end_their_requests(engine: InferenceEngine, running: Running) -> None:
    asking = [
        asyncio.create_task(one.post("/v1/completions", json={**LONG, "stream": stream}))
        for one in running.each
        for stream in (True, False)
    ]
    await until_running(engine, 4)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await until_idle(engine)


async def test_both_processes_serve_an_update(engine: InferenceEngine, running: Running, tmp_path: Path) -> None:
    model, changed = tiny_model("qwen2"), tmp_path / "changed"
    shutil.copytree(model, changed)
    weights = load_file(changed / "model.safetensors")
    save_file({name: one * 1.5 for name, one in weights.items()}, changed / "model.safetensors", {"format": "pt"})
    own, first = engine.get_weight_version(), await by_python(engine)
    for folder, version in ((changed, "changed"), (model, own)):
        body = {"model_path": str(folder), "weight_version": version}
        answer = await running.client.post("/update_weights_from_disk", json=body)
        assert answer.json()["success"], answer.text
        expected = await by_python(engine)
        assert same(expected, first) is (folder == model)
        for one in await running.in_each("/v1/completions", **EIGHT):
            assert same(answered(one), expected)
        for one in await running.in_each("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 2}):
            assert one.json()["meta_info"]["weight_version"] == version
    assert engine.get_weight_version() == own


async def test_both_processes_refuse_while_memory_sleeps(engine: InferenceEngine, running: Running) -> None:
    if not engine.supports(Capability.SLEEP_KV_CACHE):
        pytest.fail(f"{BACKEND} lets no cache sleep")
    expected = await by_python(engine)
    await running.client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    for answer in await running.in_each("/v1/completions", **EIGHT):
        assert answer.status_code == 503, answer.text
        assert "asleep" in answer.text
    await running.client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    for answer in await running.in_each("/v1/completions", **EIGHT):
        assert same(answered(answer), expected)


async def test_turns_of_a_session_may_come_to_either_process(engine: InferenceEngine, running: Running) -> None:
    letters = list(range(ord("a"), ord("z") + 1))  # a text of any bytes has other ids than those sampled
    fields = {"max_tokens": 6, "return_token_ids": True, "allowed_token_ids": letters}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    sampled: list[int] = []
    for turn in range(4):  # each on a connection of its own
        answer = await running.client.post("/sessions/s/v1/chat/completions", json={"messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        sampled += choice["token_ids"]
        messages += [choice["message"], {"role": "user", "content": f"and {turn}?"}]
    (branch,) = (await running.client.get("/sessions/s/trajectory")).json()["branches"]
    assert [token for token, one in zip(branch["token_ids"], branch["loss_mask"], strict=True) if one] == sampled
    assert (await running.client.delete("/sessions/s")).status_code == 204
