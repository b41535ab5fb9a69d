# pyright: reportMissingImports=false
"""The rollout in a trainer's rank: what it pushes to a real engine, and what other ranks may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import collect_lora_params, replace_lora_wrapper
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from drivetrain import (
    EngineState,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    WeightPlanMismatch,
    attach,
)
from drivetrain.testing import tiny_model
from drivetrain_trainers.verl import rollout
from drivetrain_trainers.verl.engine_server import EngineServer
from drivetrain_trainers.verl.experts import restacked
from drivetrain_trainers.verl.rollout import DrivetrainRollout

HANGING = 900.0
"""Seconds after which a test counts as hanging, on a machine however busy."""
MODEL = str(tiny_model("qwen2"))
Pairs = Iterator[tuple[str, torch.Tensor]]


class Gather:
    """Named tensors as verl's ranks gather them: a rank that stops reading leaves the others waiting."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.read: list[str] = []
        self.with_gradients = False

    def __iter__(self) -> Pairs:
        for name, tensor in self.tensors.items():
            self.with_gradients |= torch.is_grad_enabled()
            self.read.append(name)
            yield name, tensor.clone()

    async def later(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in self:
            await asyncio.sleep(0)
            yield pair

    @property
    def complete(self) -> bool:
        return self.read == list(self.tensors)


def tensors() -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict())


def with_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[DrivetrainRollout, EngineServer], Awaitable[None]],
    dtype: str,
    path: str = MODEL,
    **of_model: object,
) -> None:
    """Run a test with the first rank of a replica and the server of its engine."""

    async def run() -> None:
        monkeypatch.setenv("RANK", "0")
        config = RolloutConfig(
            name="drivetrain",
            tensor_model_parallel_size=1,
            dtype=dtype,
            engine_kwargs={"drivetrain": {"backend": "transformers"}},
            checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1),
        )
        model = HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"}, **of_model)
        server = EngineServer(config, model, "hybrid")
        await server.start()
        rank = DrivetrainRollout(config, model, None)
        attached = await attach(await server.handle())

        async def attach_to(name: str) -> InferenceEngine:
            return attached  # without Ray's actor between

        monkeypatch.setattr(rollout, "attach_to", attach_to)
        try:
            await asyncio.wait_for(test(rank, server), HANGING)
        finally:
            await attached.teardown()
            await server.engine.teardown()

    asyncio.run(run())


def test_a_step_of_training_sleeps_wakes_and_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        for step, asynchronous in enumerate([False, True, False]):
            await server.sleep()
            assert server.engine.state is EngineState.ASLEEP
            await rank.resume(["weights"])
            gather = Gather(tensors())
            await rank.update_weights(gather.later() if asynchronous else iter(gather), global_steps=step)
            await rank.resume(["kv_cache"])
            assert gather.complete
            assert not gather.with_gradients
            output = await server.generate([5, 6], {"max_tokens": 2, "ignore_eos": True}, "a")
            assert output.extra_fields["global_steps"] == step
        await rank.release()
        assert server.engine.state is EngineState.ASLEEP

    with_a_rank(monkeypatch, test, "float32")


def test_float32_weights_are_rounded_to_the_dtype_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        given = {name: tensor + 0.001 for name, tensor in tensors().items()}
        await rank.update_weights(iter(Gather(given)), global_steps=1)
        name = next(iter(given))
        kept = (await server.engine.get_weights_by_name(name)).data
        rounded = given[name].bfloat16().view(torch.uint8).numpy().tobytes()
        assert kept == rounded

    with_a_rank(monkeypatch, test, "bfloat16")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_arrive_whatever_verl_calls_them(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is to hold the files that the trainer's weights were loaded from, bit by bit."""
    trained = tiny_model(architecture, seed=1)
    module = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)

    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        given = dict(unfuse_moe_params(module.state_dict().items(), architecture))
        assert given.keys() != module.state_dict().keys() or architecture == "gpt_oss"
        await rank.update_weights(iter(Gather(given)), global_steps=1)
        for name, tensor in load_file(trained / "model.safetensors").items():
            held = (await server.engine.get_weights_by_name(name)).data
            assert held == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name

    with_a_rank(monkeypatch, test, "float32", str(tiny_model(architecture)))


def test_experts_that_verl_has_split_are_stacked_again() -> None:
    experts = "model.layers.0.mlp.experts"
    given = {
        f"{experts}.gate_up_proj": torch.randn(3, 10, 4),
        f"{experts}.down_proj": torch.randn(3, 4, 5),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 4),
        "model.layers.1.mlp.experts.gate_up_proj": torch.randn(3, 10, 4),
    }
    split = dict(unfuse_moe_params(iter(given.items())))
    assert dict(restacked(iter(split.items()), split.keys())) == split
    again = dict(restacked(iter(split.items()), given.keys()))
    assert list(again) == list(given)
    assert all(torch.equal(again[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ((2, 1, 0), "experts.2.gate_proj.weight arrived where"),
        ((0, 2), "experts.2.gate_proj.weight arrived where"),
    ],
    ids=["another order", "one is missing"],
)
def test_experts_in_another_order_are_refused(order: tuple[int, ...], named: str) -> None:
    split = [
        (f"layers.0.mlp.experts.{expert}.{kind}_proj.weight", torch.randn(5, 4))
        for expert in order
        for kind in ("gate", "up")
    ]
    with pytest.raises(WeightPlanMismatch, match=named):
        list(restacked(iter(split), ()))


def test_projections_of_experts_in_another_order_are_refused() -> None:
    gate, up = "layers.0.mlp.experts.0.gate_proj.weight", "layers.0.mlp.experts.0.up_proj.weight"
    with pytest.raises(WeightPlanMismatch) as swapped:
        list(restacked(iter([(up, torch.randn(5, 4)), (gate, torch.randn(5, 4))]), ()))
    assert swapped.value.mismatched == (up,)
    with pytest.raises(WeightPlanMismatch) as odd:
        list(restacked(iter([(gate, torch.randn(5, 4))]), ()))
    assert odd.value.missing == (up,)


def test_without_a_step_the_version_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        await rank.update_weights(iter(Gather(tensors())), global_steps=4)
        await rank.update_weights(iter(Gather(tensors())))
        assert server.engine.get_weight_version() == "4"

    with_a_rank(monkeypatch, test, "float32")


def test_a_refused_push_reads_to_the_end_and_the_engine_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        gather = Gather({"surprise": torch.zeros(3), **tensors()})
        with pytest.raises(WeightPlanMismatch, match="surprise"):
            await rank.update_weights(iter(gather), global_steps=1)
        assert gather.complete
        assert (await server.generate([5, 6], {"max_tokens": 2}, "a")).extra_fields["global_steps"] is None

    with_a_rank(monkeypatch, test, "float32")


def test_a_push_to_a_dead_engine_reads_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        await server.engine.teardown()
        gather = Gather(tensors())
        with pytest.raises(Exception, match="engine"):
            await rank.update_weights(iter(gather), global_steps=1)
        assert gather.complete

    with_a_rank(monkeypatch, test, "float32")


def test_ranks_that_do_not_push_take_part_in_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    config = RolloutConfig(name="drivetrain", tensor_model_parallel_size=2, dtype="float32")
    rank = DrivetrainRollout(config, HFModelConfig(path=MODEL), None)
    assert (rank.replica_rank, rank.is_leader_rank) == (1, False)
    gather = Gather(tensors())
    asyncio.run(rank.update_weights(iter(gather), global_steps=1))
    assert gather.complete
    asyncio.run(rank.resume(["weights"]))  # nothing to wake


def adapted(seed: int) -> PeftModel:
    """Return a policy with an adapter that changes its results."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", seed=seed), dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def sent_by_verl(policy: PeftModel, base_sync_done: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that verl's FSDP engine sends (``workers/engine/fsdp/transformer_impl.py:1002``)."""
    sent: dict[str, torch.Tensor] = collect_lora_params(policy, layered_summon=False, base_sync_done=base_sync_done)
    if base_sync_done:
        return sent
    return {replace_lora_wrapper(name, policy.peft_config["default"]): tensor for name, tensor in sent.items()}


def logprobs_of(policy: PeftModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    return logprobs


def test_base_weights_come_once_and_adapters_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted(seed=1)
    peft_config = policy.peft_config["default"].to_dict()
    sampled = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}

    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        with pytest.raises(InvalidRequest, match="'policy' is not loaded"):
            await server.generate([5, 6], dict(sampled), "early")
        for step in range(3):
            await server.sleep()
            assert server.engine.state is EngineState.ASLEEP
            await rank.resume(["weights"])
            if not step:
                base = Gather(sent_by_verl(policy, base_sync_done=False))
                assert "model.layers.0.self_attn.q_proj.base_layer.weight" in base.tensors
                await rank.update_weights(iter(base), step, peft_config=peft_config, base_sync_done=False)
            adapter = Gather(sent_by_verl(policy, base_sync_done=True))
            await rank.update_weights(iter(adapter), step, peft_config=peft_config, base_sync_done=True)
            assert adapter.complete
            await rank.resume(["kv_cache"])
            output = await server.generate([5, 6], dict(sampled), f"step {step}")
            assert torch.allclose(
                torch.tensor(output.log_probs), logprobs_of(policy, [5, 6], output.token_ids), atol=1e-4
            )
            with policy.disable_adapter():
                plain = logprobs_of(policy, [5, 6], output.token_ids)
            assert not torch.allclose(torch.tensor(output.log_probs), plain, atol=1e-2)
            assert output.extra_fields["weight_versions"] == f"{step}:0-8"
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    parameter.add_(0.02 if ".lora_" in name else 0)
        await rank.release()
        assert server.engine.state is EngineState.ASLEEP

    with_a_rank(monkeypatch, test, "float32", lora_rank=4)


def test_an_adapter_that_the_engine_does_not_take_is_refused_and_the_old_one_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = adapted(seed=0)
    peft_config = policy.peft_config["default"].to_dict()

    async def test(rank: DrivetrainRollout, server: EngineServer) -> None:
        await rank.update_weights(iter(Gather(sent_by_verl(policy, True))), 1, peft_config=peft_config)
        broken = sent_by_verl(policy, True)
        broken[next(iter(broken))][0, 0] = torch.nan
        gather = Gather(broken)
        with pytest.raises(InvalidWeights):
            await rank.update_weights(iter(gather), 2, peft_config=peft_config)
        assert gather.complete
        output = await server.generate([5, 6], {"max_tokens": 2, "ignore_eos": True}, "a")
        assert output.extra_fields["global_steps"] == 1

    with_a_rank(monkeypatch, test, "float32", lora_rank=4)


def test_deltas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    config = RolloutConfig(name="drivetrain", tensor_model_parallel_size=1)
    rank = DrivetrainRollout(config, HFModelConfig(path=MODEL), None)
    with pytest.raises(InvalidConfig, match="wire_format='delta_flush': expected 'named_tensors'"):
        asyncio.run(rank.update_weights(iter(()), wire_format="delta_flush"))
