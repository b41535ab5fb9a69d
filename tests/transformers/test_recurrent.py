"""Models with recurrent states: what a row's state goes through, against one pass over all of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import oracle
from drivetrain import (
    Completion,
    EngineStartError,
    GenerationOutput,
    InferenceEngine,
    MemoryTag,
    PauseMode,
    SamplingParams,
    create_engine,
)
from drivetrain.testing import tiny_model
from drivetrain.testing.byte_tokenizer import byte_tokenizer
from drivetrain_weight_sync import WeightSync
from engines import until_generating

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [[5, 7, 11], list(range(30, 70)), [4], [8, 3] * 30]
"""Rows shorter and longer than a convolution's kernel."""
ROWS = len(PROMPTS) + 1
"""Rows of an engine: one more, for the request by which a test tells that all others have a token."""
SHORT = SamplingParams(max_new_tokens=20, logprobs=0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=250, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["falcon_h1", "mamba2"])
def model(request: pytest.FixtureRequest) -> Path:
    """A model whose layers have attention and states, and one whose layers have states alone."""
    return tiny_model(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine("transformers", model=str(model), max_num_seqs=ROWS, device="cpu") as engine:
        yield engine


def require_logprobs(
    reference: PreTrainedModel, completion: Completion, first: int = 0, end: int | None = None
) -> None:
    """Fail unless output tokens from ``first`` to ``end`` have the logprobs of one pass over all tokens."""
    wanted = oracle.logprobs_of(reference, completion)[first:end]
    assert completion.logprobs is not None
    torch.testing.assert_close(torch.tensor(completion.logprobs)[first:end], wanted, rtol=0, atol=2e-4)


def changed(model: Path) -> PreTrainedModel:
    """Return the model after a step that changed every parameter."""
    torch.manual_seed(0)
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return policy


async def frozen(engine: InferenceEngine, mode: PauseMode) -> asyncio.Task[GenerationOutput]:
    """Start long requests and freeze them once they run."""
    task = asyncio.create_task(engine.generate(PROMPTS, LONG))
    await until_generating(engine, len(PROMPTS))
    await engine.pause_generation(mode)
    return task


async def test_requests_sleep_and_wake_with_their_tokens(engine: InferenceEngine, model: Path) -> None:
    task = await frozen(engine, PauseMode.RETRACT)
    await engine.sleep([MemoryTag.KV_CACHE])
    assert (await engine.stats()).kv_cache_bytes == 0
    await engine.wake_up()
    await engine.continue_generation()
    for completion in (await task).completions:
        require_logprobs(oracle.load(model), completion)


async def test_cycles_of_sleep_change_no_answer(engine: InferenceEngine, model: Path) -> None:
    params = SHORT.model_copy(update={"max_new_tokens": 3, "temperature": 0.0})
    first = again = (await engine.generate(PROMPTS, params)).completions
    for _ in range(20):
        await engine.sleep([MemoryTag.KV_CACHE])
        await engine.wake_up()
        again = (await engine.generate(PROMPTS, params)).completions
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
    for completion in again:
        require_logprobs(oracle.load(model), completion)


async def test_a_training_step_with_weights_asleep(model: Path) -> None:
    async with create_engine("transformers", model=str(model), device="cpu") as engine:
        await engine.generate(PROMPTS, SHORT)
        await engine.sleep()
        policy = changed(model)
        await engine.wake_up([MemoryTag.WEIGHTS])
        async with WeightSync.connect(policy, engine) as sync:
            await sync.push(version="step-1")
        await engine.wake_up()
        for completion in (await engine.generate(PROMPTS, SHORT)).completions:
            require_logprobs(policy, completion)


async def test_a_prompt_that_comes_again_and_a_further_turn_reuse_states(engine: InferenceEngine, model: Path) -> None:
    first = (await engine.generate(PROMPTS, SHORT)).completions
    again = (await engine.generate(PROMPTS, SHORT)).completions
    turns = [[*one.prompt_token_ids, *one.token_ids, 7, 9] for one in first]
    further = (await engine.generate(turns, SHORT)).completions
    assert [one.cached_tokens for one in again] == [max(0, len(prompt) - 1) for prompt in PROMPTS]
    assert [one.cached_tokens for one in further] == [len(turn) - 3 for turn in turns]
    for completion in (*first, *again, *further):
        require_logprobs(oracle.load(model), completion)


async def test_a_push_in_flight_continues_with_the_new_weights(model: Path) -> None:
    policy = changed(model)
    async with create_engine("transformers", model=str(model), max_num_seqs=ROWS, device="cpu") as engine:
        task = await frozen(engine, PauseMode.RETRACT)
        async with WeightSync.connect(policy, engine) as sync:
            await sync.push(version="step-1")
        await engine.continue_generation()
        for completion in (await task).completions:
            old, new = completion.weight_versions
            assert (old.version, new.version) == ("initial", "step-1")
            require_logprobs(oracle.load(model), completion, old.start, old.end)
            require_logprobs(policy, completion, new.start, new.end)


async def test_a_model_whose_states_take_padding_in_is_refused(tmp_path: Path) -> None:
    width = {"hidden_size": 128, "intermediate_size": 128, "lru_width": 128, "head_dim": 64, "num_attention_heads": 2}
    config = AutoConfig.for_model("recurrent_gemma", vocab_size=260, num_hidden_layers=3, pad_token_id=259, **width)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer(model_max_length=512).save_pretrained(tmp_path)
    engine = create_engine("transformers", model=str(tmp_path), device="cpu", isolation="inline")
    with pytest.raises(EngineStartError, match="the ids of padding change the logits of RecurrentGemmaForCausalLM"):
        await engine.start()
    await engine.teardown()


async def test_a_model_that_runs_a_rest_in_single_steps_reuses_prefixes(tmp_path: Path) -> None:
    width = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    mixed = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16}
    config = AutoConfig.for_model(
        "jamba",
        vocab_size=260,
        num_hidden_layers=2,
        initializer_range=0.1,
        pad_token_id=259,
        num_experts=2,
        **width,
        **mixed,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer(model_max_length=512).save_pretrained(tmp_path)
    async with create_engine("transformers", model=str(tmp_path), device="cpu") as engine:
        (first,) = (await engine.generate([PROMPTS[1]], SHORT)).completions
        turn = [*first.prompt_token_ids, *first.token_ids]
        (short,) = (await engine.generate([[*turn, *range(40)]], SHORT)).completions
        (long,) = (await engine.generate([[*turn, *range(100, 200)]], SHORT)).completions
    assert (short.cached_tokens, long.cached_tokens) == (len(turn) - 1, 0)
    for completion in (first, short, long):
        require_logprobs(oracle.load(tmp_path), completion)
