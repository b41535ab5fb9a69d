"""LoRA adapters chosen per request, compared with peft's own model."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import oracle
from drivetrain import (
    Completion,
    DeadlineExceeded,
    InferenceEngine,
    InvalidRequest,
    InvalidWeights,
    LoraSource,
    SamplingParams,
    WeightSyncError,
    WeightUpdateRequest,
    create_engine,
)
from drivetrain.testing import tiny_model
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_transformers import TransformersBackend
from drivetrain_transformers.lora import adaptable_shapes
from drivetrain_weight_sync import AdapterTensors, LoraSync, WeightSync
from drivetrain_weight_sync.receiver import received_adapters
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMS = SamplingParams(max_new_tokens=20, logprobs=0, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters with different targets and ranks, both with a noticeable effect."""
    folders: dict[str, Path] = {}
    for seed, (name, targets, rank) in enumerate([("a", ["q_proj", "down_proj"], 4), ("b", ["v_proj", "lm_head"], 8)]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        with torch.no_grad():
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(std=0.3)
        folders[name] = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(str(folders[name]))
    return folders


def folders_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def with_adapter(model: Path, folder: Path | None) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(model)
    return (PeftModel.from_pretrained(base, folder) if folder else base).eval()  # type: ignore[return-value]


def assert_made_by(reference: PreTrainedModel, completion: Completion) -> None:
    expected = oracle.logprobs_of(reference, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-4)


def module_of(engine: InferenceEngine) -> nn.Module:
    backend = engine.parts.backend
    assert isinstance(backend, TransformersBackend)
    return backend.runner.model.module


def of_adapters(engine: InferenceEngine) -> dict[str, int]:
    """Return the bytes of each parameter that belongs to a slot for adapters."""
    return {name: one.nbytes for name, one in module_of(engine).named_parameters() if "slot-" in name}


def slots(parameters: Iterable[str]) -> set[str]:
    return {name.rpartition("slot-")[2].partition(".")[0] for name in parameters}


@pytest.mark.parametrize("architecture", ["opt", "qwen2_moe"])
async def test_models_that_join_rows_for_their_mlp_take_adapters_of_it(
    open_engine: OpenEngine, tmp_path: Path, architecture: str
) -> None:
    joined = tiny_model(architecture)
    folders: dict[str | None, Path | None] = {None: None, "a": tmp_path / "a", "b": tmp_path / "b"}
    prompts = {None: "short", "a": "a prompt that is longer than those of the others", "b": "the third one"}
    async with open_engine(enable_lora=True, model=str(joined)) as engine:
        for seed, (name, folder) in enumerate(folders.items()):
            if name is not None and folder is not None:
                torch.manual_seed(seed)
                config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
                get_peft_model(AutoModelForCausalLM.from_pretrained(joined), config).save_pretrained(str(folder))
                await engine.load_lora_adapter(name, str(folder))
        asked = [engine.generate(prompts[name], PARAMS, lora=name) for name in folders]
        for folder, output in zip(folders.values(), await asyncio.gather(*asked), strict=True):
            for completion in output.completions:
                assert_made_by(with_adapter(joined, folder), completion)
        for name in ("a", "b"):
            await engine.unload_lora_adapter(name)
        assert_made_by(with_adapter(joined, None), (await engine.generate("x", PARAMS)).completions[0])


async def test_a_layer_of_one_expert_is_not_adapted_per_row() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Linear(2, 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Expert(), Expert()])
            self.shared_expert = Expert()

    assert list(adaptable_shapes(Block())) == ["shared_expert.up_proj.weight"]


def tensors_of(folder: Path) -> AdapterTensors:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return AdapterTensors(config, load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("strategy", ["auto", "shared_memory", "broadcast", "disk"])
async def test_a_trainer_pushes_its_adapter_after_every_step(
    open_engine: OpenEngine, model: Path, tmp_path: Path, strategy: str
) -> None:
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj"]))
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    lora_b = next(p for name, p in policy.named_parameters() if "lora_B" in name)
    async with open_engine(enable_lora=True, max_loras=1) as engine:
        base = await engine.generate("x", greedy)
        async with LoraSync.connect(policy, engine, strategy=strategy, directory=tmp_path) as sync:
            for step in range(3):
                with torch.no_grad():
                    lora_b.copy_(torch.randn(lora_b.shape, generator=torch.Generator().manual_seed(step)))
                result = await sync.push(version=f"step-{step}")
                assert result.version == engine.get_weight_version() == f"step-{step}"
                assert result.tensors > 0
                assert 0 < result.update_seconds < result.total_seconds
                assert len(folders_in(tmp_path)) == (strategy == "disk")
                output = await engine.generate("x", PARAMS, lora="policy")
                assert_made_by(policy.eval(), output.completions[0])  # type: ignore[arg-type]
                assert (await engine.generate("x", greedy)).completions[0].token_ids == base.completions[0].token_ids
            with torch.no_grad():
                lora_b[0, 0] = torch.nan
            with pytest.raises(InvalidWeights, match="lora_B"):
                await sync.push(version="step-3")
            with pytest.raises(InvalidRequest, match="version"):
                await sync.push(version="")
        assert not folders_in(tmp_path)
        with pytest.raises(WeightSyncError, match="closed"):
            await sync.push(version="step-4")
        assert engine.get_weight_version() == "step-2"
        output = await engine.generate("x", PARAMS, lora="policy")
        assert output.completions[0].weight_version == "step-2"


async def test_an_adapter_is_no_update_of_all_weights(open_engine: OpenEngine, adapters: dict[str, Path]) -> None:
    async with open_engine(enable_lora=True) as engine:
        request = WeightUpdateRequest(version="v", source=LoraSource(lora_name="a", path=str(adapters["a"])))
        with pytest.raises(InvalidRequest, match="update_named_weights"):
            await engine.prepare_weight_update(request)
        with pytest.raises(InvalidRequest, match="update_named_weights"):
            async with engine.weight_update(request):
                pass
        with pytest.raises(ValueError, match="no keep_prefix_cache"):
            WeightUpdateRequest(version="v", source=request.source, keep_prefix_cache=True)


async def test_a_model_without_the_adapter_is_refused(model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(InvalidRequest, match="no adapter 'default'; it has: none"):
        LoraSync.connect(plain, None)
    policy = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(InvalidRequest, match="no adapter 'critic'; it has: default"):
        LoraSync.connect(policy, None, adapter="critic")


@pytest.mark.parametrize("strategy", ["auto", "disk"])
async def test_a_refused_adapter_changes_nothing_of_the_model(
    open_engine: OpenEngine, model: Path, tmp_path: Path, strategy: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    async with open_engine(enable_lora=True) as engine:
        refused: list[dict[str, object]] = [
            {"init_lora_weights": "pissa"},
            {"bias": "all"},
            {"modules_to_save": ["lm_head"]},
            {"trainable_token_indices": [5]},
        ]
        for fields in refused:
            own = AutoModelForCausalLM.from_pretrained(model)
            policy = get_peft_model(own, LoraConfig(r=4, target_modules=["q_proj"], **fields))  # type: ignore[arg-type]
            async with LoraSync.connect(policy, engine, strategy=strategy, directory=tmp_path) as sync:
                with pytest.raises(InvalidRequest, match=next(iter(fields))):
                    await sync.push(version="v")
        assert_made_by(base.eval(), (await engine.generate("x", PARAMS)).completions[0])
        async with WeightSync.connect(base, engine) as full:
            await full.push(version="full")


@pytest.mark.parametrize("strategy", ["auto", "disk"])
async def test_an_adapter_is_computed_as_peft_computes_it(
    open_engine: OpenEngine, model: Path, tmp_path: Path, strategy: str
) -> None:
    kinds: list[dict[str, object]] = [
        {"use_rslora": True, "lora_bias": True},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 64}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ]
    async with open_engine(enable_lora=True) as engine:
        for number, fields in enumerate(kinds):
            own = AutoModelForCausalLM.from_pretrained(model)
            given = {"r": 4, "target_modules": ["q_proj", "v_proj"], **fields}
            policy = get_peft_model(own, LoraConfig(**given))  # type: ignore[arg-type]
            torch.manual_seed(number)
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.3)
            policy.save_pretrained(str(tmp_path / str(number)))
            await engine.load_lora_adapter("a", str(tmp_path / str(number)))
            output = await engine.generate("x", PARAMS, lora="a")
            assert_made_by(policy.eval(), output.completions[0])  # type: ignore[arg-type]
            await engine.unload_lora_adapter("a")
        assert_made_by(oracle.load(model), (await engine.generate("x", PARAMS)).completions[0])


@pytest.mark.parametrize("stuck", ["while it is received", "once it is loaded"])
async def test_a_push_that_reached_its_deadline_leaves_the_old_adapter_and_can_be_repeated(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    async with open_engine(enable_lora=True, max_loras=1, timeouts={"control": 2}, isolation="inline") as engine:
        backend, next_one_came = engine.parts.backend, threading.Event()
        load, looked = backend.load_lora_tensors, received_adapters.ReceivedAdapter.looked
        calls = itertools.count()

        async def slow_load(lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
            await load(lora_name, update, pinned)
            await asyncio.sleep(60)

        def slow_look(received: received_adapters.ReceivedAdapter) -> tuple[dict[str, int], dict[str, str]]:
            if next(calls) == 0:
                next_one_came.wait(60)
            else:  # the first one goes on while the second is received
                next_one_came.set()
                time.sleep(0.5)
            return looked(received)

        first, late = tensors_of(adapters["a"]), tensors_of(adapters["b"])
        async with (
            LoraSync.connect(first, engine, "a", "in_process") as sync,
            LoraSync.connect(late, engine, "a", "in_process") as other,
        ):
            await sync.push(version="first")
            with monkeypatch.context() as patch:
                if stuck == "once it is loaded":
                    patch.setattr(backend, "load_lora_tensors", slow_load)
                else:
                    patch.setattr(received_adapters.ReceivedAdapter, "looked", slow_look)
                with pytest.raises(DeadlineExceeded):
                    await other.push(version="late")
                assert engine.get_weight_version() == "first"
                output = await engine.generate("x", PARAMS, lora="a")
                assert_made_by(with_adapter(model, adapters["a"]), output.completions[0])
                if stuck == "once it is loaded":
                    patch.undo()
                await other.push(version="again")
        output = await engine.generate("x", PARAMS, lora="a")
        assert_made_by(with_adapter(model, adapters["b"]), output.completions[0])
        in_use = [name for name, nbytes in of_adapters(engine).items() if nbytes]
        assert len(slots(in_use)) == 1


async def test_an_unloaded_adapter_frees_its_memory_and_leaves_room_for_the_next(
    open_engine: OpenEngine, adapters: dict[str, Path]
) -> None:
    plain = tensors_of(adapters["a"])
    doubled = {name: torch.cat([one, one], int("lora_B" in name)) for name, one in plain.tensors.items()}
    wide = AdapterTensors({**plain.config, "r": 8}, doubled)
    served = sum(one.nbytes for policy in (plain, wide) for one in policy.tensors.values())
    async with open_engine(enable_lora=True, isolation="inline") as engine:
        async with (
            LoraSync.connect(plain, engine, "plain") as sync,
            LoraSync.connect(wide, engine, "wide") as other,
        ):
            for step in range(4):
                await sync.push(version=f"plain-{step}")
                await other.push(version=f"wide-{step}")
                assert sum(of_adapters(engine).values()) == served
            assert len(slots(of_adapters(engine))) == 4, "two are served, and one of each form is free"
        for name in ("plain", "wide"):
            await engine.unload_lora_adapter(name)
        assert sum(of_adapters(engine).values()) == 0


async def test_a_load_can_be_asked_for_again_after_a_deadline_of_it_or_of_an_unload(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(enable_lora=True, max_loras=2, timeouts={"control": 2}, isolation="inline") as engine:
        backend = engine.parts.backend
        load, unload = backend.load_lora_adapter, backend.unload_lora_adapter

        async def slow_load(lora_name: str, lora_path: str, pinned: bool) -> None:
            await load(lora_name, lora_path, pinned)
            await asyncio.sleep(60)

        async def slow_unload(lora_name: str) -> None:
            await asyncio.sleep(60)
            await unload(lora_name)

        await engine.load_lora_adapter("a", str(adapters["a"]))
        monkeypatch.setattr(backend, "unload_lora_adapter", slow_unload)
        with pytest.raises(DeadlineExceeded):
            await engine.unload_lora_adapter("a")
        monkeypatch.setattr(backend, "unload_lora_adapter", unload)
        with pytest.raises(InvalidRequest, match="loaded: none"):  # it may be gone, so it is not served
            await engine.generate("x", PARAMS, lora="a")
        monkeypatch.setattr(backend, "load_lora_adapter", slow_load)
        with pytest.raises(DeadlineExceeded):
            await engine.load_lora_adapter("a", str(adapters["a"]))
        monkeypatch.setattr(backend, "load_lora_adapter", load)
        await engine.load_lora_adapter("a", str(adapters["b"]))
        output = await engine.generate("x", PARAMS, lora="a")
        assert_made_by(with_adapter(model, adapters["b"]), output.completions[0])
        await engine.unload_lora_adapter("a")
        with pytest.raises(InvalidRequest, match="loaded: none"):
            await engine.unload_lora_adapter("a")


async def test_an_adapter_that_peft_cannot_put_in_leaves_no_wrapper(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(adapters["a"] / "adapter_model.safetensors")
    vocabulary, width = oracle.load(model).state_dict()["model.embed_tokens.weight"].shape
    # An embedding must have lora_embedding_A and lora_embedding_B instead.
    tensors["base_model.model.model.embed_tokens.lora_A.weight"] = torch.zeros(4, width)
    tensors["base_model.model.model.embed_tokens.lora_B.weight"] = torch.zeros(vocabulary, 4)
    config = json.loads((adapters["a"] / "adapter_config.json").read_text(encoding="utf-8"))
    config["target_modules"] = [*config["target_modules"], "embed_tokens"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    async with open_engine(enable_lora=True, isolation="inline") as engine:
        module = module_of(engine)
        before = [name for name, _ in module.named_parameters()]
        with pytest.raises(InvalidRequest, match="peft cannot load"):
            await engine.load_lora_adapter("a", str(tmp_path))
        assert [name for name, _ in module.named_parameters()] == before
        await engine.load_lora_adapter("a", str(adapters["a"]))
        output = await engine.generate("x", PARAMS, lora="a")
        assert_made_by(with_adapter(model, adapters["a"]), output.completions[0])


async def test_modules_that_the_trainer_makes_meanwhile_are_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading an adapter in the trainer's process changes nothing that its other threads use."""
    from peft.tuners.lora import LoraLayer

    own, update_layer, seen = nn.Module.register_parameter, LoraLayer.update_layer, []

    def watched(*arguments: Any, **named: Any) -> None:
        seen.append(nn.Module.register_parameter)
        update_layer(*arguments, **named)

    monkeypatch.setattr(LoraLayer, "update_layer", watched)
    made = make_adapter(model, tmp_path, seed=1)
    async with create_engine("transformers", model=str(model), isolation="inline", enable_lora=True) as engine:
        await engine.load_lora_adapter("a", str(made.path))
    assert seen
    assert set(seen) == {own}
