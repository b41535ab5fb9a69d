"""A model with adapters that peft merged in place is pushed with the merged weights."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain.errors import WeightPlanMismatch, WeightSyncError
from drivetrain.testing import tiny_model
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.copying.plan import check_plan
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.trainer.source import Source, by_name


def model() -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model())
    return made


def adapted(**fields: object) -> torch.nn.Module:
    torch.manual_seed(0)
    peft = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **fields))  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return peft


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


def test_an_adapter_that_is_not_merged_is_refused_with_the_remedy() -> None:
    with pytest.raises(WeightSyncError, match=r"self_attn\.q_proj.*not merged.*merge_adapter\(\)"):
        pushed(adapted())


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
