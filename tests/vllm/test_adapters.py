"""Layers of an adapter that vLLM would skip when it comes from memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain_vllm.in_engine.adapters import require_layers

MANAGER = SimpleNamespace(
    supported_lora_modules=["qkv_proj", "o_proj", "experts"],
    packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"], "experts": ["experts.0.up_proj"]},
)


def test_layers_that_vllm_adapts_are_taken() -> None:
    names = ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.0.up_proj", "mlp.experts")
    require_layers(MANAGER, [f"model.layers.0.{name}" for name in (*names, "mlp.experts.base_layer")])


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.experts.1.up_proj"])
def test_other_layers_are_refused_by_name(layer: str) -> None:
    with pytest.raises(ValueError, match=rf"changes {layer}, but vLLM adapts only .*q_proj.*train without"):
        require_layers(MANAGER, ["model.layers.0.self_attn.q_proj", layer])
