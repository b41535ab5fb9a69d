"""Conclusions from the answers of a running SGLang server, tested without a server."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from drivetrain import (
    Capability,
    EngineConfig,
    EngineStartError,
    FinishReason,
    GenerateRequest,
    InvalidConfig,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    UnsupportedCapability,
    create_engine,
)
from drivetrain.errors import EngineInternalError, EngineOutOfMemory
from drivetrain.process.handshake import open_for, opened_config
from drivetrain.servers.http_client import refusal
from drivetrain.testing import tiny_model
from drivetrain_sglang import remote_info, translate
from drivetrain_sglang.remote import KIND, SGLangServerBackend
from drivetrain_sglang.translate import Ending

KEY = "a-key-that-nobody-may-see"
SERVER: dict[str, object] = {
    "version": "0.5.23",
    "dtype": "bfloat16",
    "device": "cuda",
    "revision": None,
    "mem_fraction_static": 0.8,
    "chunked_prefill_size": 8192,
    "max_running_requests": None,
    "disable_radix_cache": False,
    "attention_backend": "fa3",
    "enable_memory_saver": False,
    "enable_priority_scheduling": False,
    "enable_lora": None,
    "max_lora_rank": None,
    "max_req_input_len": 1018,
    "preferred_sampling_params": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
}
MODEL: dict[str, object] = {"is_generation": True, "weight_version": "default", "architectures": ["Qwen2ForCausalLM"]}


def says(**server: object) -> remote_info.ServerSays:
    return remote_info.ServerSays(SERVER | server, MODEL)


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping(
        {"backend": "sglang-server", "model": "m", "endpoint": "http://127.0.0.1:1", **fields}
    )


def request(stops: tuple[int, ...] = (2,), **params: object) -> GenerateRequest:
    return GenerateRequest("r", [1, 2], SamplingParams.model_validate(params), 8, stops, LogprobsMode.TEMPERATURE)


def chunk(ids: list[int], reason: dict[str, object] | None = None, **meta: object) -> dict[str, Any]:
    pairs = [[-float(token), token, None] for token in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": pairs, **meta}}


# Configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["127.0.0.1:30000", "ftp://host", "http://", "http://host:port", "http://h/?a=b"])
def test_an_endpoint_is_the_address_of_a_server(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="http://host:port") as refused:
        config(endpoint=endpoint)
    assert refused.value.field == "endpoint"


def test_the_key_is_shown_nowhere() -> None:
    made = config(endpoint_api_key=KEY)
    assert made.endpoint_api_key is not None
    assert made.endpoint_api_key.get_secret_value() == KEY
    for shown in (repr(made), str(made), str(made.model_dump(mode="json")), made.model_dump_json()):
        assert KEY not in shown
    with pytest.raises(InvalidConfig) as refused:
        config(endpoint=f"http://user:{KEY}@127.0.0.1:1")
    assert KEY not in str(refused.value)
    with pytest.raises(InvalidConfig) as refused:
        config(endpoint_api_key=[KEY])
    assert KEY not in str(refused.value)


def test_a_host_process_gets_the_key() -> None:
    arrived = opened_config(open_for(config(endpoint_api_key=KEY), "sglang-server"))
    assert arrived.endpoint_api_key is not None
    assert arrived.endpoint_api_key.get_secret_value() == KEY


@pytest.mark.parametrize(("field", "value"), [("endpoint", "http://127.0.0.1:1"), ("endpoint_api_key", KEY)])
def test_a_backend_that_starts_its_engine_refuses_a_server(field: str, value: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        create_engine("transformers", model=str(tiny_model()), **{field: value})
    assert refused.value.field == field
    assert KEY not in str(refused.value)


def test_without_an_endpoint_there_is_no_server() -> None:
    with pytest.raises(InvalidConfig, match="endpoint is missing"):
        create_engine("sglang-server", model=str(tiny_model()))


def test_nobody_there_is_an_error_in_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(EngineStartError, match="cannot be reached"):
        create_engine("sglang-server", model=str(tiny_model()), endpoint=f"http://127.0.0.1:{port}")
    assert time.monotonic() - begun < 60


def test_somebody_who_does_not_answer_is_an_error_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begun = time.monotonic()
        with pytest.raises(EngineStartError, match="did not answer"):
            create_engine(
                "sglang-server", model=str(tiny_model()), endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"
            )
        assert time.monotonic() - begun < 60


def test_an_engine_is_made_also_within_a_running_loop() -> None:
    async def make() -> None:
        SGLangServerBackend.capabilities(config())

    with pytest.raises(EngineStartError, match="cannot be reached"):
        asyncio.run(make())


# Server info ---------------------------------------------------------------------------------------------------------


def test_claims_follow_what_the_server_was_launched_with() -> None:
    plain = remote_info.claims(config(), says())
    assert Capability.PREFIX_CACHE in plain
    assert plain.isdisjoint({Capability.PRIORITY, Capability.LORA, Capability.SEED, Capability.WEIGHTS_DISK})
    assert Capability.PREFIX_CACHE not in remote_info.claims(config(), says(disable_radix_cache=True))
    assert Capability.PRIORITY in remote_info.claims(config(), says(enable_priority_scheduling=True))
    assert Capability.LORA in remote_info.claims(config(enable_lora=True), says(enable_lora=True))
    assert Capability.LORA not in remote_info.claims(config(enable_lora=True), says(enable_lora=True, dp_size=2))
    embeds = remote_info.ServerSays(SERVER, MODEL | {"is_generation": False})
    assert remote_info.claims(config(task="embed"), embeds) == {Capability.EMBED}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preferred_sampling_params", '{"top_k": 3}'),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "prefill"),
        ("skip_tokenizer_init", True),
    ],
)
def test_a_server_that_changes_what_requests_mean_is_refused(name: str, value: object) -> None:
    remote_info.check_server(says(), "e")
    with pytest.raises(InvalidConfig, match=name):
        remote_info.check_server(says(**{name: value}), "e")


def test_a_server_that_may_answer_from_copies_of_old_weights_is_refused() -> None:
    remote_info.check_server(says(dcp_size=1, dcp_replicate_q_proj=None), "e")
    remote_info.check_server(says(dcp_size=2, dcp_replicate_q_proj=False), "e")
    for value in (True, None):
        with pytest.raises(InvalidConfig, match="--no-dcp-replicate-q-proj"):
            remote_info.check_server(says(dcp_size=2, dcp_replicate_q_proj=value), "e")


@pytest.mark.parametrize(("version", "fine"), [("0.5.22", False), ("0.5.23.post1", True), ("0.6.0rc1", True)])
def test_an_old_server_is_refused(version: str, fine: bool) -> None:
    if fine:
        remote_info.check_server(says(version=version), "e")
    else:
        with pytest.raises(EngineStartError, match=r"0\.5\.22"):
            remote_info.check_server(says(version=version), "e")


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("dtype", "bfloat16", "float16"),
        ("device", "cuda", "cpu"),
        ("gpu_memory_utilization", 0.8, 0.5),
        ("max_num_batched_tokens", 8192, 512),
        ("enable_prefix_caching", True, False),
        ("attention_backend", "fa3", "triton"),
        ("enable_sleep", False, True),
        ("weight_version", "default", "step-3"),
        ("engine_kwargs", {"mem_fraction_static": 0.8}, {"mem_fraction_static": 0.7}),
        ("engine_kwargs", {}, {"no_such_argument": None}),
    ],
)
def test_what_only_a_launch_can_honour_must_agree(field: str, right: object, wrong: object) -> None:
    remote_info.check_agreement(config(**{field: right}), says())
    with pytest.raises(InvalidConfig) as refused:
        remote_info.check_agreement(config(**{field: wrong}), says())
    assert refused.value.field == field


def test_what_was_not_set_need_not_agree() -> None:
    remote_info.check_agreement(config(), says(enable_memory_saver=True, disable_radix_cache=True))
    remote_info.check_agreement(config(dtype="auto"), says())


def test_the_rank_of_adapters_is_at_most_the_servers() -> None:
    server = says(enable_lora=True, max_lora_rank=16)
    remote_info.check_agreement(config(enable_lora=True, max_lora_rank=8), server)
    with pytest.raises(InvalidConfig, match="max_lora_rank=32"):
        remote_info.check_agreement(config(enable_lora=True, max_lora_rank=32), server)


def test_a_task_that_the_model_is_not_for_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="embeds"):
        remote_info.check_agreement(config(), remote_info.ServerSays(SERVER, MODEL | {"is_generation": False}))


def test_the_types_name() -> None:
    assert remote_info.dtype_of(says(dtype="auto"), "float32") == "float16"
    assert remote_info.dtype_of(says(dtype="auto"), "bfloat16") == "bfloat16"
    assert remote_info.dtype_of(says(dtype="half"), "bfloat16") == "float16"


def test_replicas_are_counted_together() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 1, "memory": {"kv_cache_gb": 0.5, "weight_gb": 1.0}}
    stats = remote_info.stats_of({"loads": [rank, rank]})
    assert (stats.running, stats.waiting, stats.kv_cache_bytes, stats.weight_bytes) == (4, 2, 2**30, 2**31)
    with pytest.raises(EngineInternalError, match="/v1/loads"):
        remote_info.stats_of({"loads": [{}]})


def test_logprobs_without_temperature_are_recognised() -> None:
    def answer(*top: tuple[float, int]) -> dict[str, Any]:
        return {"meta_info": {"output_top_logprobs": [[[value, token, None] for value, token in top]]}}

    raw = answer((-1.0, 5), (-2.0, 6), (-3.0, 7))
    assert remote_info.is_after_temperature(answer((-0.2, 5), (-2.2, 6), (-4.2, 7)), raw, 0.5)
    assert not remote_info.is_after_temperature(raw, raw, 0.5)


# Requests and results ------------------------------------------------------------------------------------------------


def test_stops_hold_whether_eos_does_or_not() -> None:
    eos = frozenset({2, 3})
    plain = translate.plain_sampling_params
    assert translate.ending(request((2, 3, 9)), eos) is Ending.BY_ITSELF
    assert (plain(request((2, 3, 9)), eos)["ignore_eos"], plain(request((2, 3, 9)), eos)["stop_token_ids"]) == (
        False,
        [2, 3, 9],
    )
    assert translate.ending(request(()), eos) is Ending.NEVER
    assert translate.ending(request((9,)), eos) is Ending.WATCHED
    assert (plain(request((9,)), eos)["ignore_eos"], plain(request((9,)), eos)["stop_token_ids"]) == (True, [])


def test_what_a_plain_server_does_not_draw_never_reaches_it() -> None:
    plain = translate.plain_sampling_params
    assert plain(request(top_p=0.5, min_p=0.1), frozenset())["min_p"] == 0.1
    for asked in (request(top_k=3, top_p=0.5), request(logit_bias={1: 1.0}), request(repetition_penalty=1.5)):
        with pytest.raises(EngineInternalError, match="cannot sample by"):
            plain(asked, frozenset())


def test_chunks_that_hold_everything_so_far_become_deltas() -> None:
    deltas = translate.Deltas()
    assert deltas.delta(chunk([4]))["output_ids"] == [4]
    assert deltas.delta(chunk([4]))["output_ids"] == []
    more = deltas.delta(chunk([4, 5, 6]))
    assert (more["output_ids"], more["meta_info"]["output_token_logprobs"]) == (
        [5, 6],
        [[-5.0, 5, None], [-6.0, 6, None]],
    )
    # A request aborted while it waits comes back without its earlier tokens.
    assert deltas.delta({"meta_info": {"finish_reason": {"type": "abort"}}})["output_ids"] == []


def test_a_watched_stop_ends_as_the_servers_own() -> None:
    asked = request((5,), logprobs=0)
    cut = translate.cut_at(chunk([4, 5, 6]), asked.stop_token_ids)
    collected = translate.Collected(asked)
    collected.add(cut)
    result = collected.result("v")
    assert (result.token_ids, result.logprobs) == ([4, 5], [-4.0, -5.0])
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, 5)
    untouched = chunk([4, 6])
    assert translate.cut_at(untouched, asked.stop_token_ids) is untouched


def test_refusals_over_http_are_told_apart() -> None:
    refused = refusal(400, b'{"error": {"message": "top_p must be in (0, 1]"}}', "/generate", KIND)
    assert isinstance(refused, InvalidRequest)
    assert "top_p must be" in str(refused)
    assert isinstance(refusal(500, b"CUDA out of memory", "/generate", KIND), EngineOutOfMemory)
    assert isinstance(refusal(404, b'{"detail": "Not Found"}', "/x", KIND), EngineInternalError)


async def test_a_capability_that_needs_the_inside_is_refused() -> None:
    with pytest.raises(UnsupportedCapability):
        await SGLangServerBackend(config()).read_weight("lm_head.weight")
