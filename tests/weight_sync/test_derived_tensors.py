"""Tensors that an engine derives from loaded ones are recomputed in place after an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.errors import WeightSyncError, WeightTransferFailed
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading, Derived, casts_of_weights
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

SPECS = WeightManifest((TensorSpec("proj", "float32", (4, 3)), TensorSpec("norm", "float32", (3,))))


class Backend:
    """Not a module; packs weights for its kernel."""

    packed: torch.Tensor


class Mla(nn.Module):
    """Derives halves of a projection: a parameter, an attribute, and an attribute of its backend."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = torch.ones(())
        self.impl = Backend()
        self.view: torch.Tensor | None = None
        self.after_loading()

    def after_loading(self) -> None:
        self.scale.fill_(1.0)
        lower, upper = self.proj.chunk(2)
        self.lower = nn.Parameter(lower.T.contiguous(), requires_grad=False)
        self.upper = upper.clone()
        self.impl.packed = (2 * upper).contiguous()
        if self.view is not None:
            self.view.data.copy_(lower)  # onto itself
        self.view = lower

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def derived(self) -> list[torch.Tensor]:
        return [self.lower, self.upper, self.impl.packed]


def target_of(model: Mla, compute: Callable[[], object]) -> TracedTarget:
    target = TracedTarget(model.load_weights, SPECS)
    target.derived = Derived([AfterLoading("attention", model, compute)], target.storages)
    return target


def update(target: TracedTarget) -> dict[str, torch.Tensor]:
    weights = {"proj": torch.randn(4, 3), "norm": torch.randn(3)}
    target.begin()
    target.load(weights.items())
    target.finish()
    return weights


def test_all_of_it_follows_the_weights_and_stays_where_it_is() -> None:
    model, fresh = Mla(), Mla()
    target = target_of(model, model.after_loading)
    before = [(tensor, tensor.data_ptr()) for tensor in model.derived()]
    fresh.load_weights(update(target).items())
    fresh.after_loading()
    for (old, address), now, right in zip(before, model.derived(), fresh.derived(), strict=True):
        assert now is old
        assert now.data_ptr() == address
        assert torch.equal(now, right)


def test_what_looks_at_no_weights_is_done_once() -> None:
    model = Mla()
    done: list[str] = []

    def scales() -> None:
        done.append("scales")
        model.scale.fill_(1.0)

    update(target_of(model, scales))
    assert done == ["scales"]


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage._cdata
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == self._storage for v in tree_leaves(args)):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_the_cache_is_not_copied_to_see_whether_it_changes() -> None:
    """The KV cache takes up most of the memory."""
    model = Mla()
    model.impl.kv_cache = torch.zeros(8, 4)  # type: ignore[attr-defined]
    storage = model.impl.kv_cache.untyped_storage()  # type: ignore[attr-defined]
    weights = [parameter.untyped_storage() for parameter in (model.proj, model.norm)]
    for cache, copied in (([storage], False), ([], True)):
        with _Reads(storage) as reads:
            Derived([AfterLoading("attention", model, model.after_loading)], weights, cache)
        assert bool(reads.seen) is copied, "the probe sees nothing"


def test_what_writes_to_the_cache_is_refused_before_it_does() -> None:
    model = Mla()
    model.impl.kv_cache = torch.ones(8, 4)  # type: ignore[attr-defined]
    cache: torch.Tensor = model.impl.kv_cache  # type: ignore[attr-defined]
    for write in (cache.zero_, lambda: torch.ops.aten._foreach_zero_([cache])):
        with pytest.raises(WeightSyncError, match="or to the cache"):
            Derived([AfterLoading("attention", model, write)], [], [cache.untyped_storage()])
        assert bool(cache.all())


def test_what_comes_to_something_else_a_second_time_is_refused() -> None:
    model = Mla()

    def packs() -> None:
        model.upper = model.proj.chunk(2)[1] + model.upper

    before = model.upper.clone()
    with pytest.raises(WeightSyncError, match="step of attention gives other values when repeated"):
        target_of(model, packs)
    assert torch.equal(model.upper, before), "the engine serves on"


@pytest.mark.parametrize(
    "write", [lambda tensor: tensor.mul_(2), lambda tensor: torch.mul(torch.ones(4, 3), 2, out=tensor)]
)
def test_what_writes_to_weights_is_refused_before_it_does(write: Callable[[torch.Tensor], object]) -> None:
    model = Mla()
    before, upper = model.proj.clone(), model.upper

    def quantises() -> None:
        model.upper = torch.zeros(1)
        proj, model.proj = model.proj, nn.Parameter(torch.empty(0), requires_grad=False)
        write(proj)

    with pytest.raises(WeightSyncError, match=r"fails when repeated .*would write to weights"):
        target_of(model, quantises)
    assert torch.equal(model.proj, before)
    assert model.upper is upper, "the engine serves on"


def test_what_has_another_shape_the_next_time_fails() -> None:
    model = Mla()
    rows = [2]

    def cuts() -> None:
        model.upper = model.proj[-rows[0] :].clone()

    target = target_of(model, cuts)
    rows[0] = 3
    with pytest.raises(WeightTransferFailed, match="attention has other tensors"):
        update(target)


class Gate(nn.Module):
    """A gate that keeps its weight in float32 from its first forward pass on, as GLM-4.5's in SGLang 0.5.17."""

    _weight_fp32: torch.Tensor | None
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)
        self.register_buffer("table", torch.arange(12.0).view(4, 3), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return nn.functional.linear(hidden.float(), self._weight_fp32)


@pytest.mark.parametrize("used_before", [True, False])
def test_a_cast_that_a_module_keeps_of_its_weight_follows_an_update(used_before: bool) -> None:
    gate = Gate()
    model = nn.Sequential(gate)
    hidden = torch.randn(2, 3)
    if used_before:
        gate(hidden)
    held, table = gate._weight_fp32, gate.table.clone()
    derived = Derived(casts_of_weights(model), [gate.weight.untyped_storage()])
    gate(hidden)
    gate.weight.data.mul_(2)
    assert derived.refresh()
    torch.testing.assert_close(gate(hidden), nn.functional.linear(hidden, gate.weight.float()))
    assert held is None or gate._weight_fp32 is held, "a CUDA graph knows the old address"
    assert torch.equal(gate.table, table)


class Projection(nn.Module):
    """Converted to eight bits, transposed, with a scale for each row."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)


class Attention(nn.Module):
    """Keeps the halves of its projection, which a model takes from the loaded weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = Projection()
        self.lower: torch.Tensor | None = None
        self.upper: torch.Tensor | None = None
        self.factor: torch.Tensor | float = 1.0


class Quantising(nn.Module):
    """Takes its step after loading before it converts, as SGLang's models with MLA do."""

    def __init__(self, *, from_eight_bits: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.from_eight_bits = from_eight_bits
        forms: dict[nn.Module, LayerForm] = {part: LayerForm.of(part) for part in self.projections()}
        loaded: dict[nn.Module, LayerForm] | None = None
        if from_eight_bits:
            for part in self.projections():
                self.quantise(part)
            loaded = {part: LayerForm.of(part) for part in self.projections()}
        self.after_loading()
        for part in self.projections():
            self.convert(part)
        quantise = self.quantise if from_eight_bits else None
        self.parts = QuantisedParts(forms, self.convert, self.load_weights, quantise=quantise, loaded=loaded)

    def attentions(self) -> list[Attention]:
        return [layer for layer in self.layers if isinstance(layer, Attention)]

    def projections(self) -> list[Projection]:
        return [attention.proj for attention in self.attentions()]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.projections()[int(name)].weight.data.copy_(tensor)

    def after_loading(self) -> None:
        for attention in self.attentions():
            weight = attention.proj.weight
            if weight.dtype == torch.int8:
                weight = weight * attention.proj.scale
            lower, upper = weight.view(2, 2, 3)
            attention.lower = lower.T.contiguous().T
            attention.upper = upper.clone() if attention.upper is None else attention.upper.copy_(upper)

    def quantise(self, part: nn.Module) -> None:
        assert isinstance(part, Projection)
        scale = part.weight.abs().amax(1, keepdim=True) / 127
        quantised = (part.weight / scale).round().to(torch.int8)
        part.weight = nn.Parameter(quantised, requires_grad=False)
        part.scale = nn.Parameter(scale, requires_grad=False)

    def convert(self, part: nn.Module) -> None:
        assert isinstance(part, Projection)
        if not self.from_eight_bits:
            self.quantise(part)
        part.weight = nn.Parameter(part.weight.T, requires_grad=False)

    def derived(self) -> list[torch.Tensor | None]:
        return [half for attention in self.attentions() for half in (attention.lower, attention.upper)]


def traced(model: Quantising, compute: Callable[[], object] | None = None) -> TracedTarget:
    specs = WeightManifest(tuple(TensorSpec(str(number), "float32", (4, 3)) for number in range(2)))
    target = TracedTarget(model.load_weights, specs, converted=model.parts, model=model)
    step = AfterLoading("the model", model, compute or model.after_loading, before_conversion=True)
    target.derived = Derived([step], target.storages, parts=model.parts)
    return target


@pytest.mark.parametrize("from_eight_bits", [False, True])
def test_a_step_before_the_conversion_reads_layers_as_they_were_loaded(from_eight_bits: bool) -> None:
    model = Quantising(from_eight_bits=from_eight_bits)
    before = [None if half is None else (half, half.clone()) for half in model.derived()]
    target = traced(model)
    assert all(half is not None and torch.equal(*half) for half in before), "an engine that serves reads them"
    for _ in range(2):
        pushed = [torch.randn(4, 3) for _ in range(2)]
        target.begin()
        target.load((str(number), tensor) for number, tensor in enumerate(pushed))
        target.finish()
        for attention, tensor in zip(model.attentions(), pushed, strict=True):
            loaded = Projection()
            loaded.weight = nn.Parameter(tensor, requires_grad=False)
            if from_eight_bits:
                model.quantise(loaded)
                tensor = loaded.weight * loaded.scale
            assert attention.lower is not None
            assert attention.upper is not None
            assert torch.equal(attention.lower, tensor[:2])
            assert torch.equal(attention.upper, tensor[2:])
    now = model.derived()
    assert all(half is not None and one is half[0] for one, half in zip(now, before, strict=True))
    assert [part.weight.dtype for part in model.projections()] == 2 * [torch.int8]
    assert not model.parts.loaded, "only an update needs the memory"


def test_a_layer_that_an_update_does_not_bring_keeps_what_was_derived() -> None:
    model = Quantising()
    target = traced(model)
    kept = [half.clone() for half in model.derived()[:2] if half is not None]
    pushed = torch.randn(4, 3)
    target.begin()
    target.load([("1", pushed)])
    target.finish()
    lower, upper, *_ = model.derived()
    assert lower is not None
    assert upper is not None
    assert torch.equal(lower, kept[0])
    assert torch.equal(upper, kept[1])
    now = model.attentions()[1].upper
    assert now is not None
    assert torch.equal(now, pushed[2:])


def test_a_step_that_needs_values_of_unconverted_layers_is_refused_and_undone() -> None:
    model = Quantising()
    before = [half.clone() for half in model.derived() if half is not None]

    def scales() -> None:
        model.after_loading()
        for attention in model.attentions():
            attention.factor = attention.proj.weight.abs().amax()

    with pytest.raises(WeightSyncError, match="step of the model fails when repeated"):
        traced(model, scales)
    assert [attention.factor for attention in model.attentions()] == [1.0, 1.0]
    assert all(torch.equal(one, half) for one, half in zip(before, model.derived(), strict=True) if half is not None)
    assert [part.weight.dtype for part in model.projections()] == 2 * [torch.int8]
