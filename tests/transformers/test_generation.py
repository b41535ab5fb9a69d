"""Tokens, logprobs and sampling params, compared with an independent forward pass."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

import oracle
from drivetrain import Completion, FinishReason, InferenceEngine, LogprobsMode, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARCHITECTURES = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt",
                 "bloom", "qwen2_moe", "qwen3_moe", "mixtral", "qwen3_next", "granitemoehybrid", "falcon_h1",
                 "nemotron_h", "lfm2", "mamba2"]  # fmt: skip

TOLERANCES = {"nemotron_h": 5e-3, "qwen3_next": 1e-3}
"""Nats. In float32, transformers' own single steps differ from its pass over all tokens by up to 1.8e-3 and 3e-4."""


def assert_logprobs(completion: Completion, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_requests_that_join_and_leave_a_running_batch_get_the_models_own_logprobs(architecture: str) -> None:
    folder = tiny_model(architecture)
    draw = random.Random(0)
    prompts = [[draw.randrange(250) for _ in range(draw.choice([1, 3, 17, 40, 64]))] for _ in range(10)]
    prompts += [prompts[3], prompts[3], prompts[4] + [5, 6, 7]]
    async with create_engine("transformers", model=str(folder), max_num_seqs=6) as engine:

        async def ask(prompt: list[int], seed: int) -> list[Completion]:
            # The tokens are always the same: with random ones two experts might be equally likely within rounding.
            own = random.Random(seed)
            await asyncio.sleep(own.random() * 0.05)
            params = SamplingParams(
                max_new_tokens=own.choice([3, 10, 40]),
                n=own.choice([1, 2]),
                logprobs=0,
                temperature=0.7,
                seed=seed,
                ignore_eos=True,
            )
            return (await engine.generate([prompt], params)).completions

        seeds = itertools.count()
        first = await asyncio.gather(*map(ask, prompts, seeds))
        turns = [[*prompt, *group[0].token_ids, 7] for prompt, group in zip(prompts, first, strict=True)]
        rounds = [first, await asyncio.gather(*map(ask, prompts[:4] + turns, seeds))]
    reference = oracle.load(folder)
    completions = [completion for answers in rounds for group in answers for completion in group]
    assert sum(completion.cached_tokens for completion in completions) > 0, "the turns should reuse prefixes"
    for completion in completions:
        expected = oracle.logprobs_of(reference, completion, 0.7)
        assert_logprobs(completion, expected, TOLERANCES.get(architecture, 1e-4))


async def test_greedy_takes_the_most_likely_token_each_time(engine: InferenceEngine, model: Path) -> None:
    output = await engine.generate(
        ["one", "another prompt"], SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    )
    reference = oracle.load(model)
    for completion in output.completions:
        logits = oracle.logits_of(reference, completion.prompt_token_ids, completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.text == engine.decode(completion.token_ids)


@pytest.mark.parametrize("mode", LogprobsMode)
async def test_logprobs_belong_to_the_declared_distribution(
    engine: InferenceEngine, model: Path, mode: LogprobsMode
) -> None:
    params = SamplingParams(
        max_new_tokens=12, temperature=0.6, top_k=20, top_p=0.8, min_p=0.01, logprobs=4, logprobs_mode=mode, n=3,
        seed=5, ignore_eos=True,
    )  # fmt: skip
    output = await engine.generate("distribution", params)
    reference = oracle.load(model)
    for completion in output.completions:
        logits = oracle.logits_of(reference, completion.prompt_token_ids, completion.token_ids)
        if mode is not LogprobsMode.RAW:
            logits = logits / 0.6
        if mode is LogprobsMode.PROCESSED:
            logits = torch.stack([truncated(row, top_k=20, top_p=0.8, min_p=0.01) for row in logits])
        logprobs = logits.log_softmax(-1)
        assert_logprobs(completion, logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0])
        assert completion.logprobs_mode is mode
        assert completion.top_logprobs is not None
        for position, top in enumerate(completion.top_logprobs):
            expected = logprobs[position].topk(4)
            kept = [value for value in expected.values.tolist() if value != float("-inf")]
            assert [value for _, value in top] == pytest.approx(kept, abs=1e-4)
            for token_id, value in top:
                assert logprobs[position, token_id].item() == pytest.approx(value, abs=1e-4)


def truncated(logits: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Apply the documented order to one token: top-k, top-p over the rest, min-p."""
    order = logits.argsort(descending=True).tolist()[:top_k]
    share = logits[order].softmax(-1).tolist()
    kept: list[int] = []
    before = 0.0
    for token_id, probability in zip(order, share, strict=True):
        if before < top_p:
            kept.append(token_id)
        before += probability
    share_kept = logits[kept].softmax(-1)
    kept = [
        token_id for token_id, p in zip(kept, share_kept.tolist(), strict=True) if p >= min_p * share_kept[0].item()
    ]
    cut = torch.full_like(logits, -torch.inf)
    cut[kept] = logits[kept]
    return cut


async def test_greedy_logprobs_are_raw_and_a_point_mass(engine: InferenceEngine, model: Path) -> None:
    reference = oracle.load(model)
    for mode in LogprobsMode:
        params = SamplingParams(temperature=0, max_new_tokens=6, logprobs=0, logprobs_mode=mode, ignore_eos=True)
        (completion,) = (await engine.generate("greedy", params)).completions
        expected = oracle.logprobs_of(reference, completion)
        assert_logprobs(completion, torch.zeros(6) if mode is LogprobsMode.PROCESSED else expected)


async def test_samples_follow_the_processed_distribution(engine: InferenceEngine, model: Path) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=1.3, top_k=6, n=2000, seed=11, ignore_eos=True)
    output = await engine.generate("frequencies", params)
    logits = oracle.logits_of(oracle.load(model), output.completions[0].prompt_token_ids, [0])[0] / 1.3
    expected = truncated(logits, top_k=6, top_p=1.0, min_p=0.0).softmax(-1)
    seen = Counter(completion.token_ids[0] for completion in output.completions)
    assert set(seen) <= set(expected.nonzero()[:, 0].tolist())
    for token_id in expected.nonzero()[:, 0].tolist():
        p = expected[token_id].item()
        assert abs(seen[token_id] / 2000 - p) < 5 * (p * (1 - p) / 2000) ** 0.5 + 1e-3


async def test_a_seed_alone_decides_the_random_stream(engine: InferenceEngine) -> None:
    params = SamplingParams(max_new_tokens=24, seed=123, ignore_eos=True)
    alone = (await engine.generate("the same prompt", params)).completions[0].token_ids
    crowd = engine.generate(["x" * n for n in range(1, 14)], SamplingParams(max_new_tokens=30, ignore_eos=True))
    among_others, _ = await asyncio.gather(engine.generate("the same prompt", params), crowd)
    assert among_others.completions[0].token_ids == alone
    other = (
        await engine.generate("the same prompt", SamplingParams(max_new_tokens=24, seed=124, ignore_eos=True))
    ).completions[0]
    assert other.token_ids != alone


async def test_samples_of_a_seed_differ_and_repeat(engine: InferenceEngine) -> None:
    params = SamplingParams(max_new_tokens=16, seed=9, n=4, ignore_eos=True)
    first, second = [[c.token_ids for c in (await engine.generate("n", params)).completions] for _ in range(2)]
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4
    third = await engine.generate("n", SamplingParams(max_new_tokens=16, seed=11, ignore_eos=True))
    assert third.completions[0].token_ids == first[2], "sample i uses seed + i"


async def test_without_a_seed_nothing_repeats(engine: InferenceEngine) -> None:
    params = SamplingParams(max_new_tokens=16, n=8, ignore_eos=True)
    ids = [tuple(c.token_ids) for _ in range(2) for c in (await engine.generate("n", params)).completions]
    assert len(set(ids)) == 16


async def test_samples_are_grouped_by_prompt(engine: InferenceEngine) -> None:
    params = [SamplingParams(max_new_tokens=2, n=n, ignore_eos=True) for n in (3, 1, 2)]
    output = await engine.generate(["a", "bb", "ccc"], params)
    groups = output.by_prompt()
    assert [len(group) for group in groups] == [3, 1, 2]
    assert [[c.sample_index for c in group] for group in groups] == [[0, 1, 2], [0], [0, 1]]
    assert [group[0].prompt_token_ids for group in groups] == [[97], [98, 98], [99, 99, 99]]


async def test_prompt_logprobs_are_the_raw_ones(engine: InferenceEngine, model: Path) -> None:
    prompts = ["a longer prompt with many tokens", "short"]
    params = SamplingParams(max_new_tokens=3, prompt_logprobs=3, temperature=0.5, ignore_eos=True)
    output = await engine.generate(prompts, params)
    for completion in output.completions:
        ids = completion.prompt_token_ids
        expected = oracle.logits_of(oracle.load(model), ids[:1], ids[1:]).log_softmax(-1)
        assert completion.prompt_logprobs is not None
        assert completion.prompt_logprobs[0] is None
        own = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.prompt_logprobs[1:]), own, rtol=0, atol=1e-4)
        assert completion.prompt_top_logprobs is not None
        assert completion.prompt_top_logprobs[0] is None
        best = completion.prompt_top_logprobs[-1]
        assert best is not None
        assert [token_id for token_id, _ in best] == expected[-1].topk(3).indices.tolist()


async def test_given_tokens_are_scored_without_sampling(engine: InferenceEngine, model: Path) -> None:
    output = await engine.compute_logprobs([[1, 2, 3, 4], [9, 8, 7]])
    for completion, ids in zip(output.completions, ([1, 2, 3, 4], [9, 8, 7]), strict=True):
        assert completion.token_ids == []
        assert completion.prompt_logprobs is not None
        expected = oracle.logits_of(oracle.load(model), ids[:1], ids[1:]).log_softmax(-1)
        own = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.prompt_logprobs[1:]), own, rtol=0, atol=1e-4)


async def test_penalties_bias_and_min_new_tokens_do_what_they_say(engine: InferenceEngine, model: Path) -> None:
    reference = oracle.load(model)
    (completion,) = (
        await engine.generate(
            [[10, 11, 12]],
            SamplingParams(
                temperature=0, max_new_tokens=24, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.7,
                presence_penalty=0.4, logit_bias={65: 3.0, 66: -100.0},
            ),
        )
    ).completions  # fmt: skip
    logits = oracle.logits_of(reference, [10, 11, 12], completion.token_ids)
    for position, row in enumerate(logits):
        before = completion.token_ids[:position]
        for token_id in {10, 11, 12, *before}:
            row[token_id] = row[token_id] / 1.3 if row[token_id] > 0 else row[token_id] * 1.3
        for token_id, count in Counter(before).items():
            row[token_id] -= 0.7 * count + 0.4
        row[65] += 3.0
        row[66] -= 100.0
        assert completion.token_ids[position] == row.argmax().item()


async def test_no_stop_token_comes_before_min_new_tokens(engine: InferenceEngine) -> None:
    bias = {256: 50.0, 65: 40.0}
    eos = [i for i in engine.model_info.eos_token_ids if i == 256]
    assert eos, "the tiny model's EOS ids changed; this test biases one"
    at_once = await engine.generate("x", SamplingParams(temperature=0, max_new_tokens=9, logit_bias=bias))
    assert at_once.completions[0].token_ids == [256]
    assert at_once.completions[0].matched_stop == 256
    assert at_once.completions[0].text == ""
    later = await engine.generate(
        "x", SamplingParams(temperature=0, max_new_tokens=9, min_new_tokens=4, logit_bias=bias)
    )
    assert later.completions[0].token_ids == [65, 65, 65, 65, 256]
    ignored = await engine.generate(
        "x", SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True, logit_bias=bias)
    )
    assert ignored.completions[0].token_ids == [256, 256, 256]


async def test_higher_priority_starts_sooner(open_engine: OpenEngine) -> None:

    async with open_engine(max_num_seqs=1) as engine:
        ended: list[int] = []

        async def ask(priority: int) -> None:
            await engine.generate("p", SamplingParams(max_new_tokens=5, ignore_eos=True), priority=priority)
            ended.append(priority)

        blocker = asyncio.create_task(engine.generate("b", SamplingParams(max_new_tokens=50, ignore_eos=True)))
        await asyncio.sleep(0.02)
        await asyncio.gather(*(ask(priority) for priority in (0, 1, 5, 3)), blocker)
    assert ended == [5, 3, 1, 0]


async def test_a_stream_put_together_is_the_completion(engine: InferenceEngine) -> None:
    params = SamplingParams(max_new_tokens=40, n=2, seed=3, logprobs=2, ignore_eos=True)
    whole = {(c.prompt_index, c.sample_index): c for c in (await engine.generate(["str", "eam"], params)).completions}
    chunks = [chunk async for chunk in engine.generate_stream(["str", "eam"], params)]
    assert len(chunks) > 20, "chunks should come one by one"
    for key, completion in whole.items():
        own = [chunk for chunk in chunks if (chunk.prompt_index, chunk.sample_index) == key]
        assert [chunk.completion is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        assert [i for chunk in own for i in chunk.token_ids] == completion.token_ids
        assert "".join(chunk.text for chunk in own) == completion.text
        assert [p for chunk in own for p in chunk.logprobs or []] == pytest.approx(completion.logprobs, abs=1e-5)
        assert own[-1].completion is not None
        assert own[-1].completion.token_ids == completion.token_ids


async def test_chat_messages_are_rendered_with_the_models_template(engine: InferenceEngine) -> None:
    output = await engine.generate([[{"role": "user", "content": "hi"}]], SamplingParams(max_new_tokens=1))
    rendered = engine.decode(output.completions[0].prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
