# pyright: reportMissingImports=false
"""Weights as they are in a checkpoint, where vLLM would pack or name them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn import functional


def register() -> None:
    """On a CPU, leave weights to plain torch: packed ones cannot be read, updated or put to sleep."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    ops._supports_onednn = False
    if hasattr(cpu_moe, "CPUUnquantizedExperts"):
        cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = _leave
        cpu_moe.CPUUnquantizedExperts.apply = _apply_experts
    else:  # older releases, which have a way through plain torch
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe

        cpu_fused_moe.CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm = _leave
        cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = _by_torch
        cpu_fused_moe.SGLFusedMOE = cpu_fused_moe.CPUFusedMOE


def _leave(experts: Any, layer: torch.nn.Module) -> None:
    pass


def _by_torch(experts: Any, layer: torch.nn.Module) -> tuple[bool, str]:
    return False, "none"


def _apply_experts(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    *_: object,
    **__: object,
) -> None:
    """The sum of the chosen experts' outputs; ``w1`` holds gate and up projection, in this order."""
    gate = _GATES[activation.value]
    output.zero_()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        tokens, choices = torch.where(topk_ids == expert)
        states = functional.linear(hidden_states[tokens], w1[expert], _row(experts.w1_bias, expert))
        gated, up = states.chunk(2, dim=-1)
        states = functional.linear(gate(gated) * up, w2[expert], _row(experts.w2_bias, expert))
        output.index_add_(0, tokens, states * topk_weights[tokens, choices, None].to(states.dtype))


def _gelu_tanh(states: torch.Tensor) -> torch.Tensor:
    return functional.gelu(states, approximate="tanh")


_GATES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """The model as vLLM's loaders know it: layers that LoRA wraps are in the places of their wrappers."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped: list[tuple[torch.nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
