"""Translation to and from vLLM's terms, with no vLLM installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain import (
    Capability,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    ImageInput,
    InvalidConfig,
    LogprobsMode,
    SamplingParams,
    Task,
    VersionSpan,
    VideoInput,
)
from drivetrain.errors import (
    EngineDied,
    EngineInternalError,
    EngineOutOfMemory,
    InvalidRequest,
    NonFiniteLogits,
    NoTokenAllowed,
)
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import Scoring
from drivetrain_sampling import NO_TOKEN, NOT_FINITE
from drivetrain_sampling.packed_masks import pack
from drivetrain_vllm import translate
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_vllm.errors import as_engine_error


def request(
    params: dict[str, Any] | None = None,
    mode: str = "raw",
    seed: int | None = None,
    stops: tuple[int, ...] = (9,),
    max_new_tokens: int = 8,
) -> GenerateRequest:
    made = SamplingParams.model_validate(params or {})
    return GenerateRequest("r", [1, 2, 3], made, max_new_tokens, stops, LogprobsMode(mode), seed)


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "vllm", "model": "m", **fields})


def flat(*positions: list[tuple[int, float, int]]) -> Any:
    """Return a stand-in for vLLM's ``FlatLogprobs``: at each position the token and the likeliest ones, with ranks."""
    starts: list[int] = []
    ends: list[int] = []
    entries: list[tuple[int, float, int]] = []
    for position in positions:
        starts.append(len(entries))
        entries += position
        ends.append(len(entries))
    return SimpleNamespace(
        start_indices=starts,
        end_indices=ends,
        token_ids=[token for token, _, _ in entries],
        logprobs=[logprob for _, logprob, _ in entries],
        ranks=[rank for _, _, rank in entries],
    )


def output(ids: list[int], reason: str | None = None, **more: Any) -> Any:
    completion = SimpleNamespace(
        token_ids=ids,
        finish_reason=reason,
        stop_reason=more.pop("stop_reason", None),
        logprobs=more.pop("logprobs", None),
    )
    for name in ("weight_versions", "routed_experts", "sampling_mask"):
        if name in more:
            setattr(completion, name, more.pop(name))
    fields = {"prompt_logprobs": None, "num_cached_tokens": 0, **more}
    return SimpleNamespace(outputs=[completion], finished=reason is not None, **fields)


@pytest.mark.parametrize(
    ("params", "mode", "seed", "native"),
    [
        ({}, "raw", None, True),
        ({"temperature": 0.7, "logprobs": 3}, "raw", None, True),
        ({"temperature": 0.7, "logprobs": 0}, "temperature", None, False),
        ({"temperature": 1.0, "logprobs": 0}, "temperature", None, True),
        ({"temperature": 0, "logprobs": 0}, "temperature", None, True),
        ({"logprobs": 0}, "processed", None, False),
        ({"temperature": 0.005}, "raw", None, False),
        ({"temperature": 2.0}, "raw", None, True),
        ({"temperature": 2.5}, "raw", None, False),
        ({"top_p": 0.9}, "raw", None, True),
        ({"top_p": 0.9, "top_k": 5}, "raw", None, False),
        ({}, "raw", 4, False),
        ({"repetition_penalty": 1.1}, "raw", None, False),
        ({"logit_bias": {3: 1.0}}, "raw", None, False),
        ({"min_new_tokens": 2}, "raw", None, False),
        ({"logprobs": 0, "structured_output": {"kind": "regex", "regex": "a"}}, "raw", None, False),
        ({"structured_output": {"kind": "regex", "regex": "a"}}, "raw", None, True),
    ],
)
def test_who_draws(params: dict[str, Any], mode: str, seed: int | None, native: bool) -> None:
    assert translate.drawn_by_vllm(request(params, mode, seed)) is native


@pytest.mark.parametrize(
    ("device", "fields", "asked", "by_block", "claimed"),
    [
        ("cuda", {"num_experts": 4}, True, False, True),
        ("cuda", {"num_experts": 4}, False, False, False),
        ("cuda", {}, True, True, False),
        ("cpu", {"num_experts": 4}, True, True, True),
        ("cpu", {"num_experts": 4}, True, False, False),
    ],
)
def test_where_experts_are_claimed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    fields: dict[str, int],
    asked: bool,
    by_block: bool,
    claimed: bool,
) -> None:
    monkeypatch.setattr("drivetrain_vllm.engine.records_experts_by_block", lambda: by_block)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asking = {"enable_return_routed_experts": asked}
    capabilities = VLLMBackend.capabilities(config(model=str(tmp_path), device=device, engine_kwargs=asking))
    experts = {Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS}
    seen = experts if device == "cpu" else {Capability.ROUTED_EXPERTS}
    assert capabilities & experts == (seen if claimed else set())


def test_experts_that_are_kept_by_cached_blocks_need_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain_vllm.engine.records_experts_by_block", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4}))
    fields = {"model": str(tmp_path), "device": "cpu", "engine_kwargs": {"enable_return_routed_experts": True}}
    VLLMBackend.validate(config(**fields))
    with pytest.raises(InvalidConfig, match="blocks of its prefix cache") as caught:
        VLLMBackend.validate(config(**fields, enable_prefix_caching=False))
    assert caught.value.field == "engine_kwargs"


@pytest.mark.parametrize(
    ("caches", "most", "fields", "field"),
    [
        (False, 8192, {}, "enable_prefix_caching"),
        (False, 8192, {"enable_prefix_caching": False}, None),
        (False, 8192, {"task": Task.EMBED}, None),
        (True, 8192, {"max_num_batched_tokens": 512}, "max_num_batched_tokens"),
        (True, 512, {"max_num_batched_tokens": 512}, None),
        (True, 8192, {}, None),
    ],
)
def test_a_field_that_vllm_overrides_is_refused(
    caches: bool, most: int, fields: dict[str, object], field: str | None
) -> None:
    made = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most),
    )
    if field is None:
        translate.refuse_overridden_fields(config(**fields), made)
        return
    with pytest.raises(InvalidConfig, match=f"{field}=") as caught:
        translate.refuse_overridden_fields(config(**fields), made)
    assert caught.value.field == field


def test_the_configuration_becomes_arguments() -> None:
    arguments = translate.engine_arguments(
        config(max_num_seqs=4, enable_lora=True, max_loras=2, engine_kwargs={"block_size": 64}), "cpu", "bfloat16", 512
    )
    assert arguments["max_model_len"] == 512
    assert arguments["max_num_seqs"] == 4
    assert arguments["dtype"] == "bfloat16"
    assert arguments["block_size"] == 64
    assert arguments["max_loras"] == 4, "one place is for updates, one stays empty on a CPU"
    assert [
        translate.engine_arguments(config(enable_lora=True, max_lora_rank=rank), "cpu", "float32", 512)["max_lora_rank"]
        for rank in (1, 8, 12, 64, 1000)
    ] == [8, 8, 16, 64, 1000], "vLLM takes some limits only"
    on_a_gpu = translate.engine_arguments(config(enable_lora=True, max_loras=2), "cuda", "bfloat16", 512)
    assert on_a_gpu["max_loras"] == 3
    assert "enforce_eager" not in on_a_gpu


def test_fields_of_the_models_configuration_may_be_overridden() -> None:
    plain = {"rope_parameters": {"rope_type": "default"}}
    assert translate.engine_arguments(config(), "cpu", "float32", 512, plain)["hf_overrides"] == plain
    assert "hf_overrides" not in translate.engine_arguments(config(), "cpu", "float32", 512, {})


def test_only_what_generates_wants_room_for_one_more_token() -> None:
    assert [translate.room_of(config(task=task)) for task in ("generate", "embed", "reward")] == [1, 0, 0]


def test_experts_are_spread_over_all_ranks_or_over_none() -> None:
    def arguments(**fields: Any) -> dict[str, object]:
        return translate.engine_arguments(config(tensor_parallel_size=4, **fields), "cuda", "bfloat16", 512)

    assert "enable_expert_parallel" not in arguments()
    assert arguments(expert_parallel_size=4)["enable_expert_parallel"] is True
    with pytest.raises(InvalidConfig, match="expert_parallel_size=2 with tensor_parallel_size=4"):
        arguments(expert_parallel_size=2)


def test_an_argument_that_has_a_field_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len"):
        translate.engine_arguments(config(engine_kwargs={"max_model_len": 5}), "cpu", "float32", 512)


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_media_domains", ["host"]), ("allowed_local_media_path", "/data"), ("mm_processor_cache_gb", 4)],
)
def test_arguments_for_media_that_the_engine_never_reads_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}, which would have no effect") as caught:
        translate.engine_arguments(config(engine_kwargs={name: value}), "cpu", "float32", 512)
    assert caught.value.field == "engine_kwargs"


@pytest.mark.parametrize("given", [{"lora_target_modules": ["q_proj"]}, {"enable_tower_connector_lora": True}], ids=str)
def test_arguments_that_would_serve_adapters_in_part_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match=f"engine_kwargs holds {next(iter(given))}: vLLM drops") as caught:
        translate.engine_arguments(config(enable_lora=True, engine_kwargs=given), "cpu", "float32", 512)
    assert caught.value.field == "engine_kwargs"


async def test_images_and_videos_are_as_many_as_vllm_was_told() -> None:
    backend = VLLMBackend(config())
    most = SimpleNamespace(get_limit_per_prompt={"image": 1, "video": 0}.__getitem__)
    backend.engine = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=most))
    image, video = ImageInput(data=b"a"), VideoInput(data=b"a")
    for media, said in (((image, image), "2 images beside a prompt; expected at most 1"), ((video,), "1 videos")):
        with pytest.raises(InvalidRequest, match=f"{said}.*limit_mm_per_prompt") as caught:
            await backend.read_media(media)
        assert caught.value.field == "prompts"


def test_chunks_become_a_result() -> None:
    asked = request({"logprobs": 2, "prompt_logprobs": 1, "return_prompt_ranks": True})
    collected = translate.Collected(asked)
    prompt = flat([], [(2, -1.0, 3), (7, -0.1, 1)], [(3, -0.2, 1), (3, -0.2, 1)])
    first = output([5], logprobs=flat([(5, -2.0, 9), (6, -0.5, 1), (7, -1.0, 2)]), prompt_logprobs=prompt)
    assert collected.add(first) == ([5], [-2.0], [[(6, -0.5), (7, -1.0)]])
    joined = flat([(6, -0.5, 1), (8, -1.5, 2)], [(9, -0.1, 1), (4, -3.0, 2)])
    last = output([6, 9], "stop", stop_reason=9, logprobs=joined, num_cached_tokens=2)
    assert collected.add(last)[2] == [[(6, -0.5), (8, -1.5)], [(9, -0.1), (4, -3.0)]]
    result = collected.result("now")
    assert (result.token_ids, result.logprobs) == ([5, 6, 9], [-2.0, -0.5, -0.1])
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, 9)
    assert result.prompt_logprobs == [None, -1.0, -0.2]
    assert result.prompt_top_logprobs == [None, [(7, -0.1)], [(3, -0.2)]]
    assert result.prompt_ranks == [None, 3, 1]
    assert result.cached_tokens == 2
    assert result.weight_versions == [VersionSpan("now", 0, 3)]


def test_experts_are_of_the_pass_that_a_token_was_drawn_from() -> None:
    every = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # two of the prompt's, and all drawn but the last
    collected = translate.Collected(request({"return_routed_experts": True}), expert_layers=[0, 2])
    collected.add(output([5, 6, 7], "length", routed_experts=every))
    result = collected.result("v")
    assert result.routed_experts == RoutedExperts.of(every[1:, [0, 2]])
    assert result.prompt_routed_experts is None


def test_experts_of_the_prompt_come_first() -> None:
    every = np.arange(5 * 2, dtype=np.uint8).reshape(5, 2, 1)  # three of the prompt's, and two drawn of three
    both = {"return_routed_experts": True, "return_prompt_routed_experts": True}
    for asked in (both, {"return_prompt_routed_experts": True}):
        collected = translate.Collected(request(asked), expert_layers=[1])
        collected.add(output([5, 6, 7], "length", routed_experts=every))
        result = collected.result("v")
        assert result.prompt_routed_experts == RoutedExperts.of(every[:3, [1]])
        assert result.routed_experts == (RoutedExperts.of(every[2:, [1]]) if asked is both else None)
    aborted = translate.Collected(request(both), expert_layers=[1])
    aborted.add(output([], "abort", routed_experts=None))
    assert aborted.result("v").prompt_routed_experts is None


def test_a_stream_with_experts_says_everything_again() -> None:
    collected = translate.Collected(request({"logprobs": 1, "return_routed_experts": True}), expert_layers=[0])
    positions = [[(5, -2.0, 3), (6, -0.5, 1)], [(7, -0.1, 1), (7, -0.1, 1)]]
    assert collected.add(output([5], logprobs=flat(positions[0]))) == ([5], [-2.0], [[(6, -0.5)]])
    assert collected.add(output([5, 7], logprobs=flat(*positions))) == ([7], [-0.1], [[(7, -0.1)]])
    every = np.array([[[1]], [[2]]], dtype=np.uint8)
    assert collected.add(output([5, 7], "length", logprobs=flat(*positions), routed_experts=every))[0] == []
    result = collected.result("v")
    assert (result.token_ids, result.logprobs) == ([5, 7], [-2.0, -0.1])
    assert result.routed_experts == RoutedExperts.of([[[1]], [[2]]])


@pytest.mark.parametrize("given", [None, np.zeros((1, 1, 1), dtype=np.uint8)])
def test_experts_that_are_not_there_are_an_error(given: Any) -> None:
    collected = translate.Collected(request({"return_routed_experts": True}), expert_layers=[0])
    collected.add(output([5, 7], "length", routed_experts=given))
    with pytest.raises(EngineInternalError, match=r"experts of \d tokens where 2 have some"):
        collected.result("v")


def test_without_a_token_there_are_no_experts() -> None:
    collected = translate.Collected(request({"return_routed_experts": True}), expert_layers=[0])
    collected.add(output([], "abort", routed_experts=None))
    assert collected.result("v").routed_experts == RoutedExperts()


@pytest.mark.parametrize("given", [np.uint8, int])
def test_masks_come_with_their_tokens(given: Any) -> None:
    """They come as arrays where our hook runs, and as lists of bytes where it does not."""
    mask = SamplingMask.of(300, [[4, 8], range(300), [9]])
    parts = [np.frombuffer(one, dtype=np.uint8) for one in pack(torch.from_numpy(mask.to_numpy()))]
    lists = [part if given is np.uint8 else part.tolist() for part in parts]
    collected = translate.Collected(request({"return_sampling_mask": True, "return_routed_experts": True}))
    assert not translate.drawn_by_vllm(collected.request), "vLLM's own sampler keeps no mask of one request"
    collected.add(output([4, 5], sampling_mask=SimpleNamespace(token_ids=lists[:2])))
    assert collected.added_mask == mask[:2]
    every = np.zeros((3, 1, 1), dtype=np.uint8)
    last = output([9], "length", sampling_mask=SimpleNamespace(token_ids=lists[2:]), routed_experts=every)
    assert collected.add(last)[0] == [9], "with masks, chunks are not cumulative"
    assert collected.result("v").sampling_mask == mask


def test_versions_are_vllms_own_where_it_has_them() -> None:
    spans = [SimpleNamespace(version="a", start=0, end=2), SimpleNamespace(version="b", start=2, end=3)]
    collected = translate.Collected(request())
    collected.add(output([1, 2, 3], "length", weight_versions=spans))
    assert collected.result("b").weight_versions == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]


def test_versions_are_counted_where_it_has_none() -> None:
    collected = translate.Collected(request())
    collected.replaced("a", 2)
    collected.add(output([1, 2, 3], "length"))
    assert collected.result("b").weight_versions == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]


def test_a_prompt_that_is_only_scored_has_no_tokens() -> None:
    collected = translate.Collected(request(max_new_tokens=0))
    collected.add(output([9], "stop", stop_reason=9))
    assert collected.result("v").token_ids == []
    assert collected.result("v").finish_reason is FinishReason.LENGTH


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    collected = translate.Collected(request())
    collected.add(output([1, 9], "length"))
    assert collected.result("v").finish_reason is FinishReason.STOP


def test_a_request_that_failed_ends_with_the_error_that_names_it() -> None:
    collected = translate.Collected(request({"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [1]}]}))
    collected.add(output([4]))
    collected.add(output([], "abort", stop_reason=NOT_FINITE))
    with pytest.raises(NonFiniteLogits, match=r"request r: .* output token 1"):
        collected.result("v")
    collected.add(output([], "abort", stop_reason=NO_TOKEN))
    with pytest.raises(NoTokenAllowed, match="output token 1") as refusal:
        collected.result("v")
    assert refusal.value.field == "sampling_params.logit_processors"


def test_the_token_after_a_prompt_that_is_only_scored_does_not_matter() -> None:
    collected = translate.Collected(request(max_new_tokens=0))
    collected.add(output([], "abort", stop_reason=NOT_FINITE))
    assert collected.result("v").finish_reason is FinishReason.LENGTH


def test_an_end_that_vllm_does_not_explain_is_an_error() -> None:
    collected = translate.Collected(request())
    collected.add(output([1], "error"))
    with pytest.raises(EngineInternalError, match="'error'"):
        collected.result("v")


class VLLMClientError(Exception):
    """Named like vLLM's."""


class EngineDeadError(Exception):
    """Named like vLLM's."""


@pytest.mark.parametrize(
    ("error", "mapped"),
    [
        (VLLMClientError("no such grammar"), InvalidRequest),
        (ValueError("temperature"), InvalidRequest),
        (EngineDeadError("see above"), EngineDied),
        (RuntimeError("CUDA out of memory"), EngineOutOfMemory),
        (RuntimeError("what"), EngineInternalError),
    ],
)
def test_errors_are_of_drivetrains_tree(error: Exception, mapped: type[Exception]) -> None:
    made = as_engine_error(error)
    assert type(made) is mapped
    assert made.__cause__ is error
    assert as_engine_error(made) is made


@pytest.mark.parametrize(
    ("device", "count", "visible", "expected"),
    [
        ("cuda:1", 1, "0,1", "1,0"),
        ("cuda:1", 2, "0,1,2,3", "1,2,0,3"),
        ("cuda:0", 2, "4,5", "4,5"),
        ("cuda:0", 1, "7", "7"),
    ],
)
def test_a_numbered_device_is_the_first_that_vllm_sees(device: str, count: int, visible: str, expected: str) -> None:
    assert translate.visible_devices(device, count, visible.split(",")) == expected


def test_a_device_that_is_not_visible_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cuda:1"):
        translate.visible_devices("cuda:1", 1, ["3"])


def test_scores_are_split_into_their_arrays() -> None:
    ids = np.array([[3, 4]], dtype="<i4")
    asked = replace(request({"max_new_tokens": 0}, max_new_tokens=0), scoring=Scoring(1, 2.0, 1, 2, ids.tobytes()))
    collected = translate.Collected(asked)
    tensors = torch.tensor([[7]], dtype=torch.int32), torch.tensor([[-1.0, -2.0, -3.0, -0.5]]), torch.zeros(1)
    collected.add(output([5], "length", prompt_logprobs=tensors))
    result = collected.result("v")
    assert result.token_ids == []
    scores = result.scores
    assert scores is not None
    assert (scores.token_logprobs.tolist(), scores.at_logprobs.tolist()) == ([-1], [[-2, -3]])
    assert (scores.top_logprobs.tolist(), scores.top_ids.tolist()) == ([[-0.5]], [[7]])
    alone = translate.Collected(replace(asked, prompt_token_ids=[1]))
    alone.add(output([5], "length"))
    assert alone.result("v").scores is None, "the engine page scores one token alone"
