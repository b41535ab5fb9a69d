"""Policies with adapters of peft that change every weight that they can change."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain.testing import tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "parameters of experts": {
        "architecture": "qwen3_moe",
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "o_proj.weight"],
    },
    "transposed parameters of experts": {
        "architecture": "gpt_oss",
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}


def model(architecture: str = "qwen2") -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model(architecture))
    return made


def adapted(architecture: str = "qwen2", *, tied: bool = False, **fields: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    base = model(architecture)
    if tied:
        base.get_submodule("lm_head").weight = base.get_parameter("model.embed_tokens.weight")
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"], **fields})
    peft = get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "tokens_delta")):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return peft


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in module.state_dict().items()}
