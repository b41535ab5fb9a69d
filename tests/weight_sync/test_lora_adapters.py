"""LoRA adapters are checked before an engine gets them."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from drivetrain import EngineConfig, InvalidRequest, WeightSyncError, WeightUpdateRequest, create_engine
from drivetrain.errors import EngineInternalError
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import LoraSync
from drivetrain_weight_sync.receiver.adaptable_layers import shapes_in_language_model
from drivetrain_weight_sync.receiver.lora_adapters import (
    AdapterChecks,
    LoraAdapter,
    adapter_in,
    check_adapter,
)
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters

SHAPES = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in [("attn.q_proj", (8, 6)), ("attn.k_proj", (4, 6)), ("attn.v_proj", (4, 6)), ("mlp.up", (3, 6))]
} | {"model.embed.weight": (20, 6)}

Change = Callable[[dict[str, object], dict[str, torch.Tensor]], object]


def written(folder: Path, change: Change = lambda config, tensors: None, modules: tuple[str, ...] = ("q_proj",)) -> str:
    """Write an adapter of ``SHAPES`` after ``change`` has modified its configuration and tensors."""
    config: dict[str, object] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(modules)}
    tensors = {}
    for name, (outputs, inputs) in SHAPES.items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, inputs)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, 2)
    change(config, tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def added(adapter: LoraAdapter) -> dict[str, torch.Tensor]:
    """Return the product that an adapter adds to each layer's weight."""
    return {name: module.scale * module.b @ module.a for name, module in adapter.modules.items()}


def fields(**values: object) -> Change:
    return lambda config, tensors: config.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fields(peft_type="IA3"), "type 'IA3'"),
        (fields(init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4'"),
        (fields(init_lora_weights="olora"), "path_initial_model_for_weight_conversion"),
        (fields(bias="all"), "train with bias='none'"),
        (fields(modules_to_save=["norm"]), "modules_to_save"),
        (fields(trainable_token_indices=[3]), "trainable_token_indices"),
        (fields(layer_replication=[[0, 1]]), "layer_replication"),
        (fields(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (fields(use_dora=True), "use_dora"),
        (fields(lora_bias=True), "lora_bias"),
        (fields(target_parameters=["experts.down_proj"]), "target_parameters.*stacked experts"),
        (fields(a_field_of_the_future={"x": 1}), "a_field_of_the_future"),
        (fields(r=0), "r=0"),
        (fields(r=4), r"is \[2, 6\], where rank 4"),
        (fields(lora_alpha=float("inf")), "lora_alpha=inf"),
        (fields(rank_pattern={"q_proj": -1}), "rank_pattern"),
        (fields(alpha_pattern={"q_proj": "x"}), "alpha_pattern"),
        (fields(alpha_pattern={"(": 4}), "not a valid regex"),
        (fields(target_modules=["q_proj", "k_proj"]), "no tensors for model.layers.0.attn.k_proj"),
        (fields(layers_to_transform=[1]), "tensors for model.layers.0.attn.q_proj"),
        (lambda config, tensors: tensors.pop(list(tensors)[-1]), "lora_A of .* without its lora_B"),
        (lambda config, tensors: [tensors.pop(name) for name in list(tensors)[-2:]], "no tensors for model.layers.1"),
        (lambda config, tensors: next(iter(tensors.values()))[0].fill_(torch.nan), r"lora_A.weight \(NaN\)"),
        (
            lambda config, tensors: tensors.update({"model.layers.9.q_proj.lora_A.weight": torch.zeros(2, 6)}),
            r"the model has no layer model\.layers\.9",
        ),
        (lambda config, tensors: tensors.update({"model.embed.weight": torch.zeros(20, 6)}), "save_embedding_layers"),
        (lambda config, tensors: tensors.clear(), "no tensors of an adapter"),
    ],
)
def test_what_an_engine_would_serve_otherwise_than_peft_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_adapter(adapter_in(written(tmp_path, change)), 8, SHAPES)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_adapter(adapter_in(str(tmp_path)), 8, {})
    path = written(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_adapter(adapter_in(path), 8, SHAPES)


def test_what_peft_writes_of_its_own_is_taken(tmp_path: Path) -> None:
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    defaults = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    adapter = check_adapter(adapter_in(written(tmp_path, lambda config, tensors: config.update(defaults))), 8, SHAPES)
    assert not adapter.unusual
    assert set(adapter.modules) == {f"model.layers.{layer}.attn.q_proj" for layer in range(2)}


def test_a_rank_by_pattern_counts_too(tmp_path: Path) -> None:
    def larger(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        config["rank_pattern"] = {"layers.1.attn.q_proj": 16}
        tensors["base_model.model.model.layers.1.attn.q_proj.lora_A.weight"] = torch.randn(16, 6)
        tensors["base_model.model.model.layers.1.attn.q_proj.lora_B.weight"] = torch.randn(8, 16)

    with pytest.raises(InvalidRequest, match=r"rank 16 at model\.layers\.1\.attn\.q_proj, more than max_lora_rank=8"):
        check_adapter(adapter_in(written(tmp_path, larger)), 8, SHAPES)


def test_module_names_are_read_off_the_tensors(tmp_path: Path) -> None:
    path = written(tmp_path, lambda config, tensors: config.pop("target_modules"))
    plain = PlainAdapters(8)
    folder = Path(plain.folder_for("a", path, SHAPES))
    assert json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"] == [
        f"model.layers.{layer}.attn.q_proj" for layer in range(2)
    ]
    plain.remove("a")
    assert not folder.exists()


def test_a_plain_adapter_is_served_from_its_own_folder(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert PlainAdapters(8).folder_for("a", path, SHAPES) == path


def test_an_engine_is_given_whole_fused_layers(tmp_path: Path) -> None:
    path, needs = written(tmp_path, modules=("v_proj",)), {"v_proj": ("q_proj",)}
    plain = PlainAdapters(8, needs)
    tensors = load_file(Path(plain.folder_for("a", path, SHAPES)) / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.attn.q_proj.lora_B.weight"].shape == (8, 2)
    assert not tensors["base_model.model.model.layers.0.attn.q_proj.lora_B.weight"].any()
    assert not any("k_proj" in name for name in tensors)
    assert tensors["base_model.model.model.layers.0.attn.v_proj.lora_B.weight"].any()
    plain.close()
    with pytest.raises(InvalidRequest, match=r"no tensors for model\.layers\.0\.attn\.q_proj"):
        PlainAdapters(8, needs, writes=False).folder_for("a", path, SHAPES)


@pytest.mark.parametrize(
    "kind",
    [
        {"use_rslora": True},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 64}},
        {"use_rslora": True, "rank_pattern": {"v_proj": 8}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": r".*\.1\..*\.(q|up)_proj"},
    ],
    ids=str,
)
def test_what_is_written_for_an_engine_adds_the_same(tmp_path: Path, kind: dict[str, object]) -> None:
    model = tiny_model("qwen2")
    given: dict[str, object] = {"r": 4, "target_modules": ["q_proj", "v_proj"], **kind}
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**given))  # type: ignore[arg-type]
    shapes = {name: tuple(one.shape) for name, one in AutoModelForCausalLM.from_pretrained(model).named_parameters()}
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    policy.save_pretrained(str(tmp_path))
    adapter = check_adapter(adapter_in(str(tmp_path)), 8, shapes)
    expected = added(adapter)
    plain = PlainAdapters(8)
    folder = plain.folder_for("a", str(tmp_path), shapes)
    again = check_adapter(adapter_in(folder), 8, shapes)
    assert folder != str(tmp_path)
    assert not again.unusual
    torch.testing.assert_close(added(again), expected)
    # The oracle is peft's own merge.
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path).merge_and_unload()
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, weight in merged.state_dict().items():
        product = expected.get(name.removesuffix(".weight"), torch.zeros(()))
        torch.testing.assert_close(weight, base[name] + product, rtol=1e-5, atol=1e-5)
    plain.close()


async def test_a_push_of_an_adapter_for_which_there_is_no_room_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def update_named_weights(request: WeightUpdateRequest) -> None:
        asked.append(request)

    asked: list[WeightUpdateRequest] = []
    engine = create_engine("transformers", model=str(tiny_model("qwen2")), enable_lora=True)
    monkeypatch.setattr(engine, "update_named_weights", update_named_weights)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")), LoraConfig(r=4))
    assert isinstance(model, PeftModel)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with LoraSync.connect(model, engine, strategy="disk", directory=tmp_path) as sync:
        for most in (0, 3000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            try:
                with pytest.raises(WeightSyncError, match=r"cannot be written to .*nothing was changed\. Make room"):
                    await sync.push(version="step-1")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert not asked
            assert not os.listdir(tmp_path)
        await sync.push(version="step-1")
    assert len(asked) == 1


@pytest.mark.parametrize("most", [0, 300])
def test_an_adapter_that_cannot_be_rewritten_leaves_the_one_before(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (room := tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    path = written(tmp_path / "adapter", fields(alpha_pattern={"0.attn.q_proj": 3}))
    plain = PlainAdapters(8)
    before = plain.folder_for("a", path, SHAPES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(EngineInternalError, match=r"no room for it: .*make room in .*room.*TMPDIR"):
            plain.folder_for("a", path, SHAPES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(room) == [Path(before).name]
    assert load_file(Path(before) / "adapter_model.safetensors")
    plain.close()
    assert not os.listdir(room)


@pytest.mark.parametrize(("field", "value"), [("engine", 5), ("adapter", {}), ("lora_name", ""), ("directory", 5)])
def test_each_argument_of_lora_sync_is_checked_by_name(field: str, value: object) -> None:
    model = SimpleNamespace(peft_config={"default": LoraConfig()})
    given = {"model": model, "engine": None, field: value}
    with pytest.raises(InvalidRequest, match=f"{field}=") as caught:
        LoraSync.connect(**given)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl"])
def test_a_vision_models_adapter_may_have_the_names_of_its_checkpoint_or_those_in_memory(
    tmp_path: Path, architecture: str
) -> None:
    model = str(tiny_model(architecture))
    stored, in_memory = shapes_in_language_model(EngineConfig(backend="any", model=model))
    assert len(stored) == len(in_memory)
    assert "model.layers.0.self_attn.q_proj.weight" in stored
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in in_memory
    base = AutoModelForImageTextToText.from_pretrained(model)
    policy = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    policy.save_pretrained(str(tmp_path / "ours"))
    plain = PlainAdapters(8)
    assert plain.folder_for("a", str(tmp_path / "ours"), stored, in_memory) == str(tmp_path / "ours")

    tensors = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    older = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
    save_file(older, tmp_path / "ours" / "adapter_model.safetensors")
    assert plain.folder_for("a", str(tmp_path / "ours"), stored, in_memory) == str(tmp_path / "ours")


@pytest.mark.parametrize("targets", [r".*visual.*\.qkv", ["q_proj", "qkv"]], ids=str)
def test_an_adapter_of_vision_layers_is_refused(tmp_path: Path, targets: str | list[str]) -> None:
    model = str(tiny_model("qwen2_5_vl"))
    base = AutoModelForImageTextToText.from_pretrained(model)
    get_peft_model(base, LoraConfig(r=4, target_modules=targets)).save_pretrained(str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"no layer model\.visual\.blocks\.0\.attn\.qkv .* its language model's"):
        PlainAdapters(8).folder_for(
            "a", str(tmp_path), *shapes_in_language_model(EngineConfig(backend="any", model=model))
        )


def test_an_adapter_of_a_form_that_passed_is_checked_again_if_anything_differs(tmp_path: Path) -> None:
    checks = AdapterChecks()
    first = adapter_in(written(tmp_path, modules=("q_proj", "up")))
    assert (
        added(checks.check(first, 4, SHAPES)).keys()
        == added(check_adapter(adapter_in(str(tmp_path)), 4, SHAPES)).keys()
    )
    second = replace(first, tensors={name: tensor + 1 for name, tensor in first.tensors.items()})
    again = checks.check(second, 4, SHAPES)
    assert again.given is second
    wanted = check_adapter(second, 4, SHAPES)
    assert (again.rank, again.scale, again.unusual) == (wanted.rank, wanted.scale, wanted.unusual)
    assert all(torch.equal(tensor, added(wanted)[name]) for name, tensor in added(again).items())
    name = next(iter(first.tensors))
    refused = [
        (replace(second, non_finite={name: "NaN"}), 4, SHAPES),
        (replace(second, tensors={**second.tensors, name: torch.zeros(3, 6)}), 4, SHAPES),
        (replace(second, tensors={key: one for key, one in second.tensors.items() if key != name}), 4, SHAPES),
        (replace(second, config={**first.config, "bias": "all"}), 4, SHAPES),
        (second, 1, SHAPES),
        (second, 4, {**SHAPES, "model.layers.0.attn.q_proj.weight": (8, 7)}),
    ]
    for given, largest, shapes in refused:
        with pytest.raises(InvalidRequest):
            checks.check(given, largest, shapes)
    assert checks.check(second, 4, SHAPES).rank == 2


def test_a_base_weight_beside_an_adapter_is_compared_at_each_push(tmp_path: Path) -> None:
    def add_embedding(_: object, tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.model.embed.weight"] = torch.ones(20, 6)

    checks, given = AdapterChecks(), adapter_in(written(tmp_path, add_embedding))
    checks.check(given, 4, SHAPES, base=lambda _: torch.ones(20, 6))
    with pytest.raises(InvalidRequest, match="a weight of the model beside the adapter"):
        checks.check(given, 4, SHAPES, base=lambda _: torch.zeros(20, 6))
