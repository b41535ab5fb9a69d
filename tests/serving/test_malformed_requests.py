"""Values of wrong types in every known field of every route: they are refused or served, and never a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Route

from drivetrain import InferenceEngine, create_engine
from drivetrain_serving import ServerConfig, create_app
from drivetrain_serving.sglang.generate_request import GenerateBody
from drivetrain_serving.sglang.sampling import Sampling
from drivetrain_serving.vllm.derender_request import DerenderChatRequest, DerenderCompletionRequest
from drivetrain_serving.vllm.payloads import ChatRequest, CompletionRequest, GenerateRequest
from drivetrain_serving.vllm.skyrl_generate import SkyrlGenerateRequest
from engines import HANGING

Body = dict[str, object]

TALK: Body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
RANKS: Body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 2, "world_size": 2}
TENSORS: Body = {"names": ["a"], "shapes": [[1]]}
TARGET: Body = {"kind": "lora", "lora_name": "", "adapter_config": {}, "aliases": {"a": "b"}}
BODIES: dict[str, Body] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/chat/completions": TALK,
    "/v1/embeddings": {"input": "a"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/skyrl/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1, "top_k": 2}},
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
    "/sessions/{session}/v1/chat/completions": TALK,
    "/sessions/{session}/v1/messages": TALK,
    "/sessions/{session}/v1/messages/count_tokens": TALK,
    "/sessions/{session}/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/init_weights_update_group": {**RANKS, "backend": "gloo"},
    "/init_weight_transfer_engine": {"init_info": RANKS},
    "/collective_rpc": {"method": "skyrl_set_lora_receive_target", "kwargs": {"receive_target": TARGET}},
    "/update_weights_from_distributed": {**TENSORS, "dtypes": ["float32"]},
    "/update_weights": {"update_info": {**TENSORS, "dtype_names": ["float32"]}},
}
"""A body that a route takes, or that is wrong in its last check only; empty if not named."""


def fields_of(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(model.model_fields)


VLLM = (
    *("allowed_token_ids", "bad_words", "cache_salt", "priority", "reasoning_effort", "request_id", "seed"),
    *("structured_outputs", "top_k", "use_beam_search", "suffix"),
)
FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/completions": (*fields_of(CompletionRequest), *VLLM, "lora_path", "json_schema", "regex", "ebnf", "rid"),
    "/v1/chat/completions": (*fields_of(ChatRequest), *VLLM),
    "/v1/completions/render": (*fields_of(CompletionRequest), *VLLM),
    "/v1/chat/completions/render": (*fields_of(ChatRequest), *VLLM),
    "/v1/completions/derender": fields_of(DerenderCompletionRequest),
    "/v1/chat/completions/derender": fields_of(DerenderChatRequest),
    "/v1/embeddings": ("input", "messages", "model", "encoding_format", "dimensions", "truncate_prompt_tokens"),
    "/inference/v1/generate": (*fields_of(GenerateRequest), "features", "content_parts"),
    "/skyrl/v1/generate": (*fields_of(SkyrlGenerateRequest), "features", "cache_salt"),
    "/generate": (*fields_of(GenerateBody), "image_data", "session_params"),
    "/tokenize": ("prompt", "text", "messages", "add_special_tokens", "tools", "chat_template_kwargs"),
    "/detokenize": ("tokens", "skip_special_tokens"),
    "/v1/tokenize": ("prompt", "text", "add_special_tokens"),
    "/v1/detokenize": ("tokens", "skip_special_tokens"),
    "/abort_requests": ("request_ids",),
    "/inference/v1/abort_requests": ("request_ids",),
    "/abort_request": ("rid", "abort_all"),
    "/pause_generation": ("mode",),
    "/release_memory_occupation": ("tags",),
    "/resume_memory_occupation": ("tags",),
    "/start_profile": ("output_dir", "num_steps"),
    "/update_weights": ("update_info", "weight_dir", "weight_version"),
    "/update_weights_from_disk": ("model_path", "weight_version", "load_format", "abort_all_requests"),
    "/update_weight_version": ("new_version", "abort_all_requests"),
    "/init_weights_update_group": (*RANKS, "backend", "group_name"),
    "/destroy_weights_update_group": ("group_name",),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes", "group_name", "load_format", "weight_version"),
    "/begin_weight_update": ("selector",),
    "/init_weight_transfer_engine": ("init_info",),
    "/finish_weight_update": ("weight_version",),
    "/get_weights_by_name": ("name", "truncate_size"),
    "/weights_checker": ("action", "allow_quant_error", "skip_tensor_list", "selector"),
    "/weight_checker": ("action", "baseline"),
    "/collective_rpc": ("method", "args", "kwargs"),
    "/skyrl/v1/load_lora_adapter": ("lora_name", "lora_path", "in_memory"),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"),
        ("lora_name", "lora_path", "load_inplace"),
    ),
    "/sessions/{session}/v1/chat/completions": ("messages", "tools", "n", "logprobs", "model"),
    "/sessions/{session}/v1/messages": ("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences"),
    "/sessions/{session}/v1/messages/count_tokens": ("messages", "system", "tools"),
    "/sessions/{session}/v1/responses": ("input", "instructions", "tools", "tool_choice", "reasoning", "text"),
}
NESTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "/generate": ("sampling_params", fields_of(Sampling)),
    "/inference/v1/generate": (
        "sampling_params",
        ("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "logprobs", "logit_bias", *VLLM),
    ),
    "/skyrl/v1/generate": ("sampling_params", ("top_k", "logprobs", "n", "routed_experts_prompt_start")),
    "/init_weight_transfer_engine": ("init_info", (*RANKS, "nccl_unique_id_b64", "packed", "packed_buffer_size_bytes")),
    "/update_weights": ("update_info", ("names", "dtype_names", "shapes", "packed")),
}
QUERY = ("mode", "level", "tags", "clear_cache", "timeout")
TEXTS = st.text("a0 -_é😀\0\n{[", max_size=4)
"""Without slashes and dots: some of them name folders."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


class Served:
    """An application over an engine, called in a loop of its own."""

    def __init__(self, runner: asyncio.Runner, engine: InferenceEngine, app: Starlette, model: Path) -> None:
        self.app = app
        self._runner = runner
        self._engine = engine
        self._model = model
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    def faults(self, value: object) -> list[str]:
        """Send ``value`` in every field of every route; return the requests that failed with a fault."""
        return self._runner.run(self._faults(value))

    async def _faults(self, value: object) -> list[str]:
        found = []
        for route in self.app.routes:
            assert isinstance(route, Route)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                for params, body in requests(route.path, value):
                    path = route.path.replace("{session}", "s")
                    async with asyncio.timeout(HANGING):
                        answer = await self._client.request(method, path, params=params, json=body)
                    if answer.status_code >= 500 and answer.status_code not in (501, 503, 504):
                        found.append(f"{method} {path} {params} {body}: {answer.status_code} {answer.text[:300]}")
                    await self._restore()
        return found

    async def _restore(self) -> None:
        engine = self._engine
        if engine.status.asleep:
            await engine.wake_up()
            await engine.load_weights_from_disk(str(self._model), "initial")
        if engine.is_paused:
            await engine.continue_generation()


def requests(path: str, value: object) -> Iterator[tuple[dict[str, str], Body]]:
    """Yield queries and bodies that hold ``value`` in a known field each."""
    body = BODIES.get(path, {})
    yield {}, body
    for field in FIELDS.get(path, ()):
        yield {}, {**body, field: value}
    outer, inner = NESTED.get(path, ("", ()))
    for field in inner:
        held = body[outer]
        assert isinstance(held, dict)
        yield {}, {**body, outer: {**held, field: value}}
    if isinstance(value, str):
        for name in QUERY:
            yield {name: value}, body


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = create_engine("transformers", model=str(model), enable_lora=True, max_num_seqs=16)
    config = ServerConfig(
        dialect=request.param, weight_group_timeout=0.5, lora_folder=str(tmp_path_factory.mktemp("l"))
    )
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("folders that requests name"))
        runner.run(engine.start())
        patch.setattr(type(engine), "gpus", property(lambda self: ("GPU-of-the-test",)))  # vLLM's transfer wants one
        app = create_app(engine, config)
        yield Served(runner, engine, app, model)
        runner.run(app.state.weight_groups.close())
        runner.run(app.state.sessions.close())
        runner.run(engine.teardown())


def test_every_named_route_exists(served: Served) -> None:
    paths = {route.path for route in served.app.routes if isinstance(route, Route)}
    assert BODIES.keys() | FIELDS.keys() | NESTED.keys() <= paths


@pytest.mark.slow
@example(value=10**30)
@example(value=-(2**63))
@example(value=1.5)
@example(value="\0")
@example(value=[None])
@example(value=[[]])
@example(value={"type": None})
@example(value=[{"type": "function", "role": "user"}])
@settings(max_examples=5)
@given(value=VALUES)
def test_no_value_of_a_field_is_a_fault(served: Served, value: object) -> None:
    assert served.faults(value) == []
