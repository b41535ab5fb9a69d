"""Weights by SkyRL's requests: a trainer's process broadcasts them in a group of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from drivetrain import (
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    UnsupportedCapability,
    WeightPlanMismatch,
    create_engine,
)
from drivetrain.types.config import Isolation
from drivetrain_trainers.skyrl import SkyRLInferenceEngine
from engines import HANGING, until_running
from scripted_backend import ScriptedBackend
from trainer_groups import Tensor, Trainer, a_client, a_rank_0, free_port, fresh, require_released, same, tensors_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


# The fields of SkyRL's own classes of these names.


@dataclass
class BroadcastInitInfo:
    override_existing_receiver: bool
    master_addr: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    model_dtype_str: str


@dataclass
class CudaIpcInitInfo:
    override_existing_receiver: bool
    model_dtype_str: str


@dataclass
class CheckpointEngineInitInfo:
    ps_host: str
    ps_port: int
    model_dtype_str: str


@dataclass
class BroadcastWeightUpdateRequest:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    weight_version: str | None = None


@dataclass
class CudaIpcWeightUpdateRequest:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    ipc_handles: dict[str, Any]
    weight_version: str | None = None


@dataclass
class LoraLoadRequest:
    lora_path: str
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


@dataclass
class Sender:
    """SkyRL's sender of weights: a request per tensor, and the tensor's broadcast beside it."""

    skyrl: SkyRLInferenceEngine
    trainer: Trainer
    info: BroadcastInitInfo

    async def send(self, folder: Path, tensor: Tensor, *, overlapped: bool = False, **more: Any) -> None:
        request = BroadcastWeightUpdateRequest([tensor["name"]], [tensor["dtype"]], [tensor["shape"]], **more)
        call = self.skyrl.overlapped_weight_sync if overlapped else self.skyrl.update_named_weights
        broadcast = self.trainer.do(
            "send", group=self.info.group_name, folder=str(folder), tensors=[tensor], flattened=False
        )
        async with asyncio.timeout(HANGING):
            error, refusal = await asyncio.gather(broadcast, call(request), return_exceptions=True)
        assert error == ""
        if isinstance(refusal, BaseException):
            raise refusal


async def join(skyrl: SkyRLInferenceEngine, trainer: Trainer, name: str) -> BroadcastInitInfo:
    info = BroadcastInitInfo(True, "127.0.0.1", free_port(), 1, 2, name, "gloo", "torch.float32")
    joining = trainer.do(
        "join", address=info.master_addr, port=info.master_port, world_size=2, group=name, backend="gloo"
    )
    async with asyncio.timeout(HANGING):
        error, _ = await asyncio.gather(joining, skyrl.init_weight_update_communicator(info))
    assert error == ""
    return info


@pytest_asyncio.fixture(loop_scope="session")
async def sender(skyrl: SkyRLInferenceEngine, trainer: Trainer, restored: None) -> AsyncIterator[Sender]:
    info = await join(skyrl, trainer, "skyrl")
    yield Sender(skyrl, trainer, info)
    await skyrl.transfers.close()
    await trainer.do("destroy", group="skyrl")


async def answers(skyrl: SkyRLInferenceEngine) -> tuple[list[int], list[float]]:
    output = await skyrl.generate({"prompt_token_ids": [[5, 6, 7]], "sampling_params": GREEDY})
    return output["response_ids"][0], (output["response_logprobs"] or [])[0]


# Broadcast -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
async def test_an_update_is_served_once_every_tensor_has_come(
    skyrl: SkyRLInferenceEngine, sender: Sender, other_model: Path, overlapped: bool
) -> None:
    before = await answers(skyrl)
    *first, last = tensors_of(other_model, "torch.float32")
    for tensor in first:
        await sender.send(other_model, tensor, overlapped=overlapped, weight_version="step_1")
    assert same(await answers(skyrl), before), "nothing is applied before the last tensor has come"
    assert await skyrl.get_weight_version() == "initial"
    await sender.send(other_model, last, overlapped=overlapped, weight_version="step_1")
    assert same(await answers(skyrl), await fresh(other_model))
    assert await skyrl.get_weight_version() == "step_1"
    assert (await skyrl.check_weight_sync_integrity("step_1"))["version_match"] is True


@pytest.mark.slow
async def test_requests_in_flight_go_on_through_an_overlapped_update(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, sender: Sender, other_model: Path
) -> None:
    task = asyncio.create_task(skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": LONG}))
    await until_running(engine, 1)
    for tensor in tensors_of(other_model, "torch.float32"):
        await sender.send(other_model, tensor, overlapped=True, weight_version="2")
    assert await skyrl.get_weight_version() == "2"
    assert (await task)["stop_reasons"] == ["length"]


async def test_transfers_are_applied_when_they_are_finished(
    skyrl: SkyRLInferenceEngine, sender: Sender, other_model: Path
) -> None:
    assert skyrl.supports_overlapped_weight_sync() is True
    before = await answers(skyrl)
    handles = []
    for tensor in tensors_of(other_model, "torch.float32"):
        request = BroadcastWeightUpdateRequest([tensor["name"]], [tensor["dtype"]], [tensor["shape"]], "3")
        handle = await skyrl.start_weight_transfer(request)
        assert (
            await sender.trainer.do("send", group="skyrl", folder=str(other_model), tensors=[tensor], flattened=False)
            == ""
        )
        await handle.wait()
        assert handle.is_complete
        handles.append(handle)
    assert same(await answers(skyrl), before), "the last tensor was applied before its transfer was finished"
    with pytest.raises(UnsupportedCapability, match="flush_cache"):
        await skyrl.finish_weight_transfer(handles[-1], flush_cache=False)
    await skyrl.finish_weight_transfer(handles[-1])
    assert same(await answers(skyrl), await fresh(other_model))
    assert await skyrl.get_weight_version() == "3"


@pytest.mark.slow
async def test_an_update_is_applied_also_after_a_transfer_that_was_never_finished(
    skyrl: SkyRLInferenceEngine, sender: Sender, other_model: Path
) -> None:
    tensors = tensors_of(other_model, "torch.float32")
    await sender.send(other_model, tensors[0], overlapped=True, weight_version="given up")
    for tensor in tensors:
        await sender.send(other_model, tensor, weight_version="7")
    assert await skyrl.get_weight_version() == "7"
    assert same(await answers(skyrl), await fresh(other_model))


async def test_a_tensor_of_a_wrong_shape_is_refused_and_changes_nothing(
    skyrl: SkyRLInferenceEngine, sender: Sender, other_model: Path
) -> None:
    before = await answers(skyrl)
    tensor = tensors_of(other_model, "torch.float32")[0]
    wrong = {**tensor, "shape": [2, *tensor["shape"][1:]]}
    with pytest.raises(WeightPlanMismatch, match=str(tensor["name"])):
        await sender.send(other_model, wrong, weight_version="4")
    assert same(await answers(skyrl), before)
    for tensor in tensors_of(other_model, "torch.float32"):  # the trainer starts over
        await sender.send(other_model, tensor, weight_version="4")
    assert await skyrl.get_weight_version() == "4"


async def test_a_dtype_that_would_be_rounded_is_refused_unless_it_is_asked_for(
    engine: InferenceEngine, trainer: Trainer, other_model: Path, restored: None
) -> None:
    tensors = tensors_of(other_model, "torch.float64")
    strict, rounding = SkyRLInferenceEngine(engine), SkyRLInferenceEngine(engine, cast=True)
    with pytest.raises(WeightPlanMismatch, match="float64"):
        await Sender(strict, trainer, await join(strict, trainer, "strict")).send(other_model, tensors[0])
    await strict.transfers.close()
    sender = Sender(rounding, trainer, await join(rounding, trainer, "rounding"))
    for tensor in tensors:
        await sender.send(other_model, tensor, weight_version="5")
    assert same(await answers(rounding), await fresh(other_model))
    await rounding.transfers.close()


@pytest.mark.slow
async def test_a_receiver_that_exists_is_kept_if_it_is_not_to_be_replaced(
    skyrl: SkyRLInferenceEngine, sender: Sender, other_model: Path
) -> None:
    async with asyncio.timeout(HANGING):
        await skyrl.init_weight_update_communicator(replace(sender.info, override_existing_receiver=False))
    for tensor in tensors_of(other_model, "torch.float32"):
        await sender.send(other_model, tensor, weight_version="6")
    assert await skyrl.get_weight_version() == "6"


# Refusals ------------------------------------------------------------------------------------------------------------

ONE = BroadcastWeightUpdateRequest(["model.norm.weight"], ["torch.float32"], [[128]])


async def test_requests_that_cannot_be_honoured_are_refused(skyrl: SkyRLInferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="init_weight_update_communicator"):
        await skyrl.update_named_weights(ONE)
    with pytest.raises(InvalidRequest, match="BroadcastWeightUpdateRequest"):
        await skyrl.update_named_weights(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="1, 1 and 0 entries"):
        await skyrl.update_named_weights(replace(ONE, shapes=[]))
    with pytest.raises(InvalidRequest, match="an adapter is not transferred"):
        await skyrl.start_weight_transfer(LoraLoadRequest("/adapter"))
    with pytest.raises(UnsupportedCapability, match="CheckpointEngineInitInfo"):
        await skyrl.init_weight_update_communicator(CheckpointEngineInitInfo("host", 1, "float32"))
    with pytest.raises(InvalidRequest, match="init_info"):
        await skyrl.init_weight_update_communicator(object())


if not torch.cuda.is_available():

    async def test_cuda_ipc_is_refused_without_a_gpu(skyrl: SkyRLInferenceEngine) -> None:
        with pytest.raises(UnsupportedCapability, match="CUDA IPC need a GPU"):
            await skyrl.init_weight_update_communicator(CudaIpcInitInfo(True, "float32"))
        request = CudaIpcWeightUpdateRequest(ONE.names, ONE.dtypes, ONE.shapes, [128], {"GPU-1": None})
        with pytest.raises(UnsupportedCapability, match="CUDA IPC need a GPU"):
            await skyrl.update_named_weights(request)


async def test_a_trainer_does_not_wait_for_a_group_that_is_refused(skyrl: SkyRLInferenceEngine) -> None:
    port = free_port()
    async with a_rank_0(port, use_libuv=True) as rank_0:
        with pytest.raises(InvalidRequest, match="backend='mpi'"):
            await skyrl.init_weight_update_communicator(
                BroadcastInitInfo(True, "127.0.0.1", port, 1, 2, "skyrl", "mpi", "float32")
            )
        await require_released(rank_0)


async def test_a_group_of_several_ranks_is_refused(model: Path) -> None:
    config = EngineConfig(backend="scripted", model=str(model), tensor_parallel_size=2)
    engine = InferenceEngine(
        config, ScriptedBackend(config), capabilities=frozenset(), isolation=Isolation.INLINE, versions={}
    )
    skyrl = SkyRLInferenceEngine(engine)
    assert skyrl.tp_size() == 2
    with pytest.raises(UnsupportedCapability, match="2 ranks"):
        await skyrl.init_weight_update_communicator(
            BroadcastInitInfo(True, "127.0.0.1", 1, 1, 3, "skyrl", "gloo", "float32")
        )


# Adapters, disk, versions --------------------------------------------------------------------------------------------


async def test_a_lora_request_loads_the_folder_under_its_name_and_replaces_it(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, adapters: Path, tmp_path: Path, restored: None
) -> None:
    folder = tmp_path / "policy"
    params = {**GREEDY, "lora_name": "policy"}
    found = []
    for name in ("one", "two"):
        shutil.copytree(adapters / name, folder, dirs_exist_ok=True)
        await skyrl.update_named_weights(LoraLoadRequest(f"{folder}/"))
        output = await skyrl.generate({"prompt_token_ids": [[5, 6, 7]], "sampling_params": params})
        found.append(output["response_ids"])
    await skyrl.unload_lora_adapter("policy")
    for name, ids in zip(("one", "two"), found, strict=True):
        await skyrl.load_lora_adapter("check", str(adapters / name))
        output = await skyrl.generate(
            {"prompt_token_ids": [[5, 6, 7]], "sampling_params": {**params, "lora_name": "check"}}
        )
        assert output["response_ids"] == ids
        await skyrl.unload_lora_adapter("check")
    assert found[0] != found[1]


async def test_weights_are_loaded_from_a_folder_and_the_version_counts_up(
    skyrl: SkyRLInferenceEngine, model: Path, other_model: Path, restored: None
) -> None:
    before = await answers(skyrl)
    await skyrl.update_weight_version("41")
    await skyrl.load_weights_from_disk(str(other_model), load_format="safetensors")
    assert same(await answers(skyrl), await fresh(other_model))
    assert await skyrl.get_weight_version() == "42"
    await skyrl.load_weights_from_disk(str(model))
    assert same(await answers(skyrl), before)
    with pytest.raises(UnsupportedCapability, match="load_format='pt'"):
        await skyrl.load_weights_from_disk(str(model), load_format="pt")


@pytest.mark.parametrize("flush", [False, True])
async def test_cached_prefixes_of_older_weights_are_kept_only_if_asked_for(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, model: Path, restored: None, flush: bool
) -> None:
    prompt = list(range(5, 205))
    await engine.generate([prompt], {"max_new_tokens": 1})
    await skyrl.load_weights_from_disk(str(model), flush_cache=flush)
    (completion,) = (await engine.generate([prompt], {"max_new_tokens": 1})).completions
    assert (completion.cached_tokens == 0) is flush


@pytest.mark.parametrize("abort", [True, False])
async def test_a_new_label_ends_requests_unless_told_otherwise(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine, restored: None, abort: bool
) -> None:
    params = {"max_tokens": 300, "ignore_eos": True}
    task = asyncio.create_task(skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": params}))
    await until_running(engine, 1)
    await skyrl.update_weight_version("step_9", abort_all_requests=abort)
    assert await skyrl.get_weight_version() == "step_9"
    assert (await task)["stop_reasons"] == ["abort" if abort else "length"]
    assert not engine.is_paused


async def test_the_version_of_a_server_is_asked_for(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    async with a_client(engine) as client:
        assert await SkyRLInferenceEngine.get_remote_weight_version(str(client.base_url)) == "initial"


# Reading, checking, saving -------------------------------------------------------------------------------------------


async def test_a_tensor_is_read_by_its_name(skyrl: SkyRLInferenceEngine, model: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    found = await skyrl.get_weights_by_name(name)
    assert found is not None
    torch.testing.assert_close(found, load_file(model / "model.safetensors")[name], rtol=0, atol=0)
    assert await skyrl.get_weights_by_name("no.such.weight") is None


async def test_weights_are_checked_tensor_by_tensor(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    nan, infinite, zeros, good = (
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        *[f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)],
    )
    tensors[nan][:2] = float("nan")
    tensors[infinite][0, 0] = float("inf")
    tensors[zeros].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    async with create_engine("transformers", model=str(folder), isolation="inline") as engine:
        skyrl = SkyRLInferenceEngine(engine)
        found = await skyrl.validate_weights()
        assert found["valid"] is False
        assert found["checked"] == len(tensors)
        assert [(one["name"], one["type"], one.get("count")) for one in found["issues"]] == [
            (nan, "nan", 2),
            (infinite, "inf", 1),
        ]
        assert found["issues"][0].get("percentage") == pytest.approx(100 * 2 / tensors[nan].numel())
        only = await skyrl.validate_weights([zeros, good], check_zeros=True)
        assert only["checked"] == 2
        assert only["issues"] == [{"name": zeros, "type": "all_zeros", "shape": list(tensors[zeros].shape)}]
        assert (await skyrl.validate_weights(check_nan=False, check_inf=False))["valid"] is True
        with pytest.raises(InvalidRequest, match=r"no\.such"):
            await skyrl.validate_weights(["no.such"])
        integrity = await skyrl.check_weight_sync_integrity(expected_version="other")
        assert (integrity["weights_valid"], integrity["version_match"]) == (False, False)
        assert integrity["current_version"] == "initial"
        assert (await skyrl.check_weight_sync_integrity())["version_match"] is None


async def test_a_saved_folder_serves_the_same(
    skyrl: SkyRLInferenceEngine, other_model: Path, restored: None, tmp_path: Path
) -> None:
    await skyrl.load_weights_from_disk(str(other_model))
    expected = await answers(skyrl)
    assert await skyrl.save_sharded_model(str(tmp_path / "saved")) is True
    assert same(await fresh(tmp_path / "saved"), expected)
    assert await skyrl.save_remote_model(f"{tmp_path}/remote", storage_type="file") is True
    assert same(await fresh(tmp_path / "remote"), expected)


async def test_saving_refuses_what_it_cannot_honour(skyrl: SkyRLInferenceEngine, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCapability, match="pattern"):
        await skyrl.save_sharded_model(str(tmp_path / "a"), pattern="model-{rank}")
    with pytest.raises(UnsupportedCapability, match="max_size"):
        await skyrl.save_sharded_model(str(tmp_path / "a"), max_size=1 << 20)
    with pytest.raises(InvalidRequest, match="gs://"):
        await skyrl.save_remote_model("s3://bucket/key", storage_type="gcs")
    assert os.listdir(tmp_path) == []
