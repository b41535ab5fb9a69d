# pyright: reportMissingImports=false
"""Keep weights in the layout and under the names of the checkpoint, where vLLM would pack or rename them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn import functional


def register() -> None:
    """On a CPU, keep weights as plain torch tensors: packed ones cannot be read, updated or put to sleep."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    ops._supports_onednn = False
    if hasattr(cpu_moe, "CPUUnquantizedExperts"):
        cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = _note_routing
        takes_output = next(iter(inspect.signature(cpu_moe.cpu_fused_moe).parameters)) == "out"
        cpu_moe.cpu_fused_moe = _mix_into if takes_output else _mix
    else:  # older releases, which have a plain torch implementation
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe

        cpu_fused_moe.CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm = _leave
        cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = _by_torch
        cpu_fused_moe.SGLFusedMOE = cpu_fused_moe.CPUFusedMOE


def _leave(experts: Any, layer: torch.nn.Module) -> None:
    pass


def _by_torch(experts: Any, layer: torch.nn.Module) -> tuple[bool, str]:
    return False, "none"


def _note_routing(experts: Any, layer: torch.nn.Module) -> None:
    """Copy the routing settings, as the replaced method does before it packs weights: some kernels route themselves."""
    for name in ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function"):
        if hasattr(experts, name):
            setattr(experts, name, getattr(layer, name))


def _mix(
    states: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
    _: str,
    weighted_before: bool = False,
) -> torch.Tensor:
    """Return the sum of the chosen experts' outputs, weighted here unless their inputs were weighted already."""
    gate = _GATES[activation]
    output = torch.zeros_like(states)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, choices = torch.where(chosen == expert)
        made = functional.linear(states[tokens], gate_up[expert], _row(gate_up_bias, expert))
        gated, up = made.chunk(2, dim=-1)
        made = functional.linear(gate(gated) * up, down[expert], _row(down_bias, expert))
        if not weighted_before:
            made = made * weights[tokens, choices, None].to(made.dtype)
        output.index_add_(0, tokens, made)
    return output


def _mix_into(output: torch.Tensor, *given: Any) -> None:
    output.copy_(_mix(*given))


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
    """Within the context, put base layers into the places of their LoRA wrappers, as vLLM's loaders expect."""
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
