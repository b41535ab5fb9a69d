"""The calls of OpenRLHF's trainer on engines in Ray actors: weights through gloo, generation, sleep and pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from safetensors.torch import load_file

from drivetrain import (
    DrivetrainError,
    InvalidRequest,
    UnsupportedCapability,
    WeightPlanMismatch,
    WeightSyncError,
    create_engine,
)
from drivetrain.types.weights import TensorSpec
from drivetrain_trainers.openrlhf import create_engines_with
from drivetrain_trainers.openrlhf.weights import TrainerWeights
from engines import HANGING
from openrlhf_trainer import PolicyActor
from trainer_groups import GREEDY as GREEDY_PARAMS
from trainer_groups import a_rank_0, a_trainer, free_port, fresh, require_released, same, tensors_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

FIELDS = {"device": "cpu", "dtype": "float32", "isolation": "inline", "enable_sleep": True}
GREEDY = SimpleNamespace(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
Answer = tuple[list[int], list[float]]


def start(model: Path, number: int, group: PlacementGroup) -> list[Any]:
    """Call what takes the place of ``create_vllm_engines``, in the way of OpenRLHF's ``train_ppo_ray.py``."""
    create = create_engines_with("transformers", **FIELDS)
    return create(
        number,
        1,
        str(model),
        42,
        False,
        True,
        False,
        128,
        group,
        None,
        False,
        "processed_logprobs",
        agent_func_path=None,
        remote_rm_url=None,
        max_images_per_prompt=0,
    )


@pytest.fixture(scope="module")
def engines(cluster: None, model: Path) -> Iterator[list[Any]]:
    """Two engines, in the bundles that they would share with the trainer's models."""
    group = placement_group([{"GPU": 1, "CPU": 1}] * 2, strategy="PACK")
    ray.get(group.ready())
    engines = start(model, 2, group)
    yield engines
    for engine in engines:
        ray.kill(engine)
    remove_placement_group(group)


@pytest.fixture(scope="module")
def trainers(engines: list[Any]) -> list[Any]:
    """The trainer, last; those before it are dead."""
    return [trainer_of(engines)]


@pytest.fixture
async def trainer(trainers: list[Any], engines: list[Any], model: Path) -> AsyncIterator[Any]:
    """A trainer that has formed a group with the engines. They serve ``model``, and do so again afterwards."""
    yield trainers[-1]
    await trainers[-1].broadcast.remote(engines, model)


def trainer_of(engines: list[Any]) -> Any:
    actor: Any = ray.remote(PolicyActor)
    trainer = actor.options(num_cpus=0).remote()
    ray.get(trainer.init_group.remote(engines), timeout=HANGING)
    return trainer


async def all_of(engines: list[Any], method: str, *arguments: Any, **more: Any) -> list[Any]:
    async with asyncio.timeout(HANGING):
        return list(await asyncio.gather(*(getattr(engine, method).remote(*arguments, **more) for engine in engines)))


async def answers_of(engines: list[Any]) -> list[Answer]:
    answers = await all_of(engines, "generate", [5, 6, 7], GREEDY)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (one.token_ids, [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)])
        for one in outputs
    ]


async def serve(engines: list[Any], folder: Path) -> bool:
    expected = await fresh(folder, logprobs_mode="processed")
    return all([same(found, expected) for found in await answers_of(engines)])


async def error_of(call: Any) -> DrivetrainError:
    """Return the error that a call of an actor ended with."""
    async with asyncio.timeout(HANGING):
        with pytest.raises(RayTaskError) as raised:
            await call
    error = raised.value
    while isinstance(error, RayTaskError):  # one for each actor that it came through
        assert error.cause is not None, error
        error = error.cause
    assert isinstance(error, DrivetrainError), error
    return error


async def test_engines_are_placed_in_the_bundles_of_the_trainers_models(engines: list[Any]) -> None:
    placed = await all_of(engines, "placement")
    assert [gpus for _, _, gpus in placed] == ["0", "1"]


# Weights --------------------------------------------------------------------------------------------------------------


async def test_two_engines_serve_an_update_once_its_last_tensor_has_come(
    trainer: Any, engines: list[Any], model: Path, other_model: Path
) -> None:
    assert await serve(engines, model)
    before = await all_of(engines, "get_weight_version")
    sent = await trainer.broadcast.remote(engines, other_model, stop=-1, marks_end=False)
    assert await serve(engines, model), "nothing is applied before the last tensor"
    assert await all_of(engines, "get_weight_version") == before
    await trainer.broadcast.remote(engines, other_model, first=sent)
    assert await serve(engines, other_model)
    published = await all_of(engines, "get_weight_version")
    await all_of(engines, "reset_prefix_cache")
    await trainer.broadcast.remote(engines, model)
    assert await serve(engines, model)
    versions = await all_of(engines, "get_weight_version")
    assert [int(version) for version in versions] == [int(version) + 1 for version in published]


async def test_a_trainer_that_dies_in_a_broadcast_leaves_the_old_weights(
    trainer: Any, trainers: list[Any], engines: list[Any], model: Path, other_model: Path
) -> None:
    half = await trainer.broadcast.remote(engines, other_model, stop=5, marks_end=False)
    name, tensor = list(load_file(other_model / "model.safetensors").items())[half]
    calls = [engine.update_weight.remote(name, dtype=tensor.dtype, shape=tensor.shape) for engine in engines]
    ray.kill(trainer)
    for call in calls:
        assert isinstance(await error_of(call), WeightSyncError)
    assert await serve(engines, model)
    (call,) = (engines[0].update_weight.remote(name, dtype=tensor.dtype, shape=tensor.shape),)
    assert "init_process_group" in str(await error_of(call)), "the group is gone"
    trainers.append(await asyncio.to_thread(trainer_of, engines))
    await trainers[-1].broadcast.remote(engines, other_model)
    assert await serve(engines, other_model)


async def test_a_tensor_that_is_refused_is_received_and_the_group_goes_on(
    trainer: Any, engines: list[Any], model: Path, other_model: Path
) -> None:
    wrong = {"model.norm.weight": "model.layers.77.norm.weight"}
    error = await error_of(trainer.broadcast.remote(engines, other_model, named=wrong))
    assert isinstance(error, WeightPlanMismatch)
    assert "model.layers.77.norm.weight" in str(error)
    assert await serve(engines, model)
    await trainer.broadcast.remote(engines, other_model)
    assert await serve(engines, other_model)


async def test_an_update_that_lacks_a_tensor_is_not_committed(
    trainer: Any, engines: list[Any], model: Path, other_model: Path
) -> None:
    error = await error_of(trainer.broadcast.remote(engines, other_model, first=1))
    assert isinstance(error, WeightPlanMismatch)
    assert next(iter(load_file(other_model / "model.safetensors"))) in str(error)
    assert await serve(engines, model)


async def test_an_engine_joins_with_every_rank_that_the_trainer_counts(model: Path, other_model: Path) -> None:
    async with create_engine("transformers", model=str(model), **FIELDS) as engine, a_trainer() as trainer:
        weights = TrainerWeights(engine, ranks=2)
        port, group = free_port(), {"group": "openrlhf"}
        joining = trainer.do("join", address="127.0.0.1", port=port, world_size=3, backend="gloo", **group)
        assert await together(joining, weights.join("127.0.0.1", port, 1, 3, "openrlhf", "gloo")) == ""
        tensors = tensors_of(other_model)
        specs = [TensorSpec(one["name"], one["dtype"], tuple(one["shape"])) for one in tensors]
        for tensor, spec in zip(tensors, specs, strict=True):
            sending = trainer.do("send", folder=str(other_model), tensors=[tensor], flattened=False, **group)
            assert await together(sending, weights.receive(spec, last=spec is specs[-1])) == ""
        (output,) = (await engine.generate([[5, 6, 7]], GREEDY_PARAMS)).completions
        assert same((output.token_ids, output.logprobs or []), await fresh(other_model))
        trainer.process.kill()
        with pytest.raises(WeightSyncError):
            await weights.receive(specs[0], last=False)
        await weights.close()


async def together(trainer: Awaitable[str], engine: Awaitable[None]) -> str:
    async with asyncio.timeout(HANGING):
        return (await asyncio.gather(trainer, engine))[0]


# Control --------------------------------------------------------------------------------------------------------------


async def test_the_colocated_cycle_of_sleep_update_and_wake(
    trainer: Any, engines: list[Any], other_model: Path
) -> None:
    error = await error_of(engines[0].sleep.remote())
    assert isinstance(error, InvalidRequest), "level 1 keeps the weights, and a CPU's engine cannot"
    await all_of(engines, "sleep", level=2)
    error = await error_of(engines[0].generate.remote([5, 6, 7], GREEDY))
    assert "asleep" in str(error)
    await all_of(engines, "wake_up", tags=["weights"])
    await trainer.broadcast.remote(engines, other_model)
    await all_of(engines, "wake_up")
    assert await serve(engines, other_model)
    assert isinstance(await error_of(engines[0].wake_up.remote(tags=["optimizer"])), InvalidRequest)


async def test_requests_that_arrive_in_a_pause_wait_and_are_counted(engines: list[Any]) -> None:
    engine = engines[0]
    expected = (await answers_of([engine]))[0]
    await engine.pause_generation.remote()
    waiting = engine.generate.remote([5, 6, 7], GREEDY)
    async with asyncio.timeout(HANGING):
        while await engine.get_num_unfinished_requests.remote() < 1:
            pass  # each call waits for the actor
    await engine.resume_generation.remote()
    answer = await waiting
    assert answer.outputs[0].token_ids == expected[0]
    assert await engine.get_num_unfinished_requests.remote() == 0


# Refusals -------------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_done_is_refused_by_name(engines: list[Any]) -> None:
    engine = engines[0]  # it leaves the trainer's group: the last test
    error = await error_of(engine.init_process_group.remote("127.0.0.1", 1, 1, 2, "openrlhf", "gloo", True))
    assert isinstance(error, UnsupportedCapability)
    assert "sync_with_ray" in str(error)
    error = await error_of(engine.init_process_group.remote("127.0.0.1", 1, 1, 3, "openrlhf", "nccl", False))
    assert isinstance(error, InvalidRequest)
    assert "NCCL needs a GPU" in str(error)
    port = free_port()
    async with a_rank_0(port, use_libuv=True) as rank_0:
        error = await error_of(engine.init_process_group.remote("127.0.0.1", port, 2, 2, "openrlhf", "gloo", False))
        assert "rank_offset=2 and world_size=2" in str(error)
        await require_released(rank_0)
    spec = {"dtype": torch.float32, "shape": torch.Size([1])}
    error = await error_of(engine.update_weight_cuda_ipc.remote("a", **spec, ipc_handles={"GPU-1": (print, ())}))
    assert isinstance(error, UnsupportedCapability)
    assert "GPU-1" in str(error)
    error = await error_of(engine.generate.remote([5], SimpleNamespace(temperature=-1.0)))
    assert isinstance(error, InvalidRequest)
    assert "temperature" in str(error)
    error = await error_of(engine.generate.remote([5], GREEDY, multi_modal_data={"image": []}))
    assert isinstance(error, UnsupportedCapability)
