# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""TRL's engine layer: each test shows one row of docs/explanation/trainers-engine-layers.md by TRL's own code."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as generation
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation.vllm_client import VLLMClient, parse_logprobs
from trl.generation.vllm_generation import VLLMGeneration

from request_recorder import Recorder, Request, recording

A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]


def vllm_answers(request: Request) -> Any:
    """Answer as vLLM's server does: sample i of a prompt that begins with p is the token 10 * p + i."""
    if request.path == "/v1/models":
        return {"data": [{"id": "policy"}]}
    if request.path == "/reset_prefix_cache":
        return {"success": False}
    if request.path != "/v1/completions":
        return {}
    prompts = request.body["prompt"]
    prompts = prompts if isinstance(prompts[0], list) else [prompts]
    return {"choices": [choice(p, 10 * p[0] + i) for p in prompts for i in range(request.body["n"])]}


def choice(prompt: list[int], token: int) -> dict[str, Any]:
    drawn = f"token_id:{token}"
    logprobs = {"tokens": [drawn], "token_logprobs": [-2.0], "top_logprobs": [{drawn: -2.0, "token_id:9": -0.1}]}
    return {"prompt_token_ids": prompt, "token_ids": [token], "logprobs": logprobs, "finish_reason": "abort"}


def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config)


@pytest.fixture
def server() -> Iterator[Recorder]:
    with recording(vllm_answers) as recorder:
        yield recorder


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


class RecordedEngine:
    """Stands where TRL makes a ``vllm.LLM``: notes the calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[Any] = []
        self.fails = False
        for name in ("llm_engine", "model_executor", "driver_worker", "model_runner", "model"):
            setattr(self, name, self)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("load_weights")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return False

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append(sampling_params)
        if self.fails:
            raise RuntimeError("the engine failed")
        return []


def layer(monkeypatch: pytest.MonkeyPatch, model: Any, **settings: Any) -> VLLMGeneration:
    """TRL's generation object with its real client, or with a recorded engine."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)  # it asks for CUDA
    monkeypatch.setattr(generation, "LLM", RecordedEngine)
    return VLLMGeneration(model, Accelerator(cpu=True), None, **settings)


def at_server(monkeypatch: pytest.MonkeyPatch, model: Any, server: Recorder, **settings: Any) -> VLLMGeneration:
    return layer(monkeypatch, model, mode="server", server_base_url=server.url, **settings)


def test_the_configuration_names_five_sampling_parameters() -> None:
    names = {field.name for field in fields(GRPOConfig)}
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"} <= names
    ours = {"stop", "stop_token_ids", "frequency_penalty", "presence_penalty", "logit_bias", "ignore_eos", "min_tokens"}
    assert not names & ours


def test_the_seed_of_the_configuration_is_in_no_request(monkeypatch: Any, model: Any, server: Recorder) -> None:
    at_server(monkeypatch, model, server).generate([A, A], None, num_generations=2)
    [body] = server.bodies("/v1/completions")
    assert "seed" not in body
    engine = layer(monkeypatch, model, mode="colocate").llm
    assert engine.arguments["seed"] == 0  # the number of the process, whatever GRPOConfig.seed is
    assert engine.arguments["logprobs_mode"] == "processed_logprobs"


def test_finish_reasons_are_dropped(server: Recorder) -> None:
    answer = VLLMClient(server.url).generate([A])  # each choice says finish_reason "abort"
    assert set(answer) == {"prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"}
    assert answer["completion_ids"] == [[10]]


def test_prompts_between_every_gth_are_not_sent(monkeypatch: Any, model: Any, server: Recorder) -> None:
    _, completions, *_ = at_server(monkeypatch, model, server).generate([A, B, C, D], None, num_generations=2)
    [body] = server.bodies("/v1/completions")
    assert body["prompt"] == [A, C]
    assert completions == [[10], [11], [30], [31]]  # B and D get completions of A and C


def test_n_in_generation_kwargs_moves_completions_to_other_prompts(
    monkeypatch: Any, model: Any, server: Recorder
) -> None:
    made = at_server(monkeypatch, model, server, generation_kwargs={"n": 3})
    prompts, completions, *_ = made.generate([A, A, B, B], None, num_generations=2)
    assert completions == [[10], [11], [12], [20]]  # the third belongs to A
    assert prompts == [A, A, A, A]  # GRPOTrainer drops these, and scores the third completion as one of B


def test_with_alternatives_the_first_logprob_is_not_the_sampled_tokens(
    monkeypatch: Any, model: Any, server: Recorder
) -> None:
    made = at_server(monkeypatch, model, server, generation_kwargs={"logprobs": 1})
    _, completions, logprobs, ids = made.generate([A], None, num_generations=1)
    assert completions == [[10]]
    assert logprobs[0][0][0] == -0.1  # the sampled token's is -2.0; the trainer keeps the first
    assert ids[0][0][0] == 9


def test_a_logprob_that_is_no_number_becomes_none() -> None:
    nan = {"tokens": ["token_id:1"], "token_logprobs": [float("nan")], "top_logprobs": [None]}
    assert parse_logprobs([nan])[0] == [[[None]]]


def test_requests_have_no_timeout(monkeypatch: Any, server: Recorder) -> None:
    client = VLLMClient(server.url)
    adapter = client.session.get_adapter(server.url)
    send, seen = adapter.send, []

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["timeout"])
        return send(*arguments, **options)

    monkeypatch.setattr(adapter, "send", noted)
    client.generate([A])
    assert seen == [None]


def test_a_request_that_failed_is_sent_again(server: Recorder) -> None:
    client = VLLMClient(server.url)
    server.statuses["/v1/completions"] = [500]
    assert client.generate([A])["completion_ids"] == [[10]]
    first, second = server.bodies("/v1/completions")
    assert first == second


def test_a_prefix_cache_that_was_not_reset_is_no_error(monkeypatch: Any, model: Any, server: Recorder) -> None:
    VLLMClient(server.url).reset_prefix_cache()  # the server says {"success": false}
    made = layer(monkeypatch, model, mode="colocate")
    made.sync_weights()  # the engine's reset_prefix_cache returns False
    assert made.llm.calls[-1] == "reset"


def test_an_update_that_breaks_off_is_finished(server: Recorder) -> None:
    client = VLLMClient(server.url)
    with pytest.raises(ValueError, match="half"), client.weight_update():
        raise ValueError("half of the tensors were sent")
    assert server.paths()[-2:] == ["/start_weight_update", "/finish_weight_update"]


def test_an_adapter_stays_merged_if_a_push_breaks_off(monkeypatch: Any, server: Recorder) -> None:
    policy = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"]))
    sender = at_server(monkeypatch, policy, server)._iter_named_params()
    next(sender)
    sender.close()  # as an exception in the caller's loop does
    assert any(getattr(module, "merged", False) for module in policy.modules())


def test_the_order_of_sleep(monkeypatch: Any, model: Any) -> None:
    made = layer(monkeypatch, model, mode="colocate", enable_sleep_mode=True)
    made.generate([A], None, num_generations=1)
    calls = [call for call in made.llm.calls if isinstance(call, str)]
    loads = Counter(calls).pop("load_weights")
    assert loads == len(list(model.named_parameters()))  # one call a tensor
    short = [call for call in calls if call != "load_weights"]
    assert short == ["sleep 2", "wake weights", "reset", "wake kv_cache", "sleep 2"]


def test_an_engine_whose_generation_fails_stays_awake(monkeypatch: Any, model: Any) -> None:
    made = layer(monkeypatch, model, mode="colocate", enable_sleep_mode=True)
    made.llm.fails = True
    with pytest.raises(RuntimeError, match="the engine failed"):
        made.generate([A], None, num_generations=1)
    assert not isinstance(made.llm.calls[-1], str)  # no sleep after the failed call


def test_two_structured_outputs_win_by_mode(monkeypatch: Any, model: Any, server: Recorder) -> None:
    settings = {"structured_outputs_regex": "a+", "generation_kwargs": {"structured_outputs": {"regex": "b+"}}}
    at_server(monkeypatch, model, server, **settings).generate([A], None, num_generations=1)
    assert server.bodies("/v1/completions")[0]["structured_outputs"] == {"regex": "b+"}
    made = layer(monkeypatch, model, mode="colocate", **settings)
    made.generate([A], None, num_generations=1)
    assert made.llm.calls[-1].structured_outputs.regex == "a+"


def async_turn(server: Recorder) -> tuple[list[int], list[float]]:
    """One turn of AsyncGRPO's rollout loop, of which only what the turn reads is set."""
    import aiohttp

    async def run() -> tuple[list[int], list[float]]:
        loop = object.__new__(_AsyncRolloutLoop)
        values = {"lora_name": None, "model_name": "policy", "max_tokens": 4, "temperature": 1.0, "top_p": 1.0}
        values |= {"top_k": 0, "min_p": None, "repetition_penalty": 1.0, "request_timeout": 10}
        loop.__dict__.update(values, vllm_server_url=server.url, _counters=Counter())
        async with aiohttp.ClientSession() as loop.session:
            ids, logprobs = await loop._generate_one_turn(A)
            return ids, logprobs

    return asyncio.run(run())


def test_async_requests_are_seeded_by_chance_and_lose_their_finish_reason(server: Recorder) -> None:
    turns = [async_turn(server), async_turn(server)]
    assert turns == [([10], [-2.0])] * 2  # ids and logprobs, nothing of "abort"
    first, second = server.bodies("/v1/completions")
    assert first["seed"] != second["seed"]
    assert not {"stop", "stop_token_ids", "min_tokens"} & set(first)


def test_async_requests_that_were_refused_are_sent_again(server: Recorder) -> None:
    server.statuses["/v1/completions"] = [400]
    assert async_turn(server) == ([10], [-2.0])
    assert len(server.bodies("/v1/completions")) == 2


def test_async_updates_keep_requests_in_flight(server: Recorder) -> None:
    AsyncClient(server.url).pause()
    assert server.requests[-1] == Request("/pause", {"mode": ["keep"]}, None)
