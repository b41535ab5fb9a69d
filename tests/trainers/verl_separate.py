# pyright: reportMissingImports=false
"""The checkpoint engine for replicas on GPUs of their own: one push to the engines of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.config import HFModelConfig, RolloutConfig

from drivetrain import InferenceEngine, WeightPlanMismatch, attach
from drivetrain.testing import tiny_model
from drivetrain_trainers.verl import checkpoint_engine
from drivetrain_trainers.verl.checkpoint_engine import DirectPush
from drivetrain_trainers.verl.engine_server import EngineServer
from drivetrain_trainers.verl.rollout import PUSHED, DrivetrainRollout

HANGING = 900.0
"""Seconds after which a test counts as hanging, on a machine however busy."""
MODEL = str(tiny_model("qwen2"))


def weights() -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict())


def config() -> RolloutConfig:
    engine = {"drivetrain": {"backend": "transformers"}}
    return RolloutConfig(name="drivetrain", tensor_model_parallel_size=1, dtype="float32", engine_kwargs=engine)


async def update(servers: list[EngineServer], trainer: DirectPush, given: dict[str, torch.Tensor], step: int) -> None:
    """Do what verl's CheckpointEngineManager does in an update."""
    for server in servers:
        await server.abort_all_requests()
        await server.release_kv_cache()
    try:
        await trainer.send_weights(iter(given.items()), global_steps=step)
    finally:
        for server in servers:
            await server.resume_kv_cache()
            await server.resume_generation()


@pytest.mark.parametrize("count", [1, 2])
def test_one_push_updates_the_engines_of_all_replicas(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = HFModelConfig(path=MODEL, override_config={"attn_implementation": "sdpa"})
        servers = {f"server-{number}": EngineServer(config(), model, "standalone") for number in range(count)}
        for server in servers.values():
            await server.start()

        async def attach_to(name: str) -> InferenceEngine:
            return await attach(await servers[name].handle())

        monkeypatch.setattr(checkpoint_engine, "attach_to", attach_to)
        assert CheckpointEngineRegistry.get("drivetrain") is DirectPush
        names: list[str | None] = [None, *(name for name in servers for _ in range(2))]  # two workers a replica
        metadata = [{"server": name} for name in names]
        of_trainer, of_rollout = DirectPush.build_topology(1, 2 * count, metadata)
        assert of_trainer["servers"] == [tuple(servers)]
        assert len(of_rollout["servers"]) == 2 * count
        trainer = DirectPush(bucket_size=1 << 20, is_master=True)
        trainer.init_process_group(servers=of_trainer["servers"][0])
        for step in range(2):
            await update(list(servers.values()), trainer, weights(), step)
            trainer.finalize()
            for server in servers.values():
                output = await server.generate([5, 6], {"max_tokens": 2, "ignore_eos": True}, "a")
                assert output.extra_fields["global_steps"] == step
        with pytest.raises(WeightPlanMismatch, match="surprise"):
            await update(list(servers.values()), trainer, {"surprise": torch.zeros(2), **weights()}, 2)
        for server in servers.values():
            assert (await server.generate([5, 6], {"max_tokens": 2}, "a")).extra_fields["global_steps"] == 1
        await trainer.close()
        for server in servers.values():
            await server.engine.teardown()

    asyncio.run(asyncio.wait_for(run(), HANGING))


def test_other_ranks_gather_and_workers_of_the_rollout_receive_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights().items():
            read.append(name)
            yield name, tensor

    asyncio.run(DirectPush(bucket_size=1 << 20).send_weights(gather(), global_steps=1))
    assert read == list(weights())

    async def receive() -> None:
        worker = DirectPush(bucket_size=1 << 20)
        assert worker.prepare() == {"server": "drivetrain_server_4"}
        await rank.update_weights(worker.receive_weights(), global_steps=1, wire_format=worker.wire_format)

    monkeypatch.setenv("RANK", "0")
    rank = DrivetrainRollout(config(), HFModelConfig(path=MODEL), None, replica_rank=4)
    assert DirectPush.wire_format == PUSHED
    asyncio.run(receive())
