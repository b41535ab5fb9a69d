# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""OpenRLHF's engine layer: each test shows one row of docs/explanation/trainers-engine-layers.md by its own code."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as samples
import pytest
import torch
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

Actor = RolloutRayActor.__ray_metadata__.modified_class
"""The class that Ray makes an actor of."""


class Engine:
    """Stands where the executor calls the engine: notes prompts and parameters, and answers with two tokens."""

    def __init__(self, finish_reason: str = "stop") -> None:
        self.finish_reason = finish_reason
        self.seen: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt: list[int], params: SamplingParams, multi_modal_data: object = None) -> Any:
        self.seen.append((prompt, params))
        logprobs = [{7: SimpleNamespace(logprob=-0.5)}, {}]  # the second token's is missing
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7, 8], text="x", logprobs=logprobs, finish_reason=self.finish_reason)]
        )


class Tokenizer:
    """One id a letter."""

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))


class OneTurn(AgentInstanceBase):  # type: ignore[misc]
    def __init__(self) -> None: ...

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"rewards": torch.tensor(1.0), "environment_feedback": "", "done": True}


def execute(executor: Any, engine: Engine, params: SamplingParams, prompt: str = "abcd", longest: int = 64) -> Any:
    arguments = {"prompt": prompt, "label": "", "sampling_params": params, "max_length": longest}
    return asyncio.run(executor.execute(**arguments, hf_tokenizer=Tokenizer(), llm_engine=engine))


def test_seven_sampling_parameters_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def remote(**arguments: Any) -> None:
        sent.append(arguments)

    maker = object.__new__(samples.SamplesGenerator)
    advantage = SimpleNamespace(is_correction_level="off")
    maker.args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage), rollout=SimpleNamespace(n_samples_per_prompt=3)
    )
    maker.tokenizer = None
    pending = SimpleNamespace(remote=lambda: 0)
    maker.vllm_engines = [
        SimpleNamespace(get_num_unfinished_requests=pending, generate_responses=SimpleNamespace(remote=remote))
    ]
    monkeypatch.setattr(samples.ray, "get", list)
    lost = {"stop": ["\n"], "seed": 7, "min_p": 0.1, "repetition_penalty": 1.3, "ignore_eos": True}
    maker._dispatch_prompts_to_vllm(["p"], [""], temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, **lost)
    params = sent[0]["sampling_params"]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.9, 5, 9)
    assert (params.stop, params.seed, params.min_p, params.repetition_penalty) == ([], None, 0.0, 1.0)
    assert (params.ignore_eos, params.logprobs, params.n) == (False, None, 1)
    assert sent[0]["num_samples"] == 3


def test_samples_are_requests_of_their_own_with_one_set_of_parameters() -> None:
    engine = Engine()
    actor = object.__new__(Actor)
    actor.executor = SingleTurnAgentExecutor()
    actor.generate = engine.generate
    params = SamplingParams(max_tokens=4, seed=3)
    asyncio.run(actor.generate_responses("ab", "", params, 64, Tokenizer(), num_samples=2))
    assert [params.seed for _, params in engine.seen] == [3, 3]


def test_a_long_prompt_is_cut_at_its_start() -> None:
    engine = Engine()
    execute(SingleTurnAgentExecutor(), engine, SamplingParams(max_tokens=6), prompt="abcdefgh", longest=10)
    assert engine.seen[0][0] == [ord(letter) for letter in "efgh"]


def test_turns_ignore_max_tokens() -> None:
    engine = Engine()
    execute(MultiTurnAgentExecutor(OneTurn), engine, SamplingParams(max_tokens=6), prompt="abcd", longest=20)
    assert engine.seen[0][1].max_tokens == 16  # what is left of the length, not the six asked for


def test_a_missing_logprob_becomes_zero() -> None:
    answer = execute(SingleTurnAgentExecutor(), Engine(), SamplingParams(max_tokens=6, logprobs=1))
    assert answer["rollout_log_probs"][-2:] == [-0.5, 0.0]


def test_an_aborted_completion_is_one_that_ended() -> None:
    answers = [execute(SingleTurnAgentExecutor(), Engine(reason), SamplingParams()) for reason in ("stop", "abort")]
    assert answers[0] == answers[1]
    assert not answers[0]["truncated"]
    assert not any("version" in key or "finish" in key for key in answers[0])


def test_a_reward_that_failed_is_none(tmp_path: Any) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    raise ValueError('no reward')\n")
    assert execute(SingleTurnAgentExecutor(str(reward)), Engine(), SamplingParams())["reward"] is None


def test_an_engine_without_an_answer_is_answered_by_none() -> None:
    async def nothing(*_: Any, **__: Any) -> Any:
        return
        yield

    actor = object.__new__(Actor)
    actor.llm, actor._mm_pad_token_ids = SimpleNamespace(generate=nothing), None
    assert asyncio.run(actor.generate([1], SamplingParams())) is None


def test_wake_and_pause() -> None:
    calls: list[Any] = []

    class Calls:
        def __getattr__(self, name: str) -> Any:
            async def call(**arguments: Any) -> bool:
                calls.append((name, arguments))
                return False  # what vLLM's reset_prefix_cache returns while blocks are in use

            return call

    actor = object.__new__(Actor)
    actor.llm = Calls()
    for call in (actor.sleep(), actor.wake_up(), actor.pause_generation(), actor.reset_prefix_cache()):
        assert asyncio.run(call) is None
    assert calls == [
        ("sleep", {"level": 1}),
        ("wake_up", {"tags": ["weights"]}),
        ("wake_up", {"tags": ["kv_cache"]}),
        ("pause_generation", {"mode": "keep"}),
        ("reset_prefix_cache", {}),
    ]


def test_another_dtype_is_refused_by_an_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    worker = WorkerWrap()
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="mismatch dtype"):
        worker.update_weight("w", torch.float32, (1,))
