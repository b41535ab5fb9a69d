"""A peft policy is pushed with its adapters merged, whether they were merged in place or are merged in copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.weight_sync.adapted_policies import SETTINGS, adapted, bits, model
from tests.weight_sync.receiver_engines import InlineEngine

from drivetrain.errors import InvalidWeights, WeightPlanMismatch, WeightSyncError
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync import WeightSync
from drivetrain_weight_sync.copying.plan import check_plan
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.trainer.source import Source, by_name


def pushed(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return by_name(Source(module).pairs())


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_merged_in_place_has_its_checkpoint_names(whole: bool) -> None:
    peft = adapted()
    peft.merge_adapter()  # type: ignore[operator]
    found = pushed(peft if whole else peft.get_base_model())  # type: ignore[operator]
    wanted = adapted().merge_and_unload().state_dict()  # type: ignore[operator]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_module_that_is_saved_with_the_adapter_is_pushed_as_it_was_trained() -> None:
    peft = adapted(modules_to_save=["lm_head"])
    peft.merge_adapter()  # type: ignore[operator]
    found = pushed(peft)
    wanted = adapted(modules_to_save=["lm_head"]).merge_and_unload().state_dict()  # type: ignore[operator]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


STRATEGIES = ["in_process", "shared_memory", "broadcast", "disk", "delta"]


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_is_merged_in_copies_and_the_policy_keeps_every_bit(kind: str) -> None:
    peft = adapted(**SETTINGS[kind])
    before, texts = bits(peft), {name: repr(vars(part)) for name, part in peft.named_modules()}
    found = {
        name: value.compute() if isinstance(value, DerivedTensor) else value.detach()
        for name, value in Source(peft).pairs()
    }
    wanted = pushed(adapted(**SETTINGS[kind]).merge_and_unload())  # type: ignore[operator]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    base = pushed(model(SETTINGS[kind].get("architecture", "qwen2")))
    assert any(not torch.equal(found[name], tensor) for name, tensor in base.items())
    assert bits(peft) == before
    assert {name: repr(vars(part)) for name, part in peft.named_modules()} == texts


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_is_merged_in_copies_equals_a_fresh_load_by_every_strategy(strategy: str) -> None:
    peft, served = adapted(use_dora=True, modules_to_save=["lm_head"]), model()
    engine = InlineEngine(served)
    before = bits(peft)
    async with WeightSync.connect(peft, engine, strategy, bucket_bytes=8192) as sync:
        await sync.push(version="step-1")
        first = bits(served)
        assert first == bits(adapted(use_dora=True, modules_to_save=["lm_head"]).merge_and_unload())  # type: ignore[operator]
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(2)
        changed = bits(peft)
        await sync.push(version="step-2")
    assert bits(served) != first
    assert bits(peft) == changed != before
    assert bits(served) == bits(peft.merge_and_unload())  # type: ignore[operator]


async def test_layers_merged_in_place_and_in_copies_take_turns() -> None:
    peft, served = adapted(), model()
    async with WeightSync.connect(peft, InlineEngine(served), "in_process") as sync:
        for merged in (True, False, True):
            if merged:
                peft.merge_adapter()  # type: ignore[operator]
            served.get_parameter("lm_head.weight").data.zero_()
            await sync.push(version="step")
            assert bits(served) == bits(adapted().merge_and_unload())  # type: ignore[operator]
            if merged:
                peft.unmerge_adapter()  # type: ignore[operator]
            peft.load_state_dict(adapted().state_dict())  # unmerging rounds


def test_two_adapters_of_which_one_is_merged_are_both_merged() -> None:
    def both() -> torch.nn.Module:
        peft = adapted()
        peft.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[operator]
        torch.manual_seed(3)
        for name, parameter in peft.named_parameters():
            if "second" in name:
                torch.nn.init.normal_(parameter)
        peft.base_model.set_adapter(["default", "second"])  # type: ignore[union-attr, operator]
        return peft

    peft = both()
    peft.merge_adapter(["default"])  # type: ignore[operator]
    found = dict(Source(peft).pairs())["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(found, DerivedTensor)
    wanted = both().merge_and_unload().state_dict()  # type: ignore[operator]
    assert torch.equal(found.compute(), wanted["model.layers.0.self_attn.q_proj.weight"])


def test_a_tied_head_that_has_an_adapter_of_its_own_is_not_the_embedding() -> None:
    """The two share memory; merging the one must not change the other."""
    torch.manual_seed(0)
    tied = model()
    tied.get_submodule("lm_head").weight = tied.get_parameter("model.embed_tokens.weight")
    peft = get_peft_model(tied, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    pairs = dict(Source(peft).pairs())
    assert isinstance(pairs["lm_head.weight"], DerivedTensor)
    assert isinstance(pairs["model.embed_tokens.weight"], torch.Tensor)


async def test_a_hook_that_holds_the_model_is_not_copied_with_a_layer() -> None:
    class Watcher:
        def __deepcopy__(self, memo: dict[int, object]) -> Watcher:
            raise AssertionError("the hook's owner was copied")

        def see(self, *_: object) -> None: ...

    peft = adapted()
    for part in peft.modules():
        part.register_forward_hook(Watcher().see)
    values = [value.compute() for _, value in Source(peft).pairs() if isinstance(value, DerivedTensor)]
    assert values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda peft: peft.base_model.disable_adapter_layers(), "are disabled.*Enable them"),
        (
            lambda peft: (
                peft.add_adapter("b", LoraConfig(target_modules=["q_proj"], r=2)),
                peft.merge_adapter(["b"]),
            ),
            r"\['b'\] of .* are merged and \['default'\] are active",
        ),
    ],
    ids=["disabled", "others merged"],
)
def test_what_cannot_be_merged_is_refused_with_the_remedy(change: Callable[[Any], object], message: str) -> None:
    peft = adapted()
    change(peft)
    with pytest.raises(WeightSyncError, match=message):
        Source(peft).pairs()


async def test_an_adapter_that_peft_cannot_merge_is_refused_and_the_engine_serves_on() -> None:
    torch.manual_seed(0)
    peft = get_peft_model(model(), LoraConfig(r=2, target_modules=["o_proj"], lora_bias=True))  # o_proj has no bias
    served = model()
    before = bits(served)
    engine = InlineEngine(served)
    async with WeightSync.connect(peft, engine, "in_process") as sync:
        with pytest.raises(WeightSyncError, match=r"peft cannot merge the adapters of .*o_proj.*LoraSync"):
            await sync.push(version="step-1")
    assert bits(served) == before
    assert engine.version != "step-1"


async def test_a_merged_value_that_is_not_finite_is_refused_by_name() -> None:
    peft, served = adapted(), model()
    peft.get_parameter("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight").data[0, 0] = float("nan")
    async with WeightSync.connect(peft, InlineEngine(served), "shared_memory") as sync:
        with pytest.raises(InvalidWeights, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
            await sync.push(version="step-1")


def test_a_state_dict_of_a_peft_model_is_refused_in_words_that_fit() -> None:
    peft = adapted()
    peft.merge_adapter()  # type: ignore[operator]
    manifest = WeightManifest(tuple(spec_of(name, tensor) for name, tensor in model().state_dict().items()))
    with pytest.raises(WeightPlanMismatch, match="pass the peft model itself"):
        check_plan([spec_of(name, tensor) for name, tensor in peft.state_dict().items()], manifest)


def test_a_mapping_without_the_adapters_own_needs_no_renaming() -> None:
    peft = adapted()
    peft.merge_adapter()  # type: ignore[operator]
    source = {name: tensor for name, tensor in peft.state_dict().items() if "lora_" not in name}
    assert by_name(Source(source).pairs()).keys() == model().state_dict().keys()
