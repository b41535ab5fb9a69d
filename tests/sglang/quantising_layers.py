# pyright: reportMissingImports=false
"""Layers of SGLang's own, quantised by its own code, and filled again by an update; ``make conformance-quantised``.

Needs SGLang's environment. The kernels that need a GPU are replaced by their torch forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_torch_cpu_fp8
import torch
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin
from torch import nn

from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_sglang.in_engine import quantised_layers
from drivetrain_sglang.in_engine.worker import Worker
from drivetrain_weight_sync.tensors.block_quantisation import quantise_blocks
from drivetrain_weight_sync.tracing.derived_tensors import Derived
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

WIDTH, EXPERTS = 256, 3


class Layer(nn.Module):
    """A linear layer of two fused parts, or experts with three matrices each."""

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.quant_method = method
        self.num_local_experts = EXPERTS
        self.num_experts = EXPERTS
        self.intermediate_size_per_partition = WIDTH
        self.moe_tp_size = self.moe_ep_size = 1
        self.tp_group = SimpleNamespace(world_size=1)
        self.deepgemm_mxfp8_input = False
        self.moe_runner_config = SimpleNamespace(is_gated=True)


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            of, _, number = name.partition(".")
            match of:
                case "gate" | "up" if not number:
                    self.layer.weight.data[WIDTH * (of == "up") :][:WIDTH].copy_(tensor)
                case "gate" | "up":
                    self.layer.w13_weight.data[int(number), WIDTH * (of == "up") :][:WIDTH].copy_(tensor)
                case "down":
                    self.layer.w2_weight.data[int(number)].copy_(tensor)


def linear(*, per_channel: bool, blocks: bool) -> Model:
    config = Fp8Config(blocks, weight_block_size=[128, 128] if blocks else None)
    layer = Layer(Fp8LinearMethod(config))
    layer.quant_method.cutlass_fp8_supported = per_channel
    layer.quant_method.create_weights(
        layer, WIDTH, [WIDTH, WIDTH], WIDTH, 2 * WIDTH, torch.bfloat16, weight_loader=None
    )
    return Model(layer)


def experts() -> Model:
    layer = Layer(Fp8MoEMethod(Fp8Config()))
    layer.quant_method.create_weights(layer, EXPERTS, WIDTH, WIDTH, torch.bfloat16)
    return Model(layer)


def names(model: Model) -> list[str]:
    if hasattr(model.layer, "w13_weight"):
        return [f"{of}.{number}" for number in range(EXPERTS) for of in ("gate", "up", "down")]
    return ["gate", "up"]


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: torch.randn(WIDTH, WIDTH).bfloat16() for name in names(model)}


def made(kind: str) -> Model:
    if kind == "experts":
        return experts()
    return linear(per_channel=kind == "per channel", blocks=kind == "in blocks")


def held(model: Model) -> dict[str, torch.Tensor]:
    return {name: own.data.clone() for name, own in model.named_parameters()}


def expert_quantisation(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for a kernel of SGLang's that needs a GPU."""
    assert scale is None
    found = (x.float().abs().amax() / 448).view(1)
    return (x.float() / found).to(torch.float8_e4m3fn), found


@pytest.mark.parametrize("kind", ["per tensor", "per channel", "in blocks", "experts"])
def test_an_update_makes_what_a_fresh_load_makes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_torch_cpu_fp8.use()
    monkeypatch.setattr(fp8, "scaled_fp8_quant", expert_quantisation)
    monkeypatch.setattr(fp8, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(fp8, "get_moe_runner_backend", lambda *_: SimpleNamespace(
        is_hpc_ops=lambda: False, is_cutlass=lambda: False, is_flashinfer_trtllm=lambda: False,
        is_flashinfer_trtllm_routed=lambda: False, is_flashinfer_megamoe=lambda: False,
    ))  # fmt: skip
    model, fresh = made(kind), made(kind)
    quantised_layers.record(model)
    quantised_layers.record(fresh)
    for one in (model, fresh):
        one.layer.quant_method.process_weights_after_loading(one.layer)
    objects = dict(model.named_parameters())
    manifest = WeightManifest(tuple(TensorSpec(name, "bfloat16", (WIDTH, WIDTH)) for name in names(model)), {})
    target = TracedTarget(
        model.load_weights,
        manifest,
        converted=quantised_layers.quantised_layers(model, torch.bfloat16, model.load_weights),
        model=model,
    )
    assert target.converted == set(names(model))
    assert target.manifest() == manifest, "a trainer's tensors, not the engine's quantised ones"
    for _ in range(2):
        pushed = weights(model)
        target.load(pushed.items())
        again = made(kind)
        if kind == "in blocks":  # the checkpoint that SGLang loads is quantised already
            for of, part in enumerate((pushed["gate"], pushed["up"])):
                values, scales = quantise_blocks(part)
                again.layer.weight.data[WIDTH * of :][:WIDTH].copy_(values)
                again.layer.weight_scale_inv.data[2 * of :][:2].copy_(scales)
        else:
            again.load_weights(pushed.items())
        again.layer.quant_method.process_weights_after_loading(again.layer)
        wanted = held(again)
        got = held(model)
        assert got.keys() == wanted.keys()
        for name, values in wanted.items():
            assert values.dtype == got[name].dtype
            assert torch.equal(values.float(), got[name].float()), name
    now = dict(model.named_parameters())
    assert all(now[name] is own for name, own in objects.items()), "CUDA graphs look where the old ones are"


class Attention(nn.Module):
    """A projection that SGLang keeps also in halves, for attention in the compressed space."""

    w_kc: torch.Tensor
    w_vc: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kv_b_proj = made(kind).layer
        self.qk_nope_head_dim = self.v_head_dim = 128
        self.w_kc = self.w_vc = None  # type: ignore[assignment]
        self.w_scale = 1.0


class WithAttention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.self_attn = Attention(kind)


class Layers(nn.Module):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithAttention(kind) for _ in range(number))
        self.start_layer, self.end_layer = 0, number


class DeepSeek(DeepseekV2WeightLoaderMixin, nn.Module):  # type: ignore[misc] # SGLang is not installed where mypy runs
    """Two layers' projections, with SGLang's own step after loading."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Layers(kind, 2)
        self.config = SimpleNamespace(num_hidden_layers=2, architectures=["DeepseekV3ForCausalLM"])
        self.quant_config = self.attentions()[0].kv_b_proj.quant_method.quant_config

    def attentions(self) -> list[Attention]:
        return [layer.self_attn for layer in self.model.layers if isinstance(layer, WithAttention)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number, _, of = name.partition(".")
            part = self.attentions()[int(number)].kv_b_proj
            (part.weight if of == "weight" else part.weight_scale_inv).data.copy_(tensor)
        self.post_load_weights()  # type: ignore[operator] # SGLang's

    def convert(self) -> None:
        for attention in self.attentions():
            attention.kv_b_proj.quant_method.process_weights_after_loading(attention.kv_b_proj)


class OfModel(Worker):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def model(self) -> nn.Module:
        return self._model


def as_checkpoint(kind: str, pushed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what SGLang's checkpoint would hold."""
    if kind != "in blocks":
        return pushed
    made: dict[str, torch.Tensor] = {}
    for name, tensor in pushed.items():
        made[name], made[name.replace("weight", "scale")] = quantise_blocks(tensor)
    return made


@pytest.mark.parametrize("kind", ["per tensor", "per channel", "in blocks"])
def test_what_is_derived_before_the_quantisation_is_that_of_a_fresh_load(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang_torch_cpu_fp8.use()
    monkeypatch.setattr(fp8, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    specs = tuple(TensorSpec(f"{number}.weight", "bfloat16", (2 * WIDTH, WIDTH)) for number in range(2))

    def draw() -> dict[str, torch.Tensor]:
        return {spec.name: torch.randn(spec.shape).bfloat16() for spec in specs}

    model = DeepSeek(kind)
    quantised_layers.record(model)
    model.load_weights(as_checkpoint(kind, draw()).items())
    model.convert()
    halves = [(attention.w_kc, attention.w_vc) for attention in model.attentions()]
    worker = OfModel(model)
    parts = quantised_layers.quantised_layers(model, torch.bfloat16, worker.load_weights)
    target = TracedTarget(worker.load_weights, WeightManifest(specs, {}), converted=parts, model=model)
    target.derived = Derived(worker.after_loading(), target.storages, parts=parts)
    for _ in range(2):
        pushed = draw()
        target.begin()
        target.load(pushed.items())
        target.finish()
        fresh = DeepSeek(kind)
        fresh.load_weights(as_checkpoint(kind, pushed).items())
        fresh.convert()
        for one, other, held in zip(model.attentions(), fresh.attentions(), halves, strict=True):
            assert one.w_kc is held[0], "CUDA graphs look where the old one is"
            assert one.w_vc is held[1]
            assert torch.equal(one.w_kc.float(), other.w_kc.float())
            assert torch.equal(one.w_vc.float(), other.w_vc.float())
            assert one.w_scale == other.w_scale
            assert torch.equal(one.kv_b_proj.weight.float(), other.kv_b_proj.weight.float())
