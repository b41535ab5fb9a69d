"""Tensors that an engine stores in another form are loaded by the engine itself, in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

ROWS = 3
SPECS = (
    TensorSpec("gate", "float32", (ROWS, 4)),
    TensorSpec("up", "float32", (ROWS, 4)),
    TensorSpec("norm", "float32", (4,)),
)
MANIFEST = WeightManifest(SPECS, {"again": "up"})


class Layer(nn.Module):
    """Gate and up stacked, each row as eight-bit integers and a scale."""

    quantised: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("quantised", torch.zeros(2 * ROWS, 4, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(2 * ROWS))


class Engine(QuantisedParts):
    def __init__(self, spoil: float = 0) -> None:
        self.layer = Layer()
        self.norm = torch.zeros(4)
        self.filled: torch.Tensor | None = None
        """The part of the layer that the loader fills."""
        self.loads: list[list[str]] = []
        self.spoil = spoil

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.copy_(tensor)
            else:
                assert self.filled is not None, "the layer holds nothing that its loader could fill"
                self.filled[ROWS * (name == "up") :][:ROWS].copy_(tensor)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        self.filled = torch.empty(2 * ROWS, 4, device="meta")
        yield
        self.filled = None

    def part_of(self, destination: torch.Tensor) -> nn.Module:
        return self.layer

    def load(self, parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
        assert list(parts) == [self.layer]
        self.loads.append(sorted(weights))
        self.filled = torch.full((2 * ROWS, 4), torch.nan)
        self.load_weights(weights.items())
        quantised, scale = quantise(self.filled + self.spoil)
        self.layer.quantised.copy_(quantised)
        self.layer.scale.copy_(scale)
        self.filled = None


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(1) / 127
    return (rows / scale[:, None]).round().to(torch.int8), scale


def target_of(engine: Engine) -> TracedTarget:
    return TracedTarget(engine.load_weights, MANIFEST, converted=engine)


def weights() -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape) for spec in SPECS}


def test_the_engine_makes_its_form_of_what_was_pushed() -> None:
    engine = Engine()
    receiver = Receiver(target_of(engine))
    for _ in range(2):
        pushed = weights()
        push_in_process(receiver, MANIFEST, pushed)
        quantised, scale = quantise(torch.cat([pushed["gate"], pushed["up"]]))
        assert torch.equal(engine.layer.quantised, quantised)
        assert torch.equal(engine.layer.scale, scale)
        assert torch.equal(engine.norm, pushed["norm"])
    assert engine.loads == [["gate", "up"]] * 2, "a layer is loaded once, from every tensor that it is made of"


@pytest.mark.parametrize("name", ["gate", "up", "norm"])
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
    assert held == {tensor.data_ptr() for tensor in (engine.norm, engine.layer.quantised, engine.layer.scale)}


def test_its_form_is_what_is_looked_at() -> None:
    engine = Engine()
    target = target_of(engine)
    assert set(validate_weights(target).all_zero) == {"gate", "up", "norm"}
    push_in_process(Receiver(target), MANIFEST, weights())
    report = validate_weights(target)
    assert (report.checked, report.nan, report.infinite, report.all_zero) == (3, (), (), ())
    engine.layer.scale[0] = torch.nan
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
