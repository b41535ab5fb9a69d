"""Tensors that an engine stores in another form are loaded by the engine itself, in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.weight_sync.receiver_engines import push_in_process
from torch import nn

from drivetrain.errors import WeightSyncError, WeightVerifyFailed
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync import Receiver
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored, require_converted_alike
from drivetrain_weight_sync.receiver.weight_inspection import validate_weights
from drivetrain_weight_sync.tracing.quantised_parts import LayerForm, QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

ROWS = 3
SPECS = (
    TensorSpec("gate", "float32", (ROWS, 4)),
    TensorSpec("up", "float32", (ROWS, 4)),
    TensorSpec("norm", "float32", (4,)),
    TensorSpec("bias", "float32", (2 * ROWS,)),
)
MANIFEST = WeightManifest(SPECS, {"again": "up"})


class Layer(nn.Module):
    """Gate and up stacked; once converted, each row is held as eight-bit integers and a scale."""

    weight: torch.Tensor
    quantised: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * ROWS, 4))
        self.bias = nn.Parameter(torch.zeros(2 * ROWS))
        self.scale = nn.Parameter(torch.ones(1))
        self.kernel = Kernel(1.0)


class Kernel:
    def __init__(self, largest: float) -> None:
        self.largest = torch.tensor(largest)


class Engine:
    """Loads into the layer's ``weight``, and converts the layer after it loaded."""

    def __init__(self, spoil: float = 0) -> None:
        self.layer = Layer()
        self.norm = torch.zeros(4)
        self.loads: list[list[str]] = []
        """Names of each call of the loader."""
        self.conversions = 0
        self.spoil = spoil
        form = LayerForm.of(self.layer)
        self.convert(self.layer)
        self.parts = QuantisedParts({self.layer: form}, self.convert, self.load_weights)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads.append([])
        for name, tensor in weights:
            self.loads[-1].append(name)
            match name:
                case "norm":
                    self.norm.copy_(tensor)
                case "bias":
                    self.layer.bias.data.copy_(tensor)
                case _:
                    self.layer.weight.data[ROWS * (name == "up") :][:ROWS].copy_(tensor)

    def convert(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        self.conversions += 1
        assert layer.scale.tolist() == [1.0], "a parameter that no checkpoint holds has its first value"
        quantised, scale = quantise(layer.weight.data + self.spoil)
        del layer.weight
        layer.quantised = nn.Parameter(quantised, requires_grad=False)
        layer.scale = nn.Parameter(scale)
        layer.kernel = Kernel(float(scale.max()))


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(1) / 127
    return (rows / scale[:, None].clamp_min(1e-9)).round().to(torch.int8), scale


def target_of(engine: Engine) -> TracedTarget:
    return TracedTarget(engine.load_weights, MANIFEST, converted=engine.parts)


def weights() -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape) for spec in SPECS}


def test_the_engine_makes_its_form_of_what_was_pushed() -> None:
    engine = Engine()
    receiver = Receiver(target_of(engine))
    held = [*engine.layer.parameters(), engine.layer.kernel, engine.layer.kernel.largest]
    engine.loads, engine.conversions = [], 0
    for _ in range(2):
        pushed = weights()
        push_in_process(receiver, MANIFEST, pushed)
        quantised, scale = quantise(torch.cat([pushed["gate"], pushed["up"]]))
        assert torch.equal(engine.layer.quantised, quantised)
        assert torch.equal(engine.layer.scale, scale)
        assert engine.layer.kernel.largest == scale.max()
        assert torch.equal(engine.norm, pushed["norm"])
        assert torch.equal(engine.layer.bias, pushed["bias"])
    now = [*engine.layer.parameters(), engine.layer.kernel, engine.layer.kernel.largest]
    assert [id(one) for one in now] == [id(one) for one in held], "CUDA graphs look where the old ones are"
    assert (engine.loads, engine.conversions) == ([], 2), "the loader's copies are replayed, and a layer converted once"


def test_a_tensor_that_the_loader_computes_with_takes_the_engines_way() -> None:
    class Computing(Engine):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, 2 * tensor if name == "gate" else tensor) for name, tensor in weights)

    engine = Computing()
    receiver = Receiver(target_of(engine))
    engine.loads, engine.conversions = [], 0
    pushed = weights()
    push_in_process(receiver, MANIFEST, pushed)
    quantised, scale = quantise(torch.cat([2 * pushed["gate"], pushed["up"]]))
    assert torch.equal(engine.layer.quantised, quantised)
    assert torch.equal(engine.layer.scale, scale)
    assert ([sorted(names) for names in engine.loads], engine.conversions) == ([["gate", "up"]], 1)


def test_a_form_that_changes_is_refused_and_the_layer_keeps_its_own() -> None:
    class Changing(Engine):
        def convert(self, layer: nn.Module) -> None:
            super().convert(layer)
            if self.conversions > 1:
                self.layer.scale = nn.Parameter(self.layer.scale.data.double())

    engine = Changing()
    held, kernel = dict(engine.layer.named_parameters()), engine.layer.kernel
    with pytest.raises(WeightSyncError, match=r"converted a Layer to .*float64"):
        push_in_process(Receiver(target_of(engine)), MANIFEST, weights())
    assert {name: id(own) for name, own in engine.layer.named_parameters()} == {
        name: id(own) for name, own in held.items()
    }
    assert engine.layer.kernel is kernel
    assert kernel.largest == 0


@pytest.mark.parametrize("name", ["gate", "up", "norm", "bias"])
def test_what_came_otherwise_than_sent_is_found(name: str) -> None:
    with pytest.raises(WeightVerifyFailed, match=name) as caught:
        push_in_process(Receiver(target_of(Engine())), MANIFEST, weights(), spoil=name)
    assert caught.value.tensors == (name,)


def test_the_manifest_has_all_in_the_dtypes_that_are_loaded() -> None:
    target = target_of(Engine())
    assert target.manifest() == MANIFEST
    assert target.converted == {"gate", "up"}


@pytest.mark.parametrize("name", ["gate", "again"])
def test_it_is_not_read_back(name: str) -> None:
    target = target_of(Engine())
    for read in (target.read, target.whole, target.pieces):
        with pytest.raises(WeightSyncError, match="another form"):
            read(name)
    assert not target.read("norm").any()


def test_memory_that_sleeps_is_that_of_its_form_too() -> None:
    engine = Engine()
    held = {storage.data_ptr() for storage in target_of(engine).storages}
    assert held == {tensor.data_ptr() for tensor in (engine.norm, *engine.layer.parameters())}


def test_its_form_is_what_is_looked_at() -> None:
    engine = Engine()
    target = target_of(engine)
    assert set(validate_weights(target).all_zero) == {"gate", "up", "norm", "bias"}
    push_in_process(Receiver(target), MANIFEST, weights())
    report = validate_weights(target)
    assert (report.checked, report.nan, report.infinite, report.all_zero) == (4, (), (), ())
    engine.layer.scale.data[0] = torch.nan
    assert set(validate_weights(target).nan) == {"gate", "up"}


def test_an_engine_that_comes_to_something_else_again_is_refused(tmp_path: Path) -> None:
    stored = weights()
    save_file(stored, tmp_path / "model.safetensors")
    engine = Engine()
    push_in_process(Receiver(target_of(engine)), MANIFEST, dict(stored))
    kept = engine.layer.quantised.clone(), engine.layer.scale.clone()

    target = target_of(engine)
    require_as_stored(target, tmp_path)
    require_converted_alike(target, tmp_path)

    engine.spoil = 0.5
    with pytest.raises(WeightSyncError, match="converts gate, up differently"):
        require_converted_alike(target_of(engine), tmp_path)
    assert torch.equal(engine.layer.quantised, kept[0]), "it is as it was"
    assert torch.equal(engine.layer.scale, kept[1])
