"""``drivetrain conformance --url``: our server passes in each dialect, and wrong servers are caught."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import pytest
import pytest_asyncio
import torch
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import warm_python
from drivetrain import InferenceEngine, create_engine
from drivetrain.errors import InvalidConfig
from drivetrain.types.modes import PauseMode
from drivetrain_conformance.harness.case import choose
from drivetrain_conformance.harness.report_files import CaseEntry
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.routes.case import route_cases
from drivetrain_conformance.routes.dialect import Dialect
from drivetrain_conformance.routes.material import Material, made_of
from drivetrain_conformance.routes.run import run_routes
from drivetrain_conformance.routes.sampled import Sampled
from drivetrain_conformance.routes.server_under_test import Access, Stream, connected
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving import server as server_module
from drivetrain_serving.app import create_app
from engines import HANGING, require_ready_and_idle
from models_with_tools import model_that_reads_tools

Json = Any
WITHOUT_A_GPU: Final = {
    "vllm_control/an_update_without_a_start_is_a_client_error",
    "vllm_sleep/answers_after_a_sleep_of_level_1_are_as_before",
}
"""Cases of NCCL and of weights kept during a sleep, which our server refuses with 501 on a machine without a GPU."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_that_reads_tools(tmp_path_factory.mktemp("models") / "tools")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[InferenceEngine]:
    torch.set_num_threads(1)
    sizes = {"max_num_seqs": 16, "context_length": 256, "max_loras": 3}
    async with create_engine("transformers", model=str(model), enable_lora=True, **sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def material(model: Path) -> Iterator[Material]:
    with made_of(model) as material:
        yield material


class Around(Protocol):
    """A wrong server, as a middleware."""

    def around(self, app: ASGIApp) -> ASGIApp: ...


@dataclass(frozen=True)
class Both:
    """Two middlewares."""

    one: Around
    other: Around

    def around(self, app: ASGIApp) -> ASGIApp:
        return self.one.around(self.other.around(app))


@dataclass(frozen=True)
class Wrong:
    """A middleware whose server answers one path otherwise.

    Args:
        path: The path.
        body: Returns another body, given JSON. In a stream it changes each event.
        status: Another status.
        chunked: Leave out Content-Length.
        swallowed: Answer at once with this JSON, and let the server see nothing.
    """

    path: str
    body: Callable[[Json], Json] | None = None
    status: int | None = None
    chunked: bool = False
    swallowed: bytes | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != self.path:
                await app(scope, receive, send)
                return
            if self.swallowed is not None:
                length = str(len(self.swallowed)).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", length)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": self.swallowed})
                return
            await app(scope, receive, self._changing(send))

        return wrong

    def _changing(self, send: Send) -> Send:
        start: Message = {}

        async def changed(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)  # held back, for the new body's length
                return
            content = self._content(message.get("body", b""))
            if start:
                headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                if not self.chunked and not message.get("more_body"):
                    headers.append((b"content-length", str(len(content)).encode()))
                status = self.status or start["status"]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                start.clear()
            await send({**message, "body": content})

        return changed

    def _content(self, content: bytes) -> bytes:
        if self.body is None or not content:
            return content
        if not content.startswith(b"data:"):
            return json.dumps(self.body(json.loads(content))).encode()
        events = [event.removeprefix("data: ") for event in content.decode().split("\n\n") if event]
        changed = [event if event == "[DONE]" else json.dumps(self.body(json.loads(event))) for event in events]
        return "".join(f"data: {event}\n\n" for event in changed).encode()


class AllCalls:
    """A server that knows no ``parallel_tool_calls``."""

    def around(self, app: ASGIApp) -> ASGIApp:
        async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
            async def changed() -> Message:
                message = await receive()
                # The new name is as long, because the head tells the length.
                return {**message, "body": message.get("body", b"").replace(b"parallel_tool_calls", b"_" * 19)}

            await app(scope, changed, send)

        return wrong


def at(change: Callable[[Json, str | int], None], *path: str | int) -> Callable[[Json], Json]:
    """Return a change of the values at a path; ``*`` stands for each entry of a list. Absent keys stay absent."""

    def apply(value: Json, path: tuple[str | int, ...]) -> None:
        key, *rest = path
        if key == "*":
            for index in range(len(value)):
                apply(value, (index, *rest))
        elif value is not None and (key in value if isinstance(key, str) else key < len(value)):
            if rest:
                apply(value[key], tuple(rest))
            else:
                change(value, key)

    def changed(body: Json) -> Json:
        apply(body, path)
        return body

    return changed


def drop(*path: str | int) -> Callable[[Json], Json]:
    return at(lambda owner, key: owner.pop(key), *path)


def put(new: object, *path: str | int) -> Callable[[Json], Json]:
    return at(lambda owner, key: owner.__setitem__(key, new() if callable(new) else new), *path)


def turned(*path: str | int) -> Callable[[Json], Json]:
    """Return a change of the order of keys or entries."""

    def turn(owner: Json, key: str | int) -> None:
        old = owner[key]
        owner[key] = dict(reversed(old.items())) if isinstance(old, dict) else list(reversed(old or [])) or old

    return at(turn, *path)


def first() -> Callable[[Json], Json]:
    """Return a change of each answer to the first one."""
    seen: list[Json] = []

    def repeated(body: Json) -> Json:
        seen.append(body)
        return seen[0]

    return repeated


COUNTED: Final = itertools.count()
NOTHING: Final = b"{}"
COMPLETIONS, CHAT, IDS, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"
LOGPROBS: Final = ("choices", "*", "logprobs")
META: Final = "meta_info"
CALLS: Final = ("choices", "*", "message", "tool_calls", "*")
ANOTHER: Final = -3.0
"""A logprob of no weights that are served."""
UPDATE, DISK = "/update_weights", "/update_weights_from_disk"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OUTPUT: Final = (META, "output_token_logprobs", "*", 0)

OPENAI: Final[Mapping[str, Around]] = {
    "health_is_200": Wrong("/health", status=503),
    "models_are_listed": Wrong("/v1/models", drop("data", "*", "created")),
    "a_completion_has_choices_and_usage": Wrong(COMPLETIONS, put(1000, "usage", "total_tokens")),
    "a_chat_has_a_message_and_usage": Wrong(CHAT, put("user", "choices", 0, "message", "role")),
    "choices_are_numbered": Wrong(COMPLETIONS, put(0, "choices", "*", "index")),
    "nulls_mean_absent": Wrong(COMPLETIONS, status=400),
    "seeds_have_63_bits": Wrong(COMPLETIONS, status=400),
    "a_seed_gives_the_same_text_again": Wrong(COMPLETIONS, put(lambda: f"{next(COUNTED)}", "choices", 0, "text")),
    "chat_logprobs_have_an_entry_for_each_token": Wrong(CHAT, put([], *LOGPROBS, "content")),
    "a_required_call_comes": Wrong(CHAT, put([], "choices", "*", "message", "tool_calls")),
    "a_required_call_comes_in_a_stream": Wrong(CHAT, drop("choices", "*", "delta", "tool_calls")),
    "a_call_of_a_named_function_comes": Wrong(CHAT, put("g", *CALLS, "function", "name")),
    "one_call_comes_without_parallel_calls": AllCalls(),
    "a_stream_ends_in_a_finish_reason_and_done": Wrong(COMPLETIONS, put(None, "choices", "*", "finish_reason")),
    "a_wrong_type_is_a_client_error": Wrong(COMPLETIONS, status=500),
    "a_wrong_value_is_a_client_error": Wrong(COMPLETIONS, status=200),
    "a_body_that_is_no_json_is_a_client_error": Wrong(COMPLETIONS, lambda _: "no"),
    "a_prompt_that_is_too_long_says_so": Wrong(COMPLETIONS, lambda _: {"error": {"message": "too much"}}),
}
VLLM: Final[Mapping[str, Around]] = {
    "vllm_tokens/cards_state_the_context_length": Wrong("/v1/models", put("1024", "data", 0, "max_model_len")),
    "vllm_tokens/choices_go_prompt_by_prompt": Wrong(COMPLETIONS, turned("choices")),
    "vllm_tokens/prompt_ids_are_on_each_choice": Wrong(COMPLETIONS, drop("choices", "*", "prompt_token_ids")),
    "vllm_tokens/ids_and_logprobs_have_equal_lengths": Wrong(COMPLETIONS, drop("choices", "*", "token_ids")),
    "vllm_tokens/logprobs_are_finite": Wrong(COMPLETIONS, put(math.nan, *LOGPROBS, "token_logprobs", 0)),
    "vllm_tokens/logprobs_of_zero_give_the_sampled_token": Wrong(COMPLETIONS, put(None, *LOGPROBS, "top_logprobs")),
    "vllm_tokens/token_strings_name_their_ids": Wrong(COMPLETIONS, put("a", *LOGPROBS, "tokens", "*")),
    "vllm_tokens/logprobs_may_be_true": Wrong(COMPLETIONS, put(None, "choices", "*", "logprobs")),
    "vllm_tokens/prompt_logprobs_begin_with_the_prompts_token": Wrong(
        COMPLETIONS, turned("choices", 0, "prompt_logprobs", "*")
    ),
    "vllm_tokens/logprobs_of_minus_one_are_of_the_vocabulary": Wrong(
        COMPLETIONS, put({"token_id:5": -0.5}, *LOGPROBS, "top_logprobs", "*")
    ),
    "vllm_tokens/prompt_logprobs_of_minus_one_are_of_the_vocabulary": Wrong(
        COMPLETIONS, put({"5": {"logprob": -0.5}}, "choices", 0, "prompt_logprobs", "*")
    ),
    "vllm_tokens/the_header_gives_a_request_its_id": Wrong(CHAT, put("chatcmpl-5", "id")),
    "vllm_tokens/prompt_logprobs_have_ranks": Wrong(
        COMPLETIONS, put(None, "choices", 0, "prompt_logprobs", 1, "*", "rank")
    ),
    "vllm_tokens/a_length_ends_in_length": Wrong(COMPLETIONS, put("stop", "choices", "*", "finish_reason")),
    "vllm_tokens/a_stop_token_is_among_the_ids": Wrong(COMPLETIONS, put(None, "choices", "*", "stop_reason")),
    "vllm_tokens/every_field_may_be_null": Wrong(COMPLETIONS, status=400),
    "vllm_tokens/top_k_of_minus_one_is_off": Wrong(COMPLETIONS, status=400),
    "vllm_tokens/unknown_fields_are_ignored": Wrong(COMPLETIONS, status=400),
    "vllm_tokens/generation_takes_seeds_of_63_bits": Wrong(IDS, status=400),
    "vllm_tokens/an_unknown_model_is_not_found": Wrong(COMPLETIONS, status=400),
    "vllm_tokens/chats_have_prompt_ids_at_the_top": Wrong(CHAT, drop("prompt_token_ids")),
    "vllm_tokens/streamed_ids_are_deltas": Wrong(COMPLETIONS, put([5], "choices", "*", "token_ids")),
    "vllm_tokens/generated_ids_have_a_logprob_each": Wrong(IDS, put([], *LOGPROBS, "content")),
    "vllm_tokens/generated_logprobs_name_their_tokens": Wrong(IDS, drop(*LOGPROBS, "content", "*", "token")),
    "vllm_tokens/generation_has_a_finish_reason_and_an_id": Wrong(IDS, put(None, "choices", "*", "finish_reason")),
    "vllm_tokens/a_chat_is_tokenized": Wrong("/tokenize", put(0, "count")),
    "vllm_control/control_answers_can_be_read": Wrong("/pause", chunked=True),
    "vllm_control/the_world_size_can_be_read": Wrong("/get_world_size", chunked=True),
    "vllm_control/get_may_have_a_body": Wrong("/get_world_size", status=400),
    "vllm_control/the_configuration_can_be_read": Wrong("/server_info", drop("vllm_config", "lora_config")),
    "vllm_control/health_is_200_during_a_pause": Wrong("/health", status=503),
    "vllm_control/requests_wait_during_a_pause": Wrong("/pause", swallowed=NOTHING),
    "vllm_control/a_pause_with_keep_goes_on_afterwards": Wrong("/is_paused", put(False, "is_paused")),
    "vllm_control/an_aborting_pause_returns_partial_tokens": Wrong("/pause", swallowed=NOTHING),
    "vllm_control/pauses_repeat": Wrong("/pause", status=409),
    "vllm_control/resumes_repeat": Wrong("/resume", status=409),
    "vllm_control/an_unknown_pause_mode_is_a_client_error": Wrong("/pause", status=500),
    "vllm_control/an_update_without_a_start_is_a_client_error": Wrong("/update_weights", status=500),
    "vllm_control/a_label_without_a_version_is_a_client_error": Wrong("/update_weight_version", status=500),
    "vllm_control/the_weight_version_is_a_string": Wrong("/weight_info", put(1, "weight_version")),
    "vllm_control/completions_are_aborted_by_id": Wrong("/abort_requests", swallowed=NOTHING),
    "vllm_control/generations_are_aborted_by_id": Wrong("/abort_requests", swallowed=NOTHING),
    "vllm_control/an_abort_of_nobody_is_no_error": Wrong("/abort_requests", status=400),
    "vllm_control/the_prefix_cache_is_reset": Wrong("/reset_prefix_cache", put("yes", "success")),
    "vllm_control/all_requests_are_aborted_without_ids": Wrong("/abort_requests", swallowed=NOTHING),
    "vllm_control/an_abort_spares_other_requests": Wrong(COMPLETIONS, put("abort", "choices", "*", "finish_reason")),
    "vllm_control/a_pause_with_wait_lets_requests_end": Wrong("/pause", swallowed=NOTHING),
    "vllm_control/a_request_that_was_paused_keeps_its_context": Wrong(
        COMPLETIONS, put(ANOTHER, *LOGPROBS, "token_logprobs", "*")
    ),
    "vllm_lora/an_adapter_is_listed_after_the_model": Wrong("/v1/models", put(None, "data", "*", "parent")),
    "vllm_lora/adapters_and_the_model_are_kept_apart": Wrong(COMPLETIONS, first()),
    "vllm_lora/an_adapter_that_was_unloaded_is_not_found": Wrong(COMPLETIONS, status=200),
    "vllm_lora/a_name_can_be_loaded_again_after_an_unload": Wrong(COMPLETIONS, first()),
    "vllm_lora/an_adapter_without_a_folder_is_not_found": Wrong(LOAD, status=200),
    "vllm_lora/unloading_nobody_is_not_found": Wrong(UNLOAD, status=200),
    "vllm_lora/a_name_that_is_taken_is_refused": Wrong(LOAD, status=200),
    "vllm_lora/an_adapter_is_replaced_in_place": Wrong(COMPLETIONS, first()),
    "vllm_lora/an_unload_lets_requests_end": Wrong(COMPLETIONS, put("abort", "choices", "*", "finish_reason")),
    "vllm_weights/answers_after_an_update_are_the_new_models": Wrong(UPDATE, swallowed=NOTHING),
    "vllm_weights/an_update_gives_the_weights_its_version": Wrong("/weight_info", put("initial", "weight_version")),
    "vllm_weights/cached_prefixes_are_not_stale": Wrong(COMPLETIONS, first()),
    "vllm_weights/requests_that_wait_get_the_new_weights": Wrong(UPDATE, swallowed=NOTHING),
    "vllm_weights/a_request_in_flight_tells_both_versions": Wrong(IDS, put([], "choices", "*", "weight_versions")),
    "vllm_weights/a_folder_that_is_not_there_changes_nothing": Wrong(UPDATE, status=500),
    "vllm_sleep/a_sleep_ends_when_the_server_wakes_up": Wrong("/is_sleeping", put(False, "is_sleeping")),
    "vllm_sleep/answers_after_a_sleep_of_level_1_are_as_before": Both(
        Wrong("/sleep", swallowed=NOTHING),
        Wrong(COMPLETIONS, put(lambda: [next(COUNTED)], "choices", "*", "token_ids")),
    ),
    "vllm_sleep/health_is_200_during_a_sleep": Wrong("/health", status=503),
    "vllm_sleep/requests_during_a_sleep_wait_or_are_refused": Wrong("/sleep", swallowed=NOTHING),
    "vllm_sleep/memory_wakes_up_by_tags": Wrong("/is_sleeping", put(True, "is_sleeping")),
    "vllm_sleep/a_sleep_of_level_2_is_filled_by_an_update": Wrong(
        COMPLETIONS, put(ANOTHER, *LOGPROBS, "token_logprobs", "*")
    ),
    "vllm_sleep/waking_up_repeats": Wrong("/wake_up", status=409),
    "vllm_sleep/an_unknown_level_is_a_client_error": Wrong("/sleep", status=500),
}
SGLANG: Final[Mapping[str, Around]] = {
    "sglang_generate/meta_info_has_the_fields_that_trainers_read": Wrong(GENERATE, drop(META, "weight_version")),
    "sglang_generate/tokens_come_with_finite_logprobs": Wrong(
        GENERATE, put(-9999.0, META, "output_token_logprobs", 0, 0)
    ),
    "sglang_generate/prompt_logprobs_begin_with_null": Wrong(GENERATE, put(-1.0, META, "input_token_logprobs", 0, 0)),
    "sglang_generate/a_length_says_how_long": Wrong(GENERATE, put("length", META, "finish_reason")),
    "sglang_generate/a_stop_token_is_named_and_kept": Wrong(GENERATE, put("a", META, "finish_reason", "matched")),
    "sglang_generate/a_batch_is_a_list_in_order": Wrong(
        GENERATE, lambda body: list(reversed(body)) if isinstance(body, list) else body
    ),
    "sglang_generate/requests_keep_their_ids": Wrong(GENERATE, put("another", META, "id")),
    "sglang_generate/every_field_may_be_null": Wrong(GENERATE, status=400),
    "sglang_generate/slimes_parameters_are_taken": Wrong(GENERATE, status=400),
    "sglang_generate/areals_parameters_are_taken": Wrong(GENERATE, status=400),
    "sglang_generate/unknown_fields_are_ignored": Wrong(GENERATE, status=400),
    "sglang_generate/seeds_have_63_bits": Wrong(GENERATE, put(lambda: [next(COUNTED)], "output_ids")),
    "sglang_generate/a_stream_ends_in_a_finish_reason_and_done": Wrong(GENERATE, put(None, META, "finish_reason")),
    "sglang_generate/an_unknown_parameter_is_a_client_error": Wrong(GENERATE, status=500),
    "sglang_generate/a_wrong_type_is_a_client_error": Wrong(GENERATE, status=200),
    "sglang_generate/no_prompt_is_a_client_error": Wrong(GENERATE, lambda _: "no"),
    "sglang_generate/no_json_is_a_client_error": Wrong(GENERATE, status=500),
    "sglang_control/health_is_200_during_a_pause": Wrong("/health", status=503),
    "sglang_control/health_is_200_while_requests_are_frozen": Wrong("/health", status=503),
    "sglang_control/get_health_may_have_a_body": Wrong("/health", status=400),
    "sglang_control/control_answers_can_be_read": Wrong("/continue_generation", chunked=True),
    "sglang_control/the_arguments_can_be_read": Wrong("/server_info", drop("enable_memory_saver")),
    "sglang_control/the_model_can_be_read": Wrong("/model_info", put(7, "weight_version")),
    "sglang_control/loads_can_be_summed": Wrong("/v1/loads", drop("loads", "*", "num_waiting_reqs")),
    "sglang_control/requests_wait_during_a_pause": Wrong("/pause_generation", swallowed=NOTHING),
    "sglang_control/a_pause_in_place_goes_on_afterwards": Wrong(GENERATE, put("abort", META, "finish_reason", "type")),
    "sglang_control/an_aborting_pause_returns_partial_tokens": Wrong(GENERATE, put([], META, "output_token_logprobs")),
    "sglang_control/pauses_repeat_in_another_mode": Wrong("/pause_generation", status=400),
    "sglang_control/resumes_repeat": Wrong("/continue_generation", status=400),
    "sglang_control/requests_are_aborted_by_id": Wrong("/abort_request", swallowed=NOTHING),
    "sglang_control/an_abort_of_nobody_is_no_error": Wrong("/abort_request", status=400),
    "sglang_control/the_cache_is_flushed_by_get": Wrong("/flush_cache", status=400),
    "sglang_control/an_unknown_pause_mode_is_a_client_error": Wrong("/pause_generation", status=500),
    "sglang_control/an_update_of_an_unknown_group_is_a_client_error": Wrong(
        "/update_weights_from_distributed", status=500
    ),
    "sglang_control/a_group_of_nobody_is_a_client_error": Wrong("/destroy_weights_update_group", status=200),
    "sglang_control/a_label_without_a_version_is_a_client_error": Wrong("/update_weight_version", status=500),
    "sglang_control/all_requests_are_aborted": Wrong("/abort_request", swallowed=NOTHING),
    "sglang_control/an_abort_spares_other_requests": Wrong(GENERATE, put("abort", META, "finish_reason", "type")),
    "sglang_control/a_request_that_was_paused_keeps_its_context": Wrong(GENERATE, put(ANOTHER, *OUTPUT)),
    "sglang_lora/adapters_and_the_model_are_kept_apart": Wrong(GENERATE, first()),
    "sglang_lora/completions_name_an_adapter_after_the_model": Wrong(
        COMPLETIONS, put(ANOTHER, *LOGPROBS, "token_logprobs", "*")
    ),
    "sglang_lora/an_adapter_that_was_unloaded_is_refused": Wrong(GENERATE, status=200),
    "sglang_lora/a_name_can_be_loaded_again_after_an_unload": Wrong(GENERATE, first()),
    "sglang_lora/a_name_that_is_taken_keeps_its_word": Wrong(GENERATE, first()),
    "sglang_lora/an_adapter_without_a_folder_is_refused": Wrong("/load_lora_adapter", put(True, "success")),
    "sglang_lora/unloading_nobody_is_a_client_error": Wrong("/unload_lora_adapter", status=200),
    "sglang_lora/an_unload_lets_requests_end": Wrong(GENERATE, put("abort", META, "finish_reason", "type")),
    "sglang_weights/answers_after_an_update_are_the_new_models": Wrong(DISK, swallowed=b'{"success": true}'),
    "sglang_weights/an_update_gives_the_weights_its_version": Wrong("/model_info", put("7", "weight_version")),
    "sglang_weights/cached_prefixes_are_not_stale": Wrong(GENERATE, first()),
    "sglang_weights/an_update_during_a_pause_can_be_made": Wrong(DISK, swallowed=b'{"success": true}'),
    "sglang_weights/a_request_in_flight_tells_both_versions": Wrong(GENERATE, put([], META, "weight_versions")),
    "sglang_weights/an_update_can_abort_requests": Wrong(DISK, swallowed=b'{"success": true}'),
    "sglang_weights/a_folder_that_is_not_there_changes_nothing": Wrong(DISK, put(True, "success")),
    "sglang_memory/answers_of_memory_can_be_read": Wrong("/release_memory_occupation", chunked=True),
    "sglang_memory/the_cache_can_be_released_alone": Wrong(GENERATE, put(lambda: [next(COUNTED)], "output_ids")),
    "sglang_memory/released_weights_are_filled_by_an_update": Wrong(GENERATE, put(ANOTHER, *OUTPUT)),
    "sglang_memory/health_is_200_while_memory_is_released": Wrong("/health", status=503),
    "sglang_memory/requests_while_memory_is_released_wait": Both(
        Wrong("/pause_generation", swallowed=NOTHING), Wrong("/release_memory_occupation", swallowed=b"null")
    ),
    "sglang_memory/an_unknown_tag_is_a_client_error": Wrong("/release_memory_occupation", status=500),
}
MUTANTS: Final[Mapping[str, tuple[Dialect, Around]]] = {
    **{f"openai/{name}": (Dialect.VLLM, wrong) for name, wrong in OPENAI.items()},
    **{name: (Dialect.VLLM, wrong) for name, wrong in VLLM.items()},
    **{name: (Dialect.SGLANG, wrong) for name, wrong in SGLANG.items()},
}
"""For each case a wrong server that it must catch."""


@asynccontextmanager
async def serving(
    engine: InferenceEngine, dialect: Dialect, wrong: Around | None = None, **more: Any
) -> AsyncIterator[str]:
    def create(engine: InferenceEngine, config: ServerConfig) -> Starlette:
        app = create_app(engine, config)
        if wrong is not None:
            app.add_middleware(wrong.around)
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "create_app", create)
        server = Server(engine, ServerConfig(port=0, **{"dialect": dialect.value, **more}))
    async with server:
        yield server.url


async def run(url: str, ids: Collection[str] | None = None, **options: Any) -> list[CaseEntry]:
    async with connected(Access(url, **options)) as target:
        return [entry async for entry in run_routes(target, choose(route_cases(target.dialect), None, ids))]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_streamed_text_may_hold_line_ends_of_unicode() -> None:
    text = "a\x85b\u2028c\u2029d"
    events = f'data: {{"text":"{text}"}}\r\n\r\ndata: [DONE]\n\n'.encode()
    stream = Stream(httpx.Response(200, content=events), COMPLETIONS, asyncio.get_running_loop().time() + HANGING)
    assert [event.mapping() for event in await stream.rest()] == [{"text": text}]
    assert stream.is_done


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dialect", [Dialect.VLLM, Dialect.SGLANG])
async def test_our_server_passes(engine: InferenceEngine, material: Material, dialect: Dialect, processes: int) -> None:
    async with serving(engine, dialect, processes=processes) as url:
        entries = await run(url, material=material)
    ended = {entry.case: (entry.verdict, entry.message) for entry in entries}
    refused = {name for name, (verdict, _) in ended.items() if verdict is Verdict.REFUSED}
    assert refused <= WITHOUT_A_GPU
    assert {name: end for name, end in ended.items() if name not in refused and end[0] is not Verdict.PASSED} == {}
    assert ended.keys() == {case.id for case in route_cases(dialect)}
    await require_ready_and_idle(engine)


async def test_openais_cases_alone_run_where_asked(engine: InferenceEngine) -> None:
    async with serving(engine, Dialect.SGLANG) as url:
        entries = await run(url, dialect=Dialect.OPENAI)
    assert [entry.case for entry in entries] == [f"openai/{name}" for name in OPENAI]


async def test_each_case_has_a_server_that_it_catches() -> None:
    assert MUTANTS.keys() == {case.id for case in route_cases()}


@pytest.mark.slow  # `make mutants` runs these as well
@pytest.mark.parametrize("name", MUTANTS)
async def test_a_wrong_server_is_caught(engine: InferenceEngine, material: Material, name: str) -> None:
    dialect, wrong = MUTANTS[name]
    async with serving(engine, dialect, wrong) as url:
        (entry,) = await run(url, {name}, dialect=dialect, material=material)
    assert entry.verdict is Verdict.FAILED, entry
    assert entry.message.startswith("AssertionError: "), entry.message
    await engine.continue_generation()


async def test_cases_that_load_something_need_the_models_folder(engine: InferenceEngine) -> None:
    async with serving(engine, Dialect.SGLANG) as url:
        (entry,) = await run(url, {"sglang_weights/answers_after_an_update_are_the_new_models"})
    assert (entry.verdict, "--model" in entry.message) == (Verdict.NOT_RUN, True)


async def test_no_weights_are_lost_that_cannot_be_pushed_back(engine: InferenceEngine) -> None:
    sleeps = {case.id for case in route_cases(Dialect.VLLM) if case.id.startswith("vllm_sleep/")}
    async with serving(engine, Dialect.VLLM) as url:
        entries = await run(url, sleeps)
    assert not [entry for entry in entries if entry.verdict is Verdict.FAILED]
    await require_ready_and_idle(engine)


async def test_an_answer_is_held_to_the_weights_that_made_it(engine: InferenceEngine, material: Material) -> None:
    completion = (await engine.generate([5, 6], {"max_new_tokens": 8, "logprobs": 0})).completions[0]
    assert completion.logprobs is not None
    sampled = Sampled([5, 6], completion.token_ids, completion.logprobs)
    material.require(sampled, material.model, material.pushed, material.merged(1))
    for wrong in (material.pushed, material.merged(1)):
        with pytest.raises(AssertionError, match="whose weights should be served"):
            material.require(sampled, wrong, material.model)


async def test_a_route_that_is_not_offered_is_refused(engine: InferenceEngine) -> None:
    async with serving(engine, Dialect.VLLM, Wrong("/pause", status=404)) as url:
        (entry,) = await run(url, {"vllm_control/pauses_repeat"})
    assert entry.verdict is Verdict.REFUSED
    assert entry.message.startswith("POST /pause: 404")


async def test_a_route_that_does_not_answer_fails_at_its_deadline(engine: InferenceEngine) -> None:
    await engine.pause_generation(PauseMode.IN_PLACE)
    try:
        async with serving(engine, Dialect.VLLM) as url:
            (entry,) = await run(url, {"openai/choices_are_numbered"}, timeout=1.0)
    finally:
        await engine.continue_generation()
    assert entry.verdict is Verdict.FAILED
    assert entry.message == "AssertionError: POST /v1/completions did not answer within 1 s"


async def test_keys_are_sent_and_their_lack_is_told(engine: InferenceEngine) -> None:
    keys: dict[str, Any] = {"api_key": "a-key-for-requests", "control_key": "a-key-for-control"}
    cases = {"openai/choices_are_numbered", "vllm_control/pauses_repeat"}
    async with serving(engine, Dialect.VLLM, **keys) as url:
        assert [entry.verdict for entry in await run(url, cases, **keys)] == [Verdict.PASSED] * 2
        _, control = await run(url, cases, api_key="a-key-for-requests")
        assert control.verdict is Verdict.NOT_RUN
        assert "--control-key" in control.message
        with pytest.raises(InvalidConfig, match="--api-key"):
            await run(url)


async def test_a_server_that_cannot_be_checked_is_a_typed_error(engine: InferenceEngine) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(InvalidConfig, match="cannot be reached"):
            await run(closed)
    for url in ("nonsense", "ftp://host", "http://"):
        with pytest.raises(InvalidConfig, match="expected an address"):
            await run(url)
    for wrong in (Wrong("/v1/models", lambda _: []), Wrong("/v1/models", put([], "data"))):
        async with serving(engine, Dialect.VLLM, wrong) as url:
            with pytest.raises(InvalidConfig, match="lists no model"):
                await run(url)
    async with serving(engine, Dialect.VLLM, Wrong("/v1/models", put("me", "data", 0, "owned_by"))) as url:
        with pytest.raises(InvalidConfig, match="give --dialect"):
            await run(url)


async def test_the_command_reports_and_exits_as_the_suite_does(engine: InferenceEngine, tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    async def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        wide = os.environ | {"COLUMNS": "160"}
        return await asyncio.to_thread(warm_python.run, "-m", "drivetrain", "conformance", *arguments, env=wide)

    chosen = ("--case", "openai/choices_are_numbered", "--report", str(file))
    async with serving(engine, Dialect.VLLM) as url:
        done = await command("--url", url, *chosen)
        assert (done.returncode, "vllm: 1 passed" in done.stdout) == (0, True), done
        assert (await command("--url", url, "--case", "openai/nothing")).returncode == 2
        assert (await command("--url", url, "transformers")).returncode == 2
        as_json = await command("--url", url, *chosen, "--json")
        assert json.loads(as_json.stdout) == json.loads(file.read_text())
    async with serving(engine, Dialect.VLLM, OPENAI["choices_are_numbered"]) as url:
        done = await command("--url", url, *chosen)
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done
    (case,) = json.loads(file.read_text())["cases"]
    assert (case["verdict"], case["message"]) == ("failed", "AssertionError: choices are numbered [0, 0]")
    assert (await command("--dialect", "vllm")).returncode == 2
    listed = await command("--dialect", "sglang", "--list")
    assert "sglang_control/resumes_repeat" in listed.stdout
    assert "vllm_control" not in listed.stdout
