"""OpenRLHF's own sample generator and executors on drivetrain's actors: ``make test-openrlhf``.

Its trainer of the policy needs CUDA; this half of OpenRLHF runs unmodified on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ray  # pyright: ignore[reportMissingImports]
import pytest
import ray
import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # pyright: ignore[reportMissingImports]
from openrlhf.trainer.ray import batch_vllm_engine_call  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayTaskError
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

from drivetrain.testing import tiny_model
from drivetrain_trainers.openrlhf import create_engines_with

REWARD = """
def reward_func(queries, prompts, labels):
    import torch
    found = torch.tensor([float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)])
    return {"rewards": found, "scores": found, "extra_logs": {"seen": torch.ones(1)}}
"""
AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Twice(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **more):
        self.turns += 1
        return {
            "rewards": torch.tensor(1.0),
            "environment_feedback": " and? " if self.turns < 2 else "",
            "done": self.turns == 2,
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Twice)
"""
PROMPTS = ["What is 1 + 1?", "Name a colour.", "Say hello."]


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen2")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def start(model: Path, number: int, **more: Any) -> list[Any]:
    """Start engines as ``train_ppo_ray.py`` does, after the replacement that the guide shows."""
    openrlhf.trainer.ray.create_vllm_engines = create_engines_with(
        "transformers", device="cpu", dtype="float32", isolation="inline"
    )
    from openrlhf.trainer.ray import create_vllm_engines  # pyright: ignore[reportMissingImports]

    engines: list[Any] = create_vllm_engines(
        number, 1, str(model), 42, False, True, False, 128, None, None, False, "processed_logprobs", **more
    )
    return engines


def generator(model: Path, engines: list[Any], n: int) -> SamplesGenerator:
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=False),
        rollout=SimpleNamespace(batch_size=len(PROMPTS), n_samples_per_prompt=n, vllm_generate_batch_size=None),
        algo=SimpleNamespace(dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")),
    )
    batches = [(None, PROMPTS, ["label"] * len(PROMPTS), [None] * len(PROMPTS))]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return SamplesGenerator(SimpleNamespace(args=args), batches, batches, tokenizer, engines)


def reference(model: Path, ids: torch.Tensor, without_eos: Sequence[int] = ()) -> torch.Tensor:
    """Return the logprob of each id after the first, by transformers alone; at some of them no EOS could be drawn."""
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = policy(ids[None]).logits[0, :-1]
    for at in without_eos:
        logits[at, policy.generation_config.eos_token_id] = float("-inf")
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_samples_of_two_engines(model: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARD)
    engines = start(model, 2, remote_rm_url=str(rewards))
    samples, _, consumed, _ = generator(model, engines, 4).generate_samples(
        temperature=1.0, top_p=1.0, max_new_tokens=8, max_len=128
    )
    assert (len(samples), consumed) == (4 * len(PROMPTS), len(PROMPTS))
    assert len({tuple(one.sequences[0].tolist()) for one in samples}) > 2 * len(PROMPTS), "samples of a prompt differ"
    for one in samples:
        ids, mask = one.sequences[0], one.action_mask[0].bool()
        assert 1 <= int(mask.sum()) <= 8
        expected = reference(model, ids, [int(mask.nonzero()[0])])  # OpenRLHF asks for one token at least
        torch.testing.assert_close(one.rollout_log_probs[0][mask], expected[mask], atol=1e-4, rtol=0)
        assert one.rewards is not None
        assert one.info["seen"].item() == 1
    assert ray.get([engine.get_num_unfinished_requests.remote() for engine in engines]) == [0, 0]
    for call in ("pause_generation", "resume_generation", "reset_prefix_cache"):
        assert batch_vllm_engine_call(engines, call) == [None, None]
    again, *_ = generator(model, engines, 1).generate_samples(temperature=1.0, max_len=128)  # no max_new_tokens
    assert {int(one.total_length) for one in again} <= set(range(129))
    for engine in engines:
        ray.kill(engine)


def test_an_agent_of_two_turns(model: Path, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    (engine,) = engines = start(model, 1, agent_func_path=str(agent))
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = list(range(0, len(tokenizer), 2))  # the first turn may use all of max_length
    params = SamplingParams(temperature=1.0, max_tokens=6, logprobs=1, stop_token_ids=stops)
    responses = ray.get(
        engine.generate_responses.remote(
            prompt=PROMPTS[0],
            label="label",
            sampling_params=params,
            max_length=120,
            hf_tokenizer=tokenizer,
            num_samples=2,
        )
    )
    for response in responses:
        assert len(response["action_ranges"]) == 2
        assert response["reward"] == 2.0
        ids = torch.tensor(response["observation_tokens"])
        expected = reference(model, ids)
        for first, end in response["action_ranges"]:
            found = torch.tensor(response["rollout_log_probs"][first:end])
            torch.testing.assert_close(found, expected[first - 1 : end - 1], atol=1e-4, rtol=0)
    refused = SamplingParams(max_tokens=4, bad_words=["no"])
    with pytest.raises(RayTaskError, match="bad_words"):
        ray.get(engine.generate.remote([5, 6], refused))
    with pytest.raises(RayTaskError, match="NCCL needs a GPU"):  # this release forms no gloo group
        ray.get(engine.init_process_group.remote("127.0.0.1", 1, 1, 2, "openrlhf", backend="gloo", use_ray=False))
    ray.kill(engines[0])
