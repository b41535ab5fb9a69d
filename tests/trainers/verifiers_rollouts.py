# pyright: reportMissingImports=false
"""Rollouts of verifiers with its training client against ``drivetrain serve``: ``make test-trainers``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import verifiers.v1 as vf
from renderers import DefaultRendererConfig, Qwen3RendererConfig

from adding_environment import AddingTask
from tool_conversation import ANSWER, CALL, QUESTION, Score, text_of

ROLLOUTS: Final = 8


def agent(url: str, client: Any, **sampling: Any) -> vf.Agent:
    """Return an agent whose sampling fields are those that trainers send."""
    more = {"max_tokens": 200, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "cache_salt": "7", **sampling}
    config = {
        "harness": {"id": "adding-environment"},
        "runtime": {"type": "subprocess"},
        "model": "policy",
        "sampling": more,
    }
    return vf.Agent(vf.AgentConfig.model_validate({**config, "client": client}))


def training(url: str, model: Path, renderer: Any) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(
        base_url=f"{url}/v1", api_key_var="NO_KEY", renderer=renderer, renderer_model_name=str(model)
    )


def rollouts(agent: vf.Agent, prompt: str, count: int) -> list[vf.Trace]:
    async def run() -> list[vf.Trace]:
        async with agent:
            tasks = [AddingTask(vf.TaskData(prompt=prompt)) for _ in range(count)]
            return list(await asyncio.gather(*(agent.run(task) for task in tasks)))

    return asyncio.run(run())


def require_training_data(trace: vf.Trace, score: Score) -> None:
    """Require ids, mask and logprobs of equal length, and the logprobs that transformers computes."""
    (branch,) = trace.branches
    ids, mask, logprobs = branch.token_ids, branch.sampled_mask, branch.logprobs
    assert len(ids) == len(mask) == len(logprobs)
    expected = [0.0, *score(ids)]
    differ = [abs(own - other) for own, other, one in zip(logprobs, expected, mask, strict=True) if one]
    assert differ
    assert max(differ) < 1e-3
    assert not any(own for own, one in zip(logprobs, mask, strict=True) if not one)


def test_rollouts_with_a_tool_are_training_data(url: str, model: Path, score: Score) -> None:
    client = training(url, model, DefaultRendererConfig(tool_parser="qwen3"))
    for trace in rollouts(agent(url, client, temperature=0.0), QUESTION, ROLLOUTS):
        assert not trace.errors, trace.errors
        assert trace.reward == 1.0
        require_training_data(trace, score)
        (branch,) = trace.branches
        sampled = [token_id for token_id, one in zip(branch.token_ids, branch.sampled_mask, strict=True) if one]
        assert text_of(sampled) == f"{CALL}\n{ANSWER}\n"


def test_a_conversation_goes_on_from_its_ids(url: str, model: Path, score: Score) -> None:
    """The renderer extends the ids of the last turn, so three turns are one branch."""

    async def talk() -> vf.Trace:
        client = training(url, model, Qwen3RendererConfig(thinking_retention="all"))
        talking = agent(url, client, temperature=1.0, max_tokens=24, seed=5)
        async with talking, talking.interaction(AddingTask(vf.TaskData())) as interaction:
            for text in ("hello", "and then?", "go on"):
                await interaction.turn(text)
        return interaction.trace

    trace = asyncio.run(talk())
    assert not trace.errors, trace.errors
    assert trace.num_turns == 3
    require_training_data(trace, score)


def test_the_evaluating_client_chats(url: str) -> None:
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
    (trace,) = rollouts(agent(url, client, temperature=0.0), QUESTION, 1)
    assert not trace.errors, trace.errors
    assert trace.reward == 1.0


def test_a_prompt_beyond_the_context_is_not_sent(url: str, model: Path) -> None:
    """The renderer asks ``/v1/models`` how long a prompt may be."""
    client = training(url, model, DefaultRendererConfig(tool_parser="qwen3"))
    (trace,) = rollouts(agent(url, client), "long" * 500, 1)
    assert "maximum context length (1024)" in trace.errors[-1].message, trace.errors
