"""Adapters that come as tensors are verified, checked, and leave nothing mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from drivetrain import (
    DiskSource,
    InvalidRequest,
    LoraTensors,
    SharedMemorySource,
    UnsupportedCapability,
    WeightPlan,
    WeightUpdateRequest,
    WeightVerifyFailed,
    create_engine,
)
from drivetrain.errors import WeightPlanMismatch
from drivetrain.testing import tiny_model
from drivetrain.types.weights import Bucket, PlacedTensor
from drivetrain_weight_sync import AdapterTensors, LoraSync, digests, make_plan
from drivetrain_weight_sync.receiver.lora_adapters import AdapterChecks, GivenAdapter
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters, plain_tensors
from drivetrain_weight_sync.receiver.received_adapters import receive_adapter
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.trainer.pushed_adapter import PeftAdapter
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender

TENSORS = {
    "base_model.model.layers.0.q_proj.lora_A.weight": torch.randn(2, 6),
    "base_model.model.layers.0.q_proj.lora_B.weight": torch.randn(8, 2).bfloat16(),
}
ADAPTER = LoraTensors(lora_name="policy", config={"peft_type": "LORA", "r": 2, "lora_alpha": 4})


@contextmanager
def sent(sender: Sender, tensors: dict[str, torch.Tensor] = TENSORS) -> Iterator[WeightUpdateRequest]:
    """Put tensors into a sender, and yield the request that brings them."""
    plan = make_plan(spec_of(name, tensor) for name, tensor in tensors.items())
    sender.begin(plan)
    for name, tensor in tensors.items():
        sender.put(name, tensor, held=True)
    try:
        yield WeightUpdateRequest(
            version="v", source=sender.source(), plan=plan, digests=digests(tensors), lora=ADAPTER
        )
    finally:
        sender.close()


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("drivetrain-weights")


@pytest.mark.parametrize("kind", [InProcessSender, SharedMemorySender])
def test_an_adapter_arrives_as_it_was_sent_and_nothing_stays_mapped(kind: type[Sender]) -> None:
    with sent(kind()) as request:
        before = mapped_arenas()
        given = receive_adapter(request, Groups())
        assert given.config == ADAPTER.config
        assert given.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(given.tensors[name], tensor) for name, tensor in TENSORS.items())
        assert not given.non_finite
        assert mapped_arenas() == before


def test_values_that_are_not_finite_are_found_on_arrival() -> None:
    name = next(iter(TENSORS))
    tensors = {**TENSORS, name: torch.full((2, 6), torch.inf)}
    with sent(SharedMemorySender(), tensors) as request:
        assert receive_adapter(request, Groups()).non_finite == {name: "infinite"}


def test_a_tensor_that_changed_on_the_way_is_named() -> None:
    first, second = TENSORS
    with sent(SharedMemorySender()) as request:
        other = request.model_copy(update={"digests": {**(request.digests or {}), second: 1}})
        with pytest.raises(WeightVerifyFailed, match="1 of 2 tensors of the adapter") as caught:
            receive_adapter(other, Groups())
        assert caught.value.tensors == (second,)
        few = request.model_copy(update={"digests": {first: 1}})
        with pytest.raises(InvalidRequest, match="one digest per tensor"):
            receive_adapter(few, Groups())


def test_a_source_that_does_not_exist_or_does_not_fit_is_refused() -> None:
    with sent(SharedMemorySender()) as request:
        source = request.source
        assert isinstance(source, SharedMemorySource)
        gone = request.model_copy(update={"source": source.model_copy(update={"path": "/proc/self/fd/9999"})})
        with pytest.raises(InvalidRequest, match="cannot be opened"):
            receive_adapter(gone, Groups())
        assert request.plan is not None
        placed = [one for bucket in request.plan.buckets for one in bucket.tensors]
        odd = WeightPlan((Bucket(tuple(PlacedTensor(one.spec, 8, one.nbytes) for one in placed), 4096),))
        with pytest.raises(WeightPlanMismatch, match="byte 8"):
            receive_adapter(request.model_copy(update={"plan": odd}), Groups())


def test_an_adapters_tensors_come_from_memory_and_all_at_once() -> None:
    with pytest.raises(ValueError, match="an adapter's tensors come from a source of kind in_process"):
        WeightUpdateRequest(version="v", source=DiskSource(path="/weights"), lora=ADAPTER)
    with sent(InProcessSender()) as request:
        with pytest.raises(ValueError, match="without keep_prefix_cache"):
            WeightUpdateRequest.model_validate({**request.model_dump(), "keep_prefix_cache": True})


async def test_an_adapter_of_tensors_is_no_update_of_all_weights() -> None:
    async with create_engine("transformers", model=str(tiny_model("qwen2")), enable_lora=True) as engine:
        with sent(InProcessSender()) as request:
            with pytest.raises(InvalidRequest, match="update_named_weights") as caught:
                await engine.prepare_weight_update(request)
            assert caught.value.field == "lora"


def test_an_engine_is_asked_only_for_ways_that_it_claims() -> None:
    model, adapter = str(tiny_model("qwen2")), AdapterTensors(ADAPTER.config, TENSORS)
    with pytest.raises(UnsupportedCapability) as caught:
        LoraSync.connect(adapter, create_engine("transformers", model=model))
    assert caught.value.capability == "weights_lora"
    with pytest.raises(UnsupportedCapability) as caught:
        LoraSync.connect(adapter, create_engine("transformers", model=model), strategy="broadcast")
    assert caught.value.capability == "weights_lora_tensors"
    hosted = create_engine("transformers", model=model, enable_lora=True, isolation="process")
    with pytest.raises(UnsupportedCapability, match="it can take: shared_memory, broadcast, disk"):
        LoraSync.connect(adapter, hosted, strategy="in_process")
    with pytest.raises(UnsupportedCapability, match="'delta'"):
        LoraSync.connect(adapter, hosted, strategy="delta")


@pytest.mark.parametrize("settings", [{}, {"alpha_pattern": {"q_proj": 16}, "rank_pattern": {"v_proj": 2}}], ids=str)
def test_an_engine_gets_the_same_adapter_from_tensors_as_from_a_folder(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    shapes = {name: tuple(one.shape) for name, one in base.state_dict().items()}
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)  # type: ignore[arg-type]
    policy = get_peft_model(base, config)
    assert isinstance(policy, PeftModel)
    policy.save_pretrained(str(tmp_path))
    fused = {"q_proj": ("k_proj", "v_proj"), "v_proj": ("q_proj", "k_proj")}
    plain, adapter = PlainAdapters(8, fused), PeftAdapter(policy, "default")
    folder = Path(plain.folder_for("a", str(tmp_path), shapes))
    given = GivenAdapter("the adapter 'a'", "lora", adapter.config, adapter.tensors, {})
    fields, tensors = plain_tensors(given, 8, fused, [shapes], AdapterChecks())
    written = load_file(folder / "adapter_model.safetensors")
    assert tensors.keys() == written.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in written.items())
    assert fields == json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    plain.close()


def test_a_policys_adapter_is_read_as_it_is_at_each_push() -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    policy = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    assert isinstance(policy, PeftModel)
    adapter = PeftAdapter(policy, "default")
    first = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    assert {name.rpartition(".lora_")[2] for name in first} == {"A.weight", "B.weight", "embedding_A", "embedding_B"}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
    assert all(torch.equal(tensor, first[name] + 1) for name, tensor in adapter.tensors.items())
    for name, layer in policy.named_modules():  # a loader may replace parameters
        if name.endswith("lora_B.default"):
            cast(nn.Linear, layer).weight = nn.Parameter(torch.zeros_like(cast(nn.Linear, layer).weight))
    assert all(not tensor.any() for name, tensor in adapter.tensors.items() if name.endswith("lora_B.weight"))
    policy.delete_adapter("default")
    policy.add_adapter("default", LoraConfig(r=2, target_modules=["q_proj"]))
    again = adapter.tensors
    assert {len(tensor) for name, tensor in again.items() if "lora_A" in name} == {2}
    assert not any("embedding" in name for name in again)
