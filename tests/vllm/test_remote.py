"""Conclusions from the answers of a running vLLM server, tested without a server."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import (
    Capability,
    EngineConfig,
    EngineDied,
    EngineStartError,
    FinishReason,
    GenerateRequest,
    InvalidConfig,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    VersionSpan,
    create_engine,
)
from drivetrain.errors import EngineInternalError, EngineOutOfMemory
from drivetrain.servers.http_client import refusal
from drivetrain.testing import tiny_model
from drivetrain_vllm import remote_info, translate
from drivetrain_vllm.remote import KIND

CONFIG: dict[str, Any] = {
    "instance_id": "1",
    "model_config": {
        "model": "m",
        "dtype": "torch.bfloat16",
        "revision": None,
        "max_model_len": 1024,
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "skip_tokenizer_init": False,
        "logits_processors": None,
        "enable_sleep_mode": False,
    },
    "scheduler_config": {
        "runner_type": "generate",
        "policy": "fcfs",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    },
    "cache_config": {
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": None,
        "block_size": 16,
    },
    "parallel_config": {"pipeline_parallel_size": 1, "data_parallel_size": 1, "_api_process_count": 1},
    "device_config": {"device": "cuda"},
    "attention_config": {"backend": "FLASH_ATTN"},
    "structured_outputs_config": {"reasoning_parser": ""},
    "speculative_config": None,
}
PATHS = frozenset({"/server_info", "/weight_info", remote_info.GENERATE})


def says(changes: dict[str, object] | None = None, **fields: Any) -> remote_info.ServerSays:
    config = {name: dict(part) if isinstance(part, dict) else part for name, part in CONFIG.items()}
    for name, value in (changes or {}).items():
        part, _, field = name.partition(".")
        if field:
            config[part][field] = value
        else:
            config[part] = value
    given = {"paths": PATHS, "sampling_fields": translate.PLAIN_FIELDS, "weight_version": "default"} | fields
    return remote_info.ServerSays(version="0.32.0", config=config, **given)


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping(
        {"backend": "vllm-server", "model": "m", "endpoint": "http://127.0.0.1:1", **fields}
    )


def request(
    stops: tuple[int, ...] = (2,), mode: LogprobsMode = LogprobsMode.RAW, new: int = 8, **params: object
) -> GenerateRequest:
    return GenerateRequest("r", [1, 2, 3], SamplingParams.model_validate(params), new, stops, mode)


def entry(token: int, logprob: float, rank: int | None, *more: dict[str, object]) -> dict[str, object]:
    own: dict[str, object] = {"token_id": token, "logprob": logprob, "rank": rank}
    return {**own, "top_logprobs": [own, *more]} if more else own


def answer(ids: list[int], reason: str | None, stop: int | None = None, **fields: object) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "finish_reason": reason, "stop_reason": stop, "weight_versions": None}
    return {"choices": [choice | fields], "usage": None}


# Server info ---------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_there_is_no_server() -> None:
    with pytest.raises(InvalidConfig, match="endpoint is missing"):
        create_engine("vllm-server", model=str(tiny_model()))


def test_claims_follow_what_the_server_was_launched_with() -> None:
    plain = remote_info.claims(config(), says())
    assert {Capability.LOGPROBS_RAW, Capability.TOP_P, Capability.SEED} <= plain
    assert plain.isdisjoint({Capability.PRIORITY, Capability.PREFIX_CACHE, Capability.PAUSE_IN_PLACE, Capability.MIN_P})
    assert Capability.PREFIX_CACHE in remote_info.claims(config(), says(reports_cached=True))
    assert Capability.PREFIX_CACHE not in remote_info.claims(
        config(), says({"cache_config.enable_prefix_caching": False}, reports_cached=True)
    )
    assert Capability.PRIORITY in remote_info.claims(config(), says({"scheduler_config.policy": "priority"}))
    paused = remote_info.claims(config(), says(paths=PATHS | {"/pause", "/resume"}))
    assert {Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT} <= paused
    assert Capability.TOP_LOGPROBS not in remote_info.claims(config(), says({"model_config.max_logprobs": 0}))


def test_logprobs_are_claimed_as_long_as_they_are_what_they_say() -> None:
    processed = says({"model_config.logprobs_mode": "processed_logprobs"})
    tempered = remote_info.claims(config(), processed)
    assert Capability.LOGPROBS_TEMPERATURE in tempered
    assert tempered.isdisjoint({Capability.TOP_K, Capability.LOGIT_BIAS, Capability.STRUCTURED_JSON})
    whole = remote_info.claims(config(logprobs_mode="processed"), processed)
    assert {Capability.LOGPROBS_PROCESSED, Capability.TOP_K, Capability.STRUCTURED_JSON} <= whole
    assert Capability.LOGPROBS_TEMPERATURE not in whole
    assert Capability.STRUCTURED_JSON not in remote_info.claims(config(), says())
    blind = says({"model_config.logprobs_mode": "processed_logprobs", "model_config.skip_tokenizer_init": True})
    assert Capability.STRUCTURED_JSON not in remote_info.claims(config(logprobs_mode="processed"), blind)


def test_a_model_that_does_not_generate_does_what_it_is_for() -> None:
    pooling = says({"scheduler_config.runner_type": "pooling"})
    assert remote_info.claims(config(task="embed"), pooling) == {Capability.EMBED}
    assert remote_info.claims(config(task="reward"), pooling) == {Capability.REWARD_SCORE}
    with pytest.raises(InvalidConfig, match="does not generate"):
        remote_info.check_agreement(config(), pooling)
    with pytest.raises(InvalidConfig, match="generates"):
        remote_info.check_agreement(config(task="embed"), says())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_config", {"method": "ngram"}),
        ("model_config.logits_processors", ["a:B"]),
        ("model_config.logprobs_mode", "raw_logits"),
        ("parallel_config._api_process_count", 2),
        ("structured_outputs_config.reasoning_parser", "qwen3"),
    ],
)
def test_a_server_that_changes_what_requests_mean_is_refused(name: str, value: object) -> None:
    remote_info.check_server(says(), "e")
    with pytest.raises(InvalidConfig, match=name):
        remote_info.check_server(says({name: value}), "e")


def test_a_server_that_would_drop_a_field_is_refused() -> None:
    with pytest.raises(EngineStartError, match="structured_outputs"):
        remote_info.check_server(says(sampling_fields=translate.PLAIN_FIELDS - {"structured_outputs"}), "e")


def test_a_server_is_told_how_to_be_launched() -> None:
    remote_info.check_paths(PATHS, "e")
    with pytest.raises(EngineStartError, match="VLLM_SERVER_DEV_MODE"):
        remote_info.check_paths(PATHS - {"/server_info"}, "e")
    with pytest.raises(EngineStartError, match="--enable-scale-out"):
        remote_info.check_paths(PATHS - {remote_info.GENERATE}, "e")


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("dtype", "bfloat16", "float16"),
        ("device", "cuda", "cpu"),
        ("gpu_memory_utilization", 0.9, 0.5),
        ("max_num_seqs", 256, 8),
        ("enable_prefix_caching", True, False),
        ("attention_backend", "FLASH_ATTN", "FLASHINFER"),
        ("enable_sleep", False, True),
        ("engine_kwargs", {"block_size": 16}, {"block_size": 32}),
        ("engine_kwargs", {}, {"no_such_argument": None}),
    ],
)
def test_what_only_a_launch_can_honour_must_agree(field: str, right: object, wrong: object) -> None:
    remote_info.check_agreement(config(**{field: right}), says())
    with pytest.raises(InvalidConfig) as refused:
        remote_info.check_agreement(config(**{field: wrong}), says())
    assert refused.value.field == field


def test_weights_without_a_version_take_any() -> None:
    remote_info.check_agreement(config(weight_version="step-3"), says())
    remote_info.check_agreement(config(weight_version="step-3"), says(weight_version="step-3"))
    with pytest.raises(InvalidConfig, match="step-4"):
        remote_info.check_agreement(config(weight_version="step-3"), says(weight_version="step-4"))


def test_requests_are_counted_over_all_engines() -> None:
    metrics = "\n".join(
        f'vllm:num_requests_{kind}{{engine="{engine}",model_name="m"}} {count}.0'
        for kind, count in (("running", 2), ("waiting", 1))
        for engine in (0, 1)
    )
    stats = remote_info.stats_of(metrics, says({"cache_config.kv_cache_memory_bytes": 7}), 5)
    assert (stats.running, stats.waiting, stats.kv_cache_bytes, stats.weight_bytes) == (4, 2, 7, 5)
    with pytest.raises(EngineInternalError, match="disable-log-stats"):
        remote_info.stats_of("", says(), 0)


def test_the_schema_names_the_fields() -> None:
    params: dict[str, object] = {"properties": {"top_k": {}}}
    inline = {"GenerateRequest": {"properties": {"sampling_params": params}}}
    named = {"GenerateRequest": {"properties": {"sampling_params": {"$ref": "#/components/schemas/S"}}}, "S": params}
    for schemas in (inline, named):
        paths, fields = remote_info.schema_of({"paths": {"/health": {}}, "components": {"schemas": schemas}})
        assert (set(paths), set(fields)) == ({"/health"}, {"top_k"})
    assert remote_info.schema_of({}) == (frozenset(), frozenset())


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_request_says_all_that_is_asked() -> None:
    asked = request(
        (2, 9), top_k=3, top_p=0.5, logprobs=2, prompt_logprobs=0, logit_bias={4: 1.5}, temperature=0.7, ignore_eos=True
    )
    native = translate.plain_sampling_params(asked)
    assert native.keys() <= translate.PLAIN_FIELDS
    assert (native["stop_token_ids"], native["ignore_eos"], native["detokenize"]) == ([2, 9], True, False)
    assert (native["max_tokens"], native["top_k"], native["top_p"], native["temperature"]) == (8, 3, 0.5, 0.7)
    assert (native["logprobs"], native["prompt_logprobs"], native["logit_bias"]) == (3, 0, {"4": 1.5})
    assert translate.plain_sampling_params(request(logprobs=0))["logprobs"] == 0
    assert translate.plain_sampling_params(request(new=0))["max_tokens"] == 1


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_takes_for_another_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        translate.plain_sampling_params(request(temperature=temperature))
    assert refused.value.field == "sampling_params.temperature"


def test_more_alternatives_than_the_server_gives_are_refused() -> None:
    remote_info.check_count(SamplingParams(logprobs=19, prompt_logprobs=20), says())
    remote_info.check_count(SamplingParams(logprobs=200), says({"model_config.max_logprobs": -1}))
    for field, count in (("logprobs", 20), ("prompt_logprobs", 21)):
        with pytest.raises(InvalidRequest) as refused:
            remote_info.check_count(SamplingParams.model_validate({field: count}), says())
        assert refused.value.field == f"sampling_params.{field}"


# Results -------------------------------------------------------------------------------------------------------------


def test_the_likeliest_are_as_many_as_asked_for_whatever_was_drawn() -> None:
    asked = request(logprobs=2)
    collected = translate.Served(asked)
    unlikely = entry(7, -5.0, 40, entry(3, -0.5, 1), entry(4, -1.0, 2))
    likely = entry(4, -1.0, 2, entry(3, -0.5, 1), entry(9, -9999.0, 3))
    ids, logprobs, top = collected.add(answer([7, 4], "length", logprobs={"content": [unlikely, likely]}))
    assert (ids, logprobs) == ([7, 4], [-5.0, -1.0])
    assert top == [[(3, -0.5), (4, -1.0)], [(3, -0.5), (4, -1.0)]]


def test_what_cannot_be_drawn_is_no_alternative() -> None:
    collected = translate.Served(request(logprobs=3))
    only = entry(4, 0.0, 1, entry(3, -9999.0, 2))
    assert collected.add(answer([4], "length", logprobs={"content": [only]}))[2] == [[(4, 0.0)]]


def test_greedy_has_no_alternative_where_the_distribution_was_asked_for() -> None:
    likely = entry(4, -1.0, 1, entry(3, -1.5, 2))
    for mode, logprob, count in ((LogprobsMode.PROCESSED, 0.0, 1), (LogprobsMode.TEMPERATURE, -1.0, 2)):
        collected = translate.Served(request(mode=mode, logprobs=2, temperature=0))
        _, logprobs, top = collected.add(answer([4], "length", logprobs={"content": [likely]}))
        assert logprobs == [logprob]
        assert top is not None
        assert len(top[0]) == count


def test_a_stream_is_put_together() -> None:
    collected = translate.Served(request())
    assert collected.add(answer([4], None))[0] == [4]
    assert not collected.ended
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    collected.add(answer([2], "stop", 2, weight_versions=spans))
    collected.add({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}})
    result = collected.result("now")
    assert (result.token_ids, result.finish_reason, result.matched_stop) == ([4, 2], FinishReason.STOP, 2)
    assert result.weight_versions == [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)]
    assert result.cached_tokens == 32


def test_a_prompt_is_scored() -> None:
    collected = translate.Served(request(new=0, prompt_logprobs=1, return_prompt_ranks=True))
    scored = [
        None,
        {"2": {"logprob": -3.0, "rank": 9}, "8": {"logprob": -0.5, "rank": 1}},
        {"3": {"logprob": -0.1, "rank": 1}},
    ]
    collected.add(answer([5], "length") | {"prompt_logprobs": scored})
    result = collected.result("v")
    assert (result.token_ids, result.finish_reason) == ([], FinishReason.LENGTH)
    assert result.prompt_logprobs == [None, -3.0, -0.1]
    assert result.prompt_top_logprobs == [None, [(8, -0.5)], [(3, -0.1)]]
    assert result.prompt_ranks == [None, 9, 1]


def test_an_abort_keeps_what_there_is_under_the_versions_that_are_known() -> None:
    collected = translate.Served(request())
    collected.add(answer([4, 5], "abort", weight_versions=[]))
    result = collected.result("now")
    assert (result.token_ids, result.finish_reason) == ([4, 5], FinishReason.ABORT)
    assert result.weight_versions == [VersionSpan("now", 0, 2)]


def test_refusals_over_http_are_told_apart() -> None:
    refused = refusal(400, b'{"error": {"message": "top_p must be in (0, 1]"}}', remote_info.GENERATE, KIND)
    assert isinstance(refused, InvalidRequest)
    assert "top_p must be" in str(refused)
    dead = b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}'
    assert isinstance(refusal(400, dead, remote_info.GENERATE, KIND), EngineDied)
    assert isinstance(refusal(500, b"CUDA out of memory", remote_info.GENERATE, KIND), EngineOutOfMemory)
    assert isinstance(refusal(403, b'{"error": {"message": "disabled"}}', "/x", KIND), EngineInternalError)
