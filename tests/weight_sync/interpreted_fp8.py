"""Layers that a kernel quantises to fp8 in place; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.weight_sync.receiver_engines import push_in_process
from torch import nn
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from drivetrain.errors import WeightVerifyFailed
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync import Receiver
from drivetrain_weight_sync.copying import fp8_copies, fp8_kernel
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.copying.fp8_copies import Fp8Copies, Fp8Piece
from drivetrain_weight_sync.copying.fp8_formulas import PER_TENSOR, Division, Formula
from drivetrain_weight_sync.copying.fp8_kernel import quantise_groups
from drivetrain_weight_sync.receiver.cpu_sleep import HostMemory
from drivetrain_weight_sync.tensors.block_quantisation import quantise_blocks
from drivetrain_weight_sync.tracing import fp8_layers, traced_target
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading, Derived
from drivetrain_weight_sync.tracing.fp8_layers import is_same
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.transports.in_process import InProcessReader

FP8 = torch.float8_e4m3fn
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_convert_float = interpreter._convert_float


def _exact(numbers: Any, of: Any, to: Any, rounding: Any) -> Any:
    """Round to fp8 as GPUs do; Triton's interpreter does not."""
    if (of, to) != (tl.float32, tl.float8e4nv):
        return _convert_float(numbers, of, to, rounding)
    values = torch.from_numpy(numbers.view(np.float32).copy()).to(FP8)
    return values.view(torch.uint8).numpy().reshape(numbers.shape)


interpreter._convert_float = _exact


def minus_from_zero(semantic: Any, value: Any) -> Any:
    """Negate as Triton 3.6 does, which makes 0 of both zeros."""
    kind = value.type.scalar
    zero = semantic.make_tensor(semantic.builder.get_null_value(kind.to_ir(semantic.builder)), kind)
    return semantic.sub(zero, value, True)


def number(value: float) -> torch.Tensor:
    return torch.full((), value)


def by_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.float().abs().amax(-1, keepdim=True) / number(448)).clamp_min(1 / (448 * 512))
    return (weight.float() / scale).clamp(-448, 448).to(FP8), scale


def by_tensors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.float().abs().amax((-2, -1), keepdim=True) / number(448)
    factor = torch.where(scale == 0, 0, number(1) / scale)
    return (weight.float() * factor).clamp(-448, 448).to(FP8), scale.flatten()


def by_clamped_tensors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise experts as vLLM's kernel, which clamps what 0 / 0 gives to the largest number."""
    quantised, scale = by_tensors(weight)
    return torch.where((scale == 0)[:, None, None], number(448), quantised.float()).to(FP8), scale


def by_biased_tensors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No formula that is known."""
    quantised, scale = by_tensors(weight + 1)
    return quantised, scale


def transposed(quantise: Quantise) -> Quantise:
    def quantise_and_turn(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantised, scale = quantise(weight)
        return quantised.t(), scale.t().contiguous() if scale.ndim > 1 else scale

    return quantise_and_turn


class Layer(nn.Module):
    weight_scale: torch.Tensor

    def __init__(self, shape: tuple[int, ...], quantise: Quantise) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(shape[-2], dtype=torch.bfloat16))
        self.quantise = quantise
        self.derived = torch.zeros(math.prod(shape), dtype=torch.bfloat16)
        """A copy of the weight as it was loaded, if the engine takes a step for it."""


class Engine:
    """A fused layer of two tensors, and experts that come one by one."""

    def __init__(self, quantise: Quantise, of_experts: Quantise, rows: int, columns: int) -> None:
        self.rows = rows
        self.fused, self.experts = Layer((rows + 2, columns), quantise), Layer((2, rows + 2, columns), of_experts)
        self.model = nn.ModuleList([self.fused, self.experts])
        self.conversions = 0
        forms: dict[nn.Module, LayerForm] = {layer: LayerForm.of(layer) for layer in (self.fused, self.experts)}
        for layer in forms:
            self.convert(layer)
        self.parts = QuantisedParts(forms, self.convert, self.load_weights)

    def convert(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        self.conversions += 1
        quantised, scale = layer.quantise(layer.weight.data)
        layer.weight = nn.Parameter(quantised, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def derive(self) -> None:
        """Derive a tensor before the conversion, as SGLang's models with MLA do."""
        self.fused.derived = self.fused.weight.view(-1).clone()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        begins = {"q": (0, self.rows), "k": (self.rows, self.rows + 2)}
        for name, tensor in weights:
            if name in begins:
                begin, end = begins[name]
                self.fused.weight.data[begin:end].copy_(tensor[: end - begin])
            elif name == "bias":
                self.fused.bias.data.copy_(tensor)
            else:
                kind, expert = name.split(".")
                into = self.experts.weight.data[int(expert)]
                (into[: self.rows] if kind == "gate" else into[self.rows :]).copy_(tensor)


def manifest(rows: int, columns: int, of_others: int) -> WeightManifest:
    return WeightManifest(
        (
            TensorSpec("q", "bfloat16", (rows + of_others, columns)),
            TensorSpec("k", "bfloat16", (2, columns)),
            TensorSpec("bias", "bfloat16", (rows + 2,)),
            *(TensorSpec(f"gate.{expert}", "bfloat16", (rows, columns)) for expert in range(2)),
            *(TensorSpec(f"up.{expert}", "bfloat16", (2, columns)) for expert in range(2)),
        ),
        {},
    )


class Kernel:
    """Counts launches of the kernel, by what is compiled in: arguments, and whether addresses are aligned."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches: Counter[tuple[tuple[str, object], ...]] = Counter()

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **compiled: Any) -> None:
            aligned = tuple(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor))
            self.launches[("aligned", aligned), *compiled.items()] += 1
            self._kernel[grid](*args, **compiled)

        return launch


class WrongForPieces(Kernel):
    """Quantises a number of a fused layer wrongly if its tensors come one by one, but not if they come in one."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        right = super().__getitem__(grid)

        def launch(table: torch.Tensor, *args: Any, **compiled: Any) -> None:
            right(table, *args, **compiled)
            if len(table) == 2 and compiled["FINDS"] and compiled["STORES"]:
                ctypes.memset(int(table[-1, 1]), 0, 1)

        return launch


class Target(TracedTarget):
    """Notes what was done before each update, and that no trial changed a parameter."""

    def __init__(self, engine: Engine, manifest: WeightManifest, kernel: Kernel, *, derives: bool) -> None:
        super().__init__(engine.load_weights, manifest, split=True, converted=engine.parts, at_once=True)
        self.engine, self.kernel = engine, kernel
        self.steps = 0
        if derives:
            step = AfterLoading("fused", engine.model, engine.derive, before_conversion=True)
            self.derived = Derived([step], self.storages, parts=engine.parts)

    def _held(self) -> list[tuple[int, torch.Tensor]]:
        return [(id(own), own.clone()) for own in (*self.engine.model.parameters(), self.engine.fused.derived)]

    def get_ready(self) -> bool:
        before = self._held()
        known = len(self._fp8_layers.known)
        is_ready = super().get_ready()
        assert len(self._fp8_layers.known) <= known + 1, "requests are served between layers"
        now = self._held()
        for (one, values), (other, others) in zip(before, now, strict=True):
            assert one == other
            assert is_same(values, others)
        self.steps += 1
        return is_ready

    def begin(self) -> None:
        super().begin()
        self.conversions_before = self.engine.conversions
        self.launches_before = Counter(self.kernel.launches)


def zeros(shape: tuple[int, ...], *, at_odd_word: bool) -> torch.Tensor:
    """A tensor that begins at an even or an odd multiple of eight bytes."""
    begin = 4 if at_odd_word else 0
    return torch.zeros(begin + math.prod(shape), dtype=torch.bfloat16)[begin:].view(shape)


@contextmanager
def read_in_place(place: Hashable) -> Iterator[None]:
    """Give the source's tensors a stable address, or none."""
    with mock.patch.object(InProcessReader, "place", property(lambda _: place)):
        yield


def require_right(engine: Engine, pushed: Mapping[str, torch.Tensor], why: object) -> None:
    """Compare the engine's weights with what its own code makes of those that were pushed."""
    rows = engine.rows
    fused = engine.fused.quantise(torch.cat([pushed["q"][:rows], pushed["k"]]))
    experts = engine.experts.quantise(
        torch.stack([torch.cat([pushed[f"gate.{expert}"], pushed[f"up.{expert}"]]) for expert in range(2)])
    )
    for layer, (weight, scale) in ((engine.fused, fused), (engine.experts, experts)):
        assert is_same(layer.weight, weight), why
        assert is_same(layer.weight_scale, scale), why
    assert torch.equal(engine.fused.bias, pushed["bias"])


def try_engine(
    quantise: Quantise,
    of_experts: Quantise,
    *,
    kernels: type[Kernel] = Kernel,
    by_engine: int = 0,
    memory_from_push: int = 0,
    rows: int = 2,
    columns: int = 2560,
    of_others: int = 0,
    at_odd_word: bool = False,
    derives: bool = False,
) -> None:
    """Push four times, with a sleep before the last; other ranks hold the last rows of q.

    Args:
        by_engine: Layers of the two that the engine's own code converts in each push.
        derives: The engine derives a tensor from the fused layer before it converts the layer.
    """
    engine, held_by_trainer = Engine(quantise, of_experts, rows, columns), manifest(rows, columns, of_others)
    kernel = fp8_kernel.quantise_groups = kernels(quantise_groups)
    target = Target(engine, held_by_trainer, kernel, derives=derives)
    receiver = Receiver(target)
    pushed = {spec.name: zeros(spec.shape, at_odd_word=at_odd_word) for spec in held_by_trainer.tensors}
    held = [*engine.model.parameters(), engine.fused.derived]
    converted = engine.conversions
    with read_in_place(None):
        push_in_process(receiver, held_by_trainer, pushed)
    assert (target.steps, engine.conversions - converted, kernel.launches) == (0, 2, {}), "there is nothing to try for"
    tried = 0
    for push in range(4):
        for name, tensor in pushed.items():
            tensor.normal_()
            if push == 2:
                tensor[: len(tensor) // 2] = 0
            if push == 3 and name.endswith("1"):
                tensor.zero_()
        if push == 3:
            memory = HostMemory({MemoryTag.WEIGHTS: target.storages})
            memory.free(frozenset({MemoryTag.WEIGHTS}))
            memory.wake_up(frozenset({MemoryTag.WEIGHTS}))
        without_memory = mock.patch.object(fp8_layers, "like", side_effect=torch.OutOfMemoryError)
        with without_memory if push < memory_from_push else nullcontext():
            push_in_process(receiver, held_by_trainer, pushed)
        of_engine = by_engine if push >= memory_from_push else 2
        in_pause = kernel.launches - target.launches_before
        assert engine.conversions - target.conversions_before == of_engine, push
        assert bool(in_pause) == (of_engine < 2), push
        assert max(in_pause.values(), default=1) == 1, "nothing is tried within the pause"
        assert in_pause.keys() <= target.launches_before.keys(), "nothing is compiled within the pause"
        if push > memory_from_push:
            assert target.conversions_before == tried, "what was found is kept"
        tried = engine.conversions
        require_right(engine, pushed, push)
        if derives:
            assert torch.equal(engine.fused.derived, torch.cat([pushed["q"][:rows], pushed["k"]]).view(-1))
    assert target.steps > 4, "requests are served between trials"
    now = [*engine.model.parameters(), engine.fused.derived]
    assert [id(one) for one in now] == [id(one) for one in held]
    for name in ("k", "up.1"):
        with pytest.raises(WeightVerifyFailed) as failed:
            push_in_process(receiver, held_by_trainer, pushed, spoil=name)
        assert failed.value.tensors == (name,)


def main() -> None:
    # The trainer's tensors stay where they are, and change.
    fp8_copies.SHARED_BY = 1
    one_at_a_time = mock.patch.object(traced_target, "_STEP_S", 0.0)
    with one_at_a_time, read_in_place("here"), mock.patch.object(traced_target, "reaches", return_value=True):
        try_engine(transposed(by_rows), by_tensors, of_others=1)
        with mock.patch.object(TritonSemantic, "minus", minus_from_zero):
            try_engine(transposed(by_rows), by_clamped_tensors, of_others=1)
        try_engine(quantise_blocks, quantise_blocks, rows=128, columns=128, at_odd_word=True)
        try_engine(by_biased_tensors, by_biased_tensors, by_engine=2)
        try_engine(transposed(by_rows), by_tensors, kernels=WrongForPieces, by_engine=1)
        try_engine(transposed(by_rows), by_tensors, by_engine=1, derives=True)
        try_engine(quantise_blocks, quantise_blocks, memory_from_push=2, rows=128, columns=128)
    tensors = {name: (3 * torch.randn(3, 4100)).to(torch.bfloat16) for name in ("one", "other")}
    into = [torch.empty(3, 4100, dtype=FP8) for _ in tensors]
    scale = torch.empty(())
    formula = Formula(Division.EXACT, Division.BY_INVERSE)
    pieces = [
        Fp8Piece(tensor, own, scale, PER_TENSOR, formula, name)
        for (name, tensor), own in zip(tensors.items(), into, strict=True)
    ]
    found = Fp8Copies(pieces).digests()
    assert found == {name: digest(tensor) for name, tensor in tensors.items()}
    quantised, right = by_tensors(torch.cat([*tensors.values()]))
    assert torch.equal(torch.cat(into).view(torch.uint8), quantised.view(torch.uint8))
    assert scale == right
    print("all equal")


if __name__ == "__main__":
    main()
