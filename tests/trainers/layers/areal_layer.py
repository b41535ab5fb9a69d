# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""AReaL's engine layer: each test shows one row of docs/explanation/trainers-engine-layers.md by its own code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import SGLangBackend
from areal.engine.vllm_remote import VLLMBackend
from areal.infra import workflow_context
from areal.infra.remote_inf_engine import RemoteInfEngine

from request_recorder import Recorder, Request, recording

ALL = GenerationHyperparameters(
    max_new_tokens=8, min_new_tokens=4, stop=["\n"], stop_token_ids=[3], frequency_penalty=0.5, ignore_eos=True
)
ABORTED: dict[int, str] = {}
"""The finish reason of the n-th answer, where it is not "stop"."""


def sglang_answers(request: Request) -> Any:
    """Answer with two tokens, as SGLang's ``/generate`` does."""
    del request
    reason = ABORTED.pop(min(ABORTED), "stop") if ABORTED else "stop"
    return {"meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, 5], [-0.5, 6]]}}


@pytest.fixture
def server() -> Iterator[Recorder]:
    ABORTED.clear()
    with recording(sglang_answers) as recorder:
        yield recorder


def generate(
    server: Recorder, *, during: Callable[[RemoteInfEngine], None] | None = None, timeout: float = 10.0, **gconfig: Any
) -> Any:
    """AReaL's ``agenerate`` through HTTP, with ``during`` called while a request is with the server."""
    engine = RemoteInfEngine(InferenceEngineConfig(request_timeout=timeout), SGLangBackend())
    engine._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    engine.addresses = [server.url.removeprefix("http://")]
    if during:
        answer = server.answer
        server.answer = lambda request: (during(engine), answer(request))[1]

    async def run() -> Any:
        async with asyncio.timeout(60):
            request = ModelRequest(input_ids=[1, 2], gconfig=GenerationHyperparameters(**gconfig))
            try:
                return await engine.agenerate(request)
            finally:
                session = await workflow_context.get_aiohttp_session()
                await session.close()

    return asyncio.run(run())


def wait(event: threading.Event) -> None:
    event.wait()


def test_sglang_gets_no_min_new_tokens() -> None:
    payload = SGLangBackend().build_generation_request(ModelRequest(input_ids=[1], gconfig=ALL), False, 0).payload
    assert set(payload["sampling_params"]) == {
        "top_p", "top_k", "max_new_tokens", "temperature", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        "frequency_penalty", "stop",
    }  # fmt: skip


def test_vllm_gets_no_min_new_tokens_no_stop_strings_and_no_frequency_penalty() -> None:
    payload = VLLMBackend().build_generation_request(ModelRequest(input_ids=[1], gconfig=ALL), False, 0).payload
    assert not {"min_tokens", "min_new_tokens", "stop", "frequency_penalty", "seed"} & set(payload)
    assert payload["stop_token_ids"] == [3]


def test_no_field_for_a_seed() -> None:
    names = set(vars(ALL))
    assert not {"seed", "min_p", "presence_penalty", "repetition_penalty", "logit_bias"} & names


def test_several_samples_are_refused(server: Recorder) -> None:
    with pytest.raises(ValueError, match="do not support n_samples > 1"):
        generate(server, n_samples=2)
    assert not server.requests


def test_a_full_context_is_refused(server: Recorder) -> None:
    with pytest.raises(RuntimeError, match="is non-positive"):
        generate(server, max_tokens=2)


def test_tokens_get_the_version_set_when_their_answer_came(server: Recorder) -> None:
    answer = generate(server, during=lambda engine: engine.set_version(9), max_new_tokens=8)
    assert answer.output_versions == [9, 9]  # 0 when the request was sent


def test_an_aborted_request_is_sent_again_with_its_tokens(server: Recorder) -> None:
    ABORTED[0] = "abort"
    answer = generate(server, max_new_tokens=8)
    first, second = server.bodies("/generate")
    assert (first["input_ids"], second["input_ids"]) == ([1, 2], [1, 2, 5, 6])
    assert second["sampling_params"]["max_new_tokens"] == 6
    assert (answer.output_tokens, answer.stop_reason) == ([5, 6, 5, 6], "stop")


def test_an_abort_at_the_last_token_is_called_length(server: Recorder) -> None:
    ABORTED[0] = "abort"
    assert generate(server, max_new_tokens=2).stop_reason == "length"


def test_a_refusal_is_asked_for_three_times(server: Recorder) -> None:
    server.statuses["/generate"] = [400] * 3
    with pytest.raises(RuntimeError, match="Failed after 3 retries each"):
        generate(server)
    assert len(server.requests) == 3


def test_a_request_that_timed_out_is_sent_again_without_an_abort(server: Recorder) -> None:
    over = threading.Event()
    try:
        with pytest.raises(RuntimeError, match=r"Failed after 3 retries each.*TimeoutError"):
            generate(server, timeout=1.0, during=lambda engine: wait(over))
        assert set(server.paths()) == {"/generate"}
    finally:
        over.set()


def test_a_position_without_logprobs_scores_zero() -> None:
    response = {"choices": [{"prompt_logprobs": [None, {}, {"5": {"logprob": -0.5}}]}]}
    assert VLLMBackend().parse_score_response(response, 2) == [0.0, -0.5]


def test_an_update_names_a_folder_and_no_version(tmp_path: Any) -> None:
    meta = WeightUpdateMeta(type="disk", path=str(tmp_path), version=4)
    [sglang] = SGLangBackend().build_disk_weight_update_requests(meta).requests
    assert sglang.payload == {"model_path": str(tmp_path), "abort_all_requests": True}
    [vllm] = VLLMBackend().build_disk_weight_update_requests(meta).requests
    assert vllm.payload == {"model_path": str(tmp_path)}
