"""Translation to and from SGLang's terms, with no SGLang installed."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from drivetrain import (
    Capability,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    InvalidConfig,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    VersionSpan,
)
from drivetrain.errors import EngineInternalError, EngineOutOfMemory
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import Scoring
from drivetrain_sampling.packed_masks import pack
from drivetrain_sampling.scores import ScoredPrompt
from drivetrain_sglang import translate
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.errors import as_engine_error


def request(
    params: SamplingParams | None = None,
    mode: LogprobsMode = LogprobsMode.TEMPERATURE,
    seed: int | None = None,
    stops: tuple[int, ...] = (9,),
) -> GenerateRequest:
    return GenerateRequest("r", [1, 2, 3], params or SamplingParams(), 8, stops, mode, seed)


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "sglang", "model": "m", **fields})


@pytest.mark.parametrize(
    ("params", "mode", "seed", "native"),
    [
        ({}, "temperature", None, True),
        ({"temperature": 0, "logprobs": 3}, "raw", None, True),
        ({"temperature": 0.7, "logprobs": 0}, "temperature", None, True),
        ({"temperature": 0.7, "logprobs": 0}, "raw", None, False),
        ({"logprobs": 0}, "processed", None, False),
        ({"top_p": 0.9}, "temperature", None, True),
        ({"top_p": 0.9, "top_k": 5}, "temperature", None, False),
        ({"min_p": 0.1, "top_k": 5}, "temperature", None, False),
        ({}, "temperature", 4, False),
        ({"repetition_penalty": 1.1}, "temperature", None, False),
        ({"frequency_penalty": 0.1}, "temperature", None, False),
        ({"logit_bias": {3: 1.0}}, "temperature", None, False),
        ({"min_new_tokens": 2}, "temperature", None, False),
        ({"logit_processors": [{"kind": "disallowed_tokens", "token_ids": [3]}]}, "temperature", None, False),
        ({"structured_output": {"kind": "regex", "regex": "a"}}, "temperature", None, True),
        ({"structured_output": {"kind": "regex", "regex": "a"}, "logprobs": 0}, "temperature", None, False),
    ],
)
def test_only_what_sglang_draws_right_is_left_to_it(
    params: dict[str, object], mode: str, seed: int | None, native: bool
) -> None:
    asked = request(SamplingParams.model_validate(params), LogprobsMode(mode), seed)
    assert translate.drawn_by_sglang(asked) is native
    assert ("custom_params" in translate.sampling_params(asked)) is not native
    assert "custom_params" in translate.sampling_params(asked, deterministic=True), "where a batch may change nothing"


def test_every_stop_is_a_stop_of_the_request() -> None:
    native = translate.sampling_params(request(SamplingParams(ignore_eos=True), stops=(7,)))
    assert native["stop_token_ids"] == [7]
    assert "ignore_eos" not in native, "it would switch stop ids off"


def test_prompt_logprobs_begin_at_the_first_token() -> None:
    fields = translate.request_fields(request(SamplingParams(logprobs=1, prompt_logprobs=4)), "rid", "k", stream=False)
    assert (fields["logprob_start_len"], fields["top_logprobs_num"]) == (0, 4)
    assert "return_logprob" not in translate.request_fields(request(), "rid", "k", stream=True)


def scoring_request(tokens: int, last_n: int) -> GenerateRequest:
    asked = request(SamplingParams(max_new_tokens=0))
    return replace(asked, prompt_token_ids=list(range(tokens)), max_new_tokens=0, scoring=Scoring(last_n, 0.5))


@pytest.mark.parametrize(("tokens", "last_n", "start"), [(9, 3, 5), (9, 8, 0), (9, 9, 0), (2, 1, 0), (1, 1, None)])
def test_input_logprobs_begin_before_the_first_scored_position(tokens: int, last_n: int, start: int | None) -> None:
    fields = translate.request_fields(scoring_request(tokens, last_n), "rid", "k", stream=False)
    assert fields.get("logprob_start_len") == start
    assert translate.SCORING in fields["sampling_params"]["custom_params"]  # type: ignore[index]


def test_scores_come_whole() -> None:
    asked, prompt = scoring_request(2, 1), ScoredPrompt(Scoring(1, 0.5), [0, 1])
    part = prompt.part(0, torch.zeros(2, 4))
    assert part is not None
    prompt.add(part)
    collected = translate.Collected(asked)
    collected.add(
        {"output_ids": [], "meta_info": {translate.SCORES: [prompt.packed()], "finish_reason": {"type": "length"}}}
    )
    scores = collected.result("v").scores
    assert scores is not None
    assert scores.token_logprobs.tolist() == pytest.approx([math.log(0.25)])
    alone = translate.Collected(scoring_request(1, 1))
    alone.add({"output_ids": [], "meta_info": {"finish_reason": {"type": "length"}}})
    assert alone.result("v").scores is None, "the engine page scores one token alone"


def test_chunks_make_a_result() -> None:
    collected = translate.Collected(request(SamplingParams(logprobs=1)))
    first = {"output_token_logprobs": [(-0.5, 4, None)], "output_top_logprobs": [[(-0.1, 6, None), (-0.5, 4, None)]]}
    last = {
        "output_token_logprobs": [(-0.25, 9, None)],
        "output_top_logprobs": [[(-3.4e38, 5, None)]],
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
        "cached_tokens": 2,
    }
    assert collected.add({"output_ids": [4], "meta_info": first}) == ([4], [-0.5], [[(6, -0.1)]])
    collected.add({"output_ids": [9], "meta_info": last})
    result = collected.result("unused")
    assert result.token_ids == [4, 9]
    assert result.logprobs == [-0.5, -0.25]
    assert result.top_logprobs == [[(6, -0.1)], []], "what cannot be drawn has no logprob"
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, 9)
    assert result.weight_versions == [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)]
    assert result.cached_tokens == 2


def test_a_chunk_brings_the_hidden_states_of_all_tokens_so_far() -> None:
    collected = translate.Collected(request(SamplingParams(return_hidden_states=True)))
    of_prompt = [[0.0, 0.5], [1.0, 1.5]]
    collected.add({"output_ids": [4], "meta_info": {"hidden_states": [of_prompt]}})
    last = {"hidden_states": [of_prompt, [2.0, 2.5]], "finish_reason": {"type": "length"}}
    collected.add({"output_ids": [5], "meta_info": last})
    assert collected.result("v").hidden_states == [[1.0, 1.5], [2.0, 2.5]]


def test_a_release_without_labels_labels_the_whole() -> None:
    collected = translate.Collected(request())
    collected.add({"output_ids": [4, 5], "meta_info": {"finish_reason": {"type": "length"}}})
    assert collected.result("v3").weight_versions == [VersionSpan("v3", 0, 2)]


def test_a_release_without_labels_is_told_when_weights_were_replaced() -> None:
    collected = translate.Collected(request())
    collected.replaced("a", 1)
    collected.add({"output_ids": [4, 5, 6], "meta_info": {"finish_reason": {"type": "length"}}})
    assert collected.result("c").weight_versions == [VersionSpan("a", 0, 1), VersionSpan("c", 1, 3)]


@pytest.mark.parametrize("said", ["length", "abort"])
def test_a_stop_id_ends_a_sample_whatever_comes_at_the_same_time(said: str) -> None:
    collected = translate.Collected(request(stops=(9,)))
    collected.add({"output_ids": [4, 9], "meta_info": {"finish_reason": {"type": said, "message": "x"}}})
    result = collected.result("v1")
    assert (result.token_ids, result.finish_reason, result.matched_stop) == ([4, 9], FinishReason.STOP, 9)


def test_an_abort_before_any_token_is_empty() -> None:
    collected = translate.Collected(request(SamplingParams(logprobs=0)))
    collected.add({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}})
    result = collected.result("v")
    assert (result.token_ids, result.logprobs, result.weight_versions) == ([], [], [])


def test_an_abort_while_a_grammar_is_compiled_has_nothing_of_the_prompt_that_sglang_makes_up() -> None:
    ending = {"type": "abort", "message": translate.ABORTED_WORDS}
    assert translate.was_aborted_unread({"output_ids": [7], "meta_info": {"finish_reason": ending}})
    assert not translate.was_aborted_unread({"output_ids": [7], "meta_info": {"finish_reason": {"type": "abort"}}})
    sample = translate.Collected(request(SamplingParams()))
    sample.add(translate.ABORTED_UNREAD)
    assert sample.ended
    result = sample.result("1")
    assert (result.token_ids, result.finish_reason) == ([], FinishReason.ABORT)


def test_an_unknown_ending_is_no_ending() -> None:
    collected = translate.Collected(request())
    collected.add({"output_ids": [], "meta_info": {"finish_reason": {"type": "surprise"}}})
    with pytest.raises(EngineInternalError, match="surprise"):
        collected.result("v")


def experts_in(rows: NDArray[np.int16], *, encoded: bool = False, **asked: bool) -> translate.Collected:
    """Return a sample of three prompt tokens and two output tokens, with such rows of SGLang's record.

    Args:
        rows: The rows.
        encoded: They came in base64, as SGLang sends tensors.
        asked: Fields of the sampling parameters.
    """
    collected = translate.Collected(
        request(SamplingParams.model_validate(asked)), expert_shape=(3, 1), expert_layers=[1, 2]
    )
    packed = rows.tobytes()
    given = base64.b64encode(packed).decode() if encoded else packed
    meta = {"finish_reason": {"type": "length"}, "routed_experts": given}
    collected.add({"output_ids": [4, 5], "meta_info": meta})
    return collected


def test_experts_are_those_of_the_tokens_that_are_asked_for() -> None:
    every = np.arange(12, dtype=np.int16).reshape(4, 3, 1)
    every[:, 0] = -1  # a layer without experts
    assert (
        translate.request_fields(request(SamplingParams(return_routed_experts=True)), "r", "k", stream=False)[
            "routed_experts_start_len"
        ]
        == 2
    )
    own = experts_in(every[2:], encoded=True, return_routed_experts=True).result("v")
    assert (own.routed_experts, own.prompt_routed_experts) == (RoutedExperts.of(every[2:, 1:]), None)
    both = experts_in(every, return_routed_experts=True, return_prompt_routed_experts=True).result("v")
    assert both.routed_experts == RoutedExperts.of(every[2:, 1:])
    assert both.prompt_routed_experts == RoutedExperts.of(every[:3, 1:])
    alone = experts_in(every, return_prompt_routed_experts=True).result("v")
    assert (alone.routed_experts, alone.prompt_routed_experts) == (None, RoutedExperts.of(every[:3, 1:]))


def test_experts_that_were_not_recorded_are_an_error() -> None:
    every = np.zeros((4, 3, 1), dtype=np.int16)
    every[1] = -1
    for rows in (every, every[2:], every[:0]):
        with pytest.raises(EngineInternalError, match="from token 0 on none"):
            experts_in(rows, return_prompt_routed_experts=True).result("v")


def test_an_abort_before_any_token_has_no_experts() -> None:
    asked = SamplingParams(return_routed_experts=True, return_prompt_routed_experts=True)
    collected = translate.Collected(request(asked), expert_shape=(3, 1), expert_layers=[1, 2])
    collected.add({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}})
    result = collected.result("v")
    assert (result.routed_experts, result.prompt_routed_experts) == (RoutedExperts(), None)


@pytest.mark.parametrize(("fields", "asked", "claimed"), [({"num_experts": 4}, True, True), ({}, True, False)])
def test_where_experts_are_claimed(tmp_path: Path, fields: dict[str, int], asked: bool, claimed: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    experts = {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}
    for device, seen in (("cpu", experts), ("cuda", {Capability.ROUTED_EXPERTS})):
        given = config(model=str(tmp_path), device=device, engine_kwargs={"enable_return_routed_experts": asked})
        assert SGLangBackend.capabilities(given) & experts == (seen if claimed else set())


def test_prefixes_whose_experts_may_be_lost_are_not_shared(tmp_path: Path) -> None:
    asking, plain = request(SamplingParams(return_prompt_routed_experts=True)), request()
    for kwargs, is_shared in (({}, True), ({"enable_hierarchical_cache": True}, False)):
        backend = SGLangBackend(config(model=str(tmp_path), engine_kwargs=kwargs))
        assert backend.cache_key_of(plain) == backend.cache_key
        assert (backend.cache_key_of(asking) == backend.cache_key_of(asking)) is is_shared
        assert backend.cache_key_of(asking) != backend.cache_key


def test_masks_come_with_their_tokens() -> None:
    asked = request(SamplingParams(return_sampling_mask=True))
    assert "custom_params" in translate.sampling_params(asked), "SGLang's own sampler keeps no mask"
    mask = SamplingMask.of(300, [[4, 8], range(300), [9]])
    parts = pack(torch.from_numpy(mask.to_numpy()))
    collected = translate.Collected(asked)
    collected.add({"output_ids": [4, 5], "meta_info": {translate.MASK: parts[:2]}})
    assert collected.added_mask == mask[:2]
    collected.add({"output_ids": [9], "meta_info": {translate.MASK: parts[2:], "finish_reason": {"type": "length"}}})
    assert collected.result("v").sampling_mask == mask
    aborted = translate.Collected(asked)
    aborted.add({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}})
    assert aborted.result("v").sampling_mask is None


def test_sglangs_limits_are_above_ours() -> None:
    spread = config(context_length=64, tensor_parallel_size=2, expert_parallel_size=2)
    assert translate.engine_arguments(spread, "cuda", "bfloat16", 64)["ep_size"] == 2
    arguments = translate.engine_arguments(config(context_length=64), "cpu", "float32", 64)
    assert "ep_size" not in arguments
    assert arguments["context_length"] == 64 + translate.ROOM
    assert arguments["dtype"] == "float32"
    assert translate.fitting(64, 1000.0) == 64
    assert translate.fitting(64, 40.0) == 40 - translate.ROOM
    assert translate.fitting(64, math.inf) == 64


def test_engine_kwargs_may_not_undo_what_is_relied_on() -> None:
    with pytest.raises(InvalidConfig, match="skip_tokenizer_init"):
        translate.engine_arguments(config(engine_kwargs={"skip_tokenizer_init": False}), "cpu", "float32", 64)
    assert (
        translate.engine_arguments(config(engine_kwargs={"log_level": "info"}), "cpu", "float32", 64)["log_level"]
        == "info"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_media_domains", ["host"]), ("media_url_max_file_size_mb", 1), ("mm_process_config", {"image": {}})],
)
def test_arguments_for_media_that_the_engine_never_reads_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}, which would have no effect") as caught:
        translate.engine_arguments(config(engine_kwargs={name: value}), "cpu", "float32", 64)
    assert caught.value.field == "engine_kwargs"


def test_a_cache_that_cannot_bear_weight_updates_is_refused() -> None:
    kwargs = {"enable_hierarchical_cache": True, "hicache_host_memory_mode": "buffer_only"}
    with pytest.raises(InvalidConfig, match="hicache_host_memory_mode='buffer_only'") as caught:
        translate.engine_arguments(config(engine_kwargs=kwargs), "cuda", "float32", 64)
    assert caught.value.field == "engine_kwargs"
    kwargs["hicache_host_memory_mode"] = "cache"
    assert translate.engine_arguments(config(engine_kwargs=kwargs), "cuda", "float32", 64).items() >= kwargs.items()


def test_copies_of_weights_that_updates_do_not_reach_are_never_made() -> None:
    def arguments(**kwargs: object) -> dict[str, object]:
        return translate.engine_arguments(config(engine_kwargs=kwargs), "cuda", "float32", 64)

    name = "dcp_replicate_q_proj"
    for value in (True, None):
        with pytest.raises(InvalidConfig, match=f"{name}={value}") as caught:
            arguments(dcp_size=2, dcp_replicate_q_proj=value)
        assert caught.value.field == "engine_kwargs"
    assert arguments(dcp_size=2)[name] is False, "unset, SGLang would turn it on for some models"
    assert arguments(dcp_size=2, dcp_replicate_q_proj=False)[name] is False
    assert name not in arguments(), "SGLang refuses it without decode context parallelism"


def test_errors_are_told_apart() -> None:
    assert isinstance(as_engine_error(RuntimeError("CUDA out of memory. Tried")), EngineOutOfMemory)
    assert isinstance(as_engine_error(ValueError("no such thing")), InvalidRequest)
    assert isinstance(as_engine_error(KeyError("x")), EngineInternalError)
    own = InvalidRequest("x", field="y")
    assert as_engine_error(own) is own


def test_requests_hold_nothing_that_is_not_translated() -> None:
    known = {"request_id", "prompt_token_ids", "params", "max_new_tokens", "stop_token_ids", "logprobs_mode", "seed"}
    of_the_page = {"weight_version"}
    fields = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert fields == known | {"lora", "priority", "media", "resumed_tokens", "scoring"} | of_the_page


@pytest.mark.parametrize("enable_sleep", [True, False])
def test_memory_is_made_ready_for_sleep_if_it_is_asked_for(enable_sleep: bool) -> None:
    arguments = translate.engine_arguments(config(enable_sleep=enable_sleep), "cuda", "bfloat16", 64)
    assert arguments.get("enable_memory_saver", False) is enable_sleep
