"""OpenRLHF's weights over NCCL and CUDA IPC: engines and a trainer on two GPUs, in Ray actors. Needs two GPUs.

python -m pytest tests/openrlhf/over_nccl.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import openrlhf_trainer
import trainer_process
from drivetrain_trainers.openrlhf import create_engines_with
from openrlhf_trainer import PolicyActor
from trainer_groups import fresh

GREEDY = SimpleNamespace(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
ARGUMENTS: dict[str, Any] = {
    "seed": 42,
    "full_determinism": False,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "max_model_len": 128,
}


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> Iterator[None]:
    for module in (openrlhf_trainer, trainer_process):
        cloudpickle.register_pickle_by_value(module)
    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def policy(**options: Any) -> Any:
    actor: Any = ray.remote(PolicyActor)
    return actor.options(**options).remote()


def require_served(engine: Any, folder: Path) -> None:
    """Compare with a fresh engine on the same kind of GPU."""
    answer: Any = ray.get(engine.generate.remote([5, 6, 7], GREEDY))
    (output,) = answer.outputs
    tokens, logprobs = asyncio.run(fresh(folder))
    assert output.token_ids == tokens
    found = [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]
    assert found == pytest.approx(logprobs, abs=1e-3)


def test_nccl_between_two_gpus(model: Path, other_model: Path) -> None:
    create = create_engines_with("transformers", dtype="float32")
    engines: list[Any] = create(1, 1, str(model), **ARGUMENTS)
    trainer = policy(num_cpus=1, num_gpus=1)
    ray.get(trainer.init_group.remote(engines, backend="nccl"), timeout=200)
    for number, folder in enumerate((other_model, model), 1):
        began = time.perf_counter()
        count = ray.get(trainer.broadcast.remote(engines, folder), timeout=200)
        print(f"{count} tensors in {time.perf_counter() - began:.3f} s")
        assert ray.get(engines[0].get_weight_version.remote()) == str(number)
        require_served(engines[0], folder)
    wrong = {"model.norm.weight": "model.absent.weight"}
    with pytest.raises(RayTaskError, match=r"model\.absent\.weight"):
        ray.get(trainer.broadcast.remote(engines, other_model, named=wrong), timeout=200)
    require_served(engines[0], model)
    ray.get(trainer.broadcast.remote(engines, other_model), timeout=200)
    require_served(engines[0], other_model)
    for actor in (*engines, trainer):
        ray.kill(actor)


def test_cuda_ipc_on_one_gpu(model: Path, other_model: Path) -> None:
    group = placement_group([{"GPU": 1, "CPU": 2}], strategy="PACK")
    ray.get(group.ready())
    create = create_engines_with("transformers", dtype="float32")
    engines: list[Any] = create(1, 1, str(model), **ARGUMENTS, shared_pg=group, vllm_enable_sleep=True)
    ray.get(engines[0].wake_up.remote(tags=["weights"]))
    place = PlacementGroupSchedulingStrategy(group, 0)
    trainer = policy(num_cpus=0.2, num_gpus=0.2, scheduling_strategy=place)
    began = time.perf_counter()
    count = ray.get(trainer.share.remote(engines, other_model), timeout=200)
    print(f"{count} tensors in {time.perf_counter() - began:.3f} s")
    ray.get(engines[0].wake_up.remote())
    assert ray.get(engines[0].get_weight_version.remote()) == "1"
    require_served(engines[0], other_model)
    ray.get(engines[0].sleep.remote())
    ray.get(engines[0].wake_up.remote())
    require_served(engines[0], other_model)
    for actor in (*engines, trainer):
        ray.kill(actor)
    remove_placement_group(group)
