# pyright: reportMissingImports=false
"""The actor that owns an engine, as verl's clients call it; here in the test's own process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM
from verl.experimental.teacher_loop.teacher_manager import _get_teacher_sampling_params
from verl.workers.config import HFModelConfig, RolloutConfig

from drivetrain import (
    EngineState,
    EngineStateError,
    ImageInput,
    InvalidConfig,
    InvalidRequest,
    SamplingParams,
    TokenPrompt,
    UnsupportedCapability,
    attach,
)
from drivetrain.testing import tiny_model
from drivetrain.testing.byte_tokenizer import VOCAB_SIZE
from drivetrain_trainers.verl.engine_server import EngineServer
from drivetrain_trainers.verl.prompt_scores import score_fields
from drivetrain_weight_sync import WeightSync

HANGING = 900.0
"""Seconds after which a test counts as hanging, on a machine however busy."""
BACKEND = os.environ.get("BACKEND", "transformers")
PYTHON = os.environ.get("ENGINE_PYTHON")
ENGINE = {"backend": BACKEND} if PYTHON is None else {"backend": BACKEND, "python": PYTHON}
MODEL = str(tiny_model("qwen2"))
PROMPT = [5, 6, 7, 8]
DRAWN = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def server(path: str = MODEL, **fields: object) -> EngineServer:
    config: dict[str, object] = {
        "name": "drivetrain",
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "prompt_length": 32,
        "response_length": 512,
        "engine_kwargs": {"drivetrain": {"backend": "transformers"}},
    }
    model = HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"})
    return EngineServer(RolloutConfig(**config | fields), model, "hybrid")


def with_a_server(test: Callable[[EngineServer], Awaitable[None]], path: str = MODEL, **fields: object) -> None:
    async def run() -> None:
        one = server(path, **fields)
        await one.start()
        try:
            await asyncio.wait_for(test(one), HANGING)
        finally:
            await one.engine.teardown()

    asyncio.run(run())


def policy() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_logprobs_are_those_that_the_trainer_computes() -> None:
    async def test(one: EngineServer) -> None:
        output = await one.generate(PROMPT, DRAWN | {"max_tokens": 12, "ignore_eos": True}, "a")
        assert len(output.token_ids) == 12
        assert output.stop_reason == "completed"
        with torch.no_grad():
            logits = policy()(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.log_probs), expected, atol=1e-4)
        assert output.extra_fields["global_steps"] is None
        assert output.extra_fields["weight_versions"] == "initial:0-12"

    with_a_server(test)


@pytest.mark.parametrize("top_k", [0, 1, 7])
def test_a_teacher_scores_a_prompt_as_verl_asks_it_to(top_k: int) -> None:
    loss = SimpleNamespace(topk=top_k, loss_settings=SimpleNamespace(use_topk=top_k > 0))
    teacher = SimpleNamespace(inference=SimpleNamespace(temperature=0.5))
    asked = _get_teacher_sampling_params(teacher, loss)
    sequence = [5, 6, 7, 8, 90, 91, 92]
    with torch.no_grad():
        expected = policy()(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)

    async def test(one: EngineServer) -> None:
        alone = await one.generate([5], dict(asked), "alone")
        assert not alone.extra_fields["prompt_logprobs"].any()
        output = await one.generate(sequence, dict(asked), "a")
        assert len(output.token_ids) == asked["max_tokens"] == 1
        ids, logprobs = (torch.tensor(output.extra_fields[name]) for name in ("prompt_ids", "prompt_logprobs"))
        assert ids.shape == logprobs.shape == (len(sequence), max(top_k, 1))
        assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
        assert not ids[-1].any()
        assert not logprobs[-1].any()
        if not top_k:
            assert ids[:-1, 0].tolist() == sequence[1:]
        assert torch.allclose(logprobs[:-1], expected.gather(1, ids[:-1].long()), atol=1e-4)
        assert torch.allclose(logprobs[:-1], expected.topk(max(top_k, 1)).values, atol=1e-4) or not top_k
        by_lists = SamplingParams(max_new_tokens=1, prompt_logprobs=top_k)
        (completion,) = (await one.engine.generate([sequence], by_lists)).completions
        fields = score_fields(completion, top_k)
        assert fields["prompt_ids"].tolist() == ids.tolist()
        assert torch.allclose(torch.tensor(fields["prompt_logprobs"]), logprobs, atol=1e-5)

    with_a_server(test, engine_kwargs={"drivetrain": ENGINE}, free_cache_engine=False)


def test_a_pushed_version_is_in_the_outputs() -> None:
    async def test(one: EngineServer) -> None:
        engine = await attach(await one.handle())
        async with WeightSync.connect(policy(), engine) as sync:
            await sync.push(version="7")
        output = await one.generate(PROMPT, {"max_tokens": 3, "ignore_eos": True}, "a")
        assert output.log_probs is None
        steps = [output.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")]
        assert steps == [7, 7, 7]
        assert output.extra_fields["weight_versions"] == "7:0-3"
        await engine.teardown()

    with_a_server(test)


def test_aborted_requests_come_back_and_later_ones_wait() -> None:
    async def test(one: EngineServer) -> None:
        long = {"max_tokens": 900, "ignore_eos": True}
        running = [asyncio.create_task(one.generate(PROMPT, dict(long), str(number))) for number in range(3)]
        await asyncio.sleep(0)  # they are under way, and have not reached the engine
        assert await one.abort_all_requests() == {"aborted_count": 3}
        outputs = await asyncio.gather(*running)
        assert [output.stop_reason for output in outputs] == ["aborted"] * 3
        later = asyncio.create_task(one.generate(PROMPT, {"max_tokens": 2}, "later"))
        await one.sleep()  # as verl does after an abort: nothing is in flight
        assert one.engine.state is EngineState.ASLEEP
        assert not later.done()
        engine = await attach(await one.handle())
        await engine.wake_up(["weights"])
        async with WeightSync.connect(policy(), engine) as sync:
            await sync.push(version="2")
        await engine.wake_up(["kv_cache"])
        await one.resume_generation()
        assert (await later).extra_fields["global_steps"] == 2
        await engine.teardown()

    with_a_server(test)


def test_a_server_that_leaves_the_rotation_turns_requests_away() -> None:
    async def test(one: EngineServer) -> None:
        await one.abort_all_requests(reject_request=True)
        output = await one.generate(PROMPT, {"max_tokens": 2}, "a")
        assert (output.token_ids, output.stop_reason) == ([], "aborted")
        await one.resume_generation()
        assert (await one.generate(PROMPT, {"max_tokens": 2}, "b")).stop_reason == "completed"

    with_a_server(test)


def test_a_request_to_an_engine_that_sleeps_names_the_state() -> None:
    async def test(one: EngineServer) -> None:
        await one.sleep()
        await one.sleep()  # verl may sleep twice
        with pytest.raises(EngineStateError, match="asleep"):
            await one.generate(PROMPT, {"max_tokens": 2}, "a")

    with_a_server(test)


def test_with_full_determinism_a_request_repeats_and_what_follows_it_draws_anew() -> None:
    """At this temperature all tokens are about as likely, so that equal random numbers draw equal tokens."""
    drawn = {"temperature": 1000.0, "max_tokens": 24, "ignore_eos": True}

    async def test(one: EngineServer) -> None:
        first = await one.generate(PROMPT, dict(drawn), "det-0")
        assert (await one.generate(PROMPT, dict(drawn), "det-0")).token_ids == first.token_ids
        resumed = await one.generate([*PROMPT, *first.token_ids], dict(drawn), "det-0")
        other = await one.generate(PROMPT, dict(drawn), "det-1")
        for output in (resumed, other):
            same = sum(ours == theirs for ours, theirs in zip(output.token_ids, first.token_ids, strict=True))
            assert same < 6

    with_a_server(test, full_determinism=True)


def test_without_free_cache_engine_nothing_sleeps() -> None:
    async def test(one: EngineServer) -> None:
        await one.sleep()
        await one.release_kv_cache()
        assert one.engine.state is EngineState.READY
        assert (await one.generate(PROMPT, {"max_tokens": 2}, "a")).token_ids

    with_a_server(test, free_cache_engine=False)


def test_what_the_engine_cannot_do_is_refused() -> None:
    async def test(one: EngineServer) -> None:
        with pytest.raises(UnsupportedCapability, match="image"):
            await one.generate(PROMPT, {"max_tokens": 2}, "a", image_data=[Image.new("RGB", (8, 8))])
        with pytest.raises(UnsupportedCapability, match="video_data has 1 items"):
            await one.generate(PROMPT, {"max_tokens": 2}, "a", video_data=[object()])
        with pytest.raises(UnsupportedCapability, match="audio_data has 1 items"):
            await one.generate(PROMPT, {"max_tokens": 2}, "a", audio_data=[object()])
        with pytest.raises(InvalidRequest, match="mm_processor_kwargs names fps"):
            await one.generate(PROMPT, {"max_tokens": 2}, "a", mm_processor_kwargs={"fps": 1})
        assert (await one.generate(PROMPT, {"max_tokens": 2}, "b", image_data=[])).token_ids

    with_a_server(test)


def experts_of_a_forward_pass(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the experts of each token, in order of their ids: shape (tokens, layers with experts, 2)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.reshape(len(ids), -1).topk(2).indices for layer in logits], 1).sort(-1).values


# SGLang gives experts to all layers of Qwen3-MoE, whatever config.json says.
@pytest.mark.parametrize("dense", [[], [0]] if BACKEND != "sglang" else [[]], ids=str)
def test_the_experts_of_a_mixtures_tokens_are_those_of_a_forward_pass(dense: list[int]) -> None:
    """verl replays them by the place of a token and of its layer: prompt included, and without the last token."""
    mixture = tiny_model("qwen3_moe", mlp_only_layers=dense)
    sparse = [layer for layer in range(2) if layer not in dense]

    async def test(one: EngineServer) -> None:
        for prompt in ([5, 6, 7, 8], [5, 6, 7, 8], [9]):  # the second one is in the prefix cache
            output = await one.generate(prompt, DRAWN | {"max_tokens": 6, "ignore_eos": True}, "a")
            replayed = torch.from_numpy(output.routed_experts)
            assert replayed.dtype is torch.int16
            assert replayed.shape == (len(prompt) + 5, 2, 2)
            assert not replayed[:, dense].any()
            expected = experts_of_a_forward_pass(mixture, [*prompt, *output.token_ids])[:-1]
            assert torch.equal(replayed[:, sparse].long().sort(-1).values, expected)

    engine = {"drivetrain": ENGINE}
    with_a_server(test, str(mixture), enable_rollout_routing_replay=True, engine_kwargs=engine, free_cache_engine=False)


def test_a_response_that_was_aborted_and_goes_on_has_the_experts_of_all_its_tokens() -> None:
    """By the way in which verl's client joins them (``workers/rollout/llm_server.py:308``)."""
    mixture = tiny_model("qwen3_moe")

    async def test(one: EngineServer) -> None:
        for seconds in (0.1, 0.4, 1.6, 6.4):  # until it has drawn a token
            running = asyncio.create_task(one.generate(PROMPT, {"max_tokens": 900, "ignore_eos": True}, "a"))
            await asyncio.sleep(seconds)
            await one.abort_all_requests()
            await one.resume_generation()
            if (begun := await running).token_ids:
                break
        assert begun.stop_reason == "aborted"
        assert len(begun.routed_experts) == len(PROMPT) + len(begun.token_ids) - 1
        rest = await one.generate([*PROMPT, *begun.token_ids], {"max_tokens": 3, "ignore_eos": True}, "a")
        joined = np.concatenate([begun.routed_experts, rest.routed_experts[-3:]])
        replayed = torch.from_numpy(joined).long().sort(-1).values
        ids = [*PROMPT, *begun.token_ids, *rest.token_ids]
        assert torch.equal(replayed, experts_of_a_forward_pass(mixture, ids)[:-1])

    with_a_server(test, str(mixture), enable_rollout_routing_replay=True)


def test_without_replay_there_are_no_experts_and_a_dense_model_is_refused() -> None:
    async def test(one: EngineServer) -> None:
        assert (await one.generate(PROMPT, {"max_tokens": 2}, "a")).routed_experts is None

    with_a_server(test, str(tiny_model("qwen3_moe")))
    with pytest.raises(UnsupportedCapability, match=r"enable_rollout_routing_replay=True: .* claim routed_experts"):
        asyncio.run(server(enable_rollout_routing_replay=True, engine_kwargs={"drivetrain": ENGINE}).start())


def test_a_configuration_that_the_backend_refuses_names_the_field() -> None:
    with pytest.raises(InvalidConfig, match=r"gpu_memory_utilization=0\.3: the transformers backend"):
        asyncio.run(server(gpu_memory_utilization=0.3).start())


def test_images_reach_the_engine_with_their_placeholders_expanded_as_verl_does() -> None:
    vision = tiny_model("qwen2_5_vl")
    begin, end, image = VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2
    engine = {"drivetrain": ENGINE}
    picture = Image.effect_noise((56, 84), 90).convert("RGB")

    async def test(one: EngineServer) -> None:
        prompt = TokenPrompt(token_ids=(5, begin, image, end, 6), media=(ImageInput.from_pil(picture),))
        greedy = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
        expected = (await one.engine.generate([prompt], greedy)).completions[0]
        assert len(expected.prompt_token_ids) == 4 + 2 * 3
        given = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        output = await one.generate(expected.prompt_token_ids, dict(given), "a", image_data=[picture])
        assert output.token_ids == expected.token_ids
        other = await one.generate(expected.prompt_token_ids, dict(given), "b", image_data=[picture.rotate(180)])
        assert other.token_ids != output.token_ids
        with pytest.raises(InvalidRequest, match=r"image_data has 2 images, and .*limit_images=1"):
            await one.generate(expected.prompt_token_ids, dict(given), "c", image_data=[picture] * 2)

    with_a_server(test, path=str(vision), free_cache_engine=False, limit_images=1, engine_kwargs=engine)
