"""Adapters of a form that vLLM has loaded before are written to their slot in one batch of copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain_vllm.in_engine.adapters import load_held
from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter

SLOTS, RANK, WIDTH = 2, 4, 6
LAYERS = {"0.qkv": ("0.q", "0.k"), "0.o": ("0.o",), "1.o": ("1.o",)}
"""The model's layers, and the adapter's layers that each fuses."""


@dataclass(eq=False)
class Weights:
    """VLLM's weights of a layer; lists if the layer is fused."""

    lora_a: Any
    lora_b: Any
    scaling: float


@dataclass(eq=False)
class Model:
    """VLLM's ``LoRAModel``."""

    id: int
    loras: dict[str, Weights]

    def get_lora(self, name: str) -> Weights | None:
        return self.loras.get(name)


@dataclass
class Layer:
    """A layer with slots, which writes them as vLLM's do."""

    parts: int
    writes: int = 0
    a: list[torch.Tensor] = field(default_factory=list)
    b: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.a = [torch.zeros(SLOTS, 1, RANK, WIDTH) for _ in range(self.parts)]
        self.b = [torch.zeros(SLOTS, 1, WIDTH, RANK) for _ in range(self.parts)]

    def reset_lora(self, index: int) -> None:
        for held in (*self.a, *self.b):
            held[index] = 0

    def set_lora(self, index: int, a: Any, b: Any) -> None:
        self.writes += 1
        self.reset_lora(index)
        for held, given in ((self.a, a), (self.b, b)):
            for one, part in zip(held, given if isinstance(given, list) else [given], strict=True):
                if part is not None:
                    one[index, 0, : part.shape[0], : part.shape[1]].copy_(part, non_blocking=True)


class Manager:
    """VLLM's ``LoRAModelManager``."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {name: Layer(len(parts)) for name, parts in LAYERS.items()}
        self.layers = dict(self.modules)
        self._registered_adapters = SimpleNamespace(cache={})
        self._active_adapters: dict[int, int] = {}

    def _get_lora_layer_weights(self, model: Model, name: str) -> Weights | None:
        return model.get_lora(name)

    def activate_adapter(self, number: int) -> bool:
        if number in self._active_adapters:
            return False
        slot = next(slot for slot in range(SLOTS) if slot not in self._active_adapters.values())
        self._active_adapters[number] = slot
        model = self._registered_adapters.cache[number]
        for name, layer in self.modules.items():
            weights = self._get_lora_layer_weights(model, name)
            if weights is None:
                layer.reset_lora(slot)
            else:
                layer.set_lora(slot, weights.lora_a, weights.lora_b)
        return True

    def add(self, model: Model) -> None:
        """Fuse layers and merge factors, as vLLM does."""
        for name, parts in LAYERS.items():
            found = [model.loras.pop(part, None) for part in parts]
            if len(parts) == 1 and found[0] is not None:
                model.loras[name] = found[0]
            elif any(found):
                some = [None if one is None else one.lora_a for one in found], [self._merged(one) for one in found]
                model.loras[name] = Weights(*some, scaling=1)
        for weights in model.loras.values():
            self._merged(weights)
        self._registered_adapters.cache[model.id] = model

    @staticmethod
    def _merged(weights: Weights | None) -> torch.Tensor | None:
        if weights is None:
            return None
        if weights.scaling != 1:
            weights.lora_b *= weights.scaling
            weights.scaling = 1
        return weights.lora_b  # type: ignore[no-any-return]

    def remove(self, number: int) -> None:
        del self._active_adapters[number], self._registered_adapters.cache[number]

    @property
    def writes(self) -> int:
        return sum(layer.writes for layer in self.layers.values())


class Worker:
    """VLLM's ``WorkerLoRAManager``, which loads adapters that come from memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._adapter_manager = self.slots = Manager()
        self.held: dict[str, HeldAdapter] = {}
        self._numbers = 0
        monkeypatch.setattr("drivetrain_vllm.in_engine.adapters._loaded", self._made)
        load_held(self, self.held)

    def _load_adapter(self, request: Any) -> Model:
        raise AssertionError("from a folder")

    @staticmethod
    def _made(_: object, request: Any, held: HeldAdapter) -> Model:
        layers = {name.rpartition(".")[0] for name in held.tensors}
        scaling = float(str(held.config["scaling"]))
        return Model(
            request.lora_int_id,
            {one: Weights(held.tensors[f"{one}.a"], held.tensors[f"{one}.b"], scaling) for one in sorted(layers)},
        )

    def push(self, tensors: dict[str, torch.Tensor], scaling: float = 1.0) -> int:
        """Load an adapter, and return its number."""
        self._numbers += 1
        path = f"held-{self._numbers}"
        self.held[path] = HeldAdapter({"scaling": scaling}, {name: one.clone() for name, one in tensors.items()})
        self.load(self._numbers)
        return self._numbers

    def load(self, number: int) -> None:
        """Load an adapter, as vLLM also does at the next request for one that it has evicted."""
        self.slots.add(self._load_adapter(SimpleNamespace(lora_path=f"held-{number}", lora_int_id=number)))
        self.slots.activate_adapter(number)

    def served(self, number: int) -> dict[str, torch.Tensor]:
        """Return what the slot of an adapter holds, by layer of the adapter."""
        slot, found = self.slots._active_adapters[number], {}
        for name, parts in LAYERS.items():
            layer = self.slots.layers[name]
            for index, part in enumerate(parts):
                found[f"{part}.a"], found[f"{part}.b"] = (
                    layer.a[index][slot, 0].clone(),
                    layer.b[index][slot, 0].clone(),
                )
        return found


def adapter(*layers: str, rank: int = 3) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.{part}": torch.randn((rank, WIDTH) if part == "a" else (WIDTH, rank))
        for layer in layers
        for part in "ab"
    }


def expected(tensors: dict[str, torch.Tensor], scaling: float = 1.0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in (part for parts in LAYERS.values() for part in parts):
        for name, shape in ((f"{part}.a", (RANK, WIDTH)), (f"{part}.b", (WIDTH, RANK))):
            found[name] = torch.zeros(shape)
            if name in tensors:
                one = tensors[name] * scaling if name.endswith(".b") else tensors[name]
                found[name][: one.shape[0], : one.shape[1]] = one
    return found


def check(worker: Worker, number: int, tensors: dict[str, torch.Tensor], scaling: float = 1.0) -> None:
    wanted = expected(tensors, scaling)
    assert all(torch.equal(wanted[name], one) for name, one in worker.served(number).items())


@pytest.mark.parametrize("layers", [("0.q", "0.k", "0.o", "1.o"), ("0.k", "1.o")])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_later_pushes_of_a_form_are_written_without_the_layers(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...], scaling: float
) -> None:
    worker, old = Worker(monkeypatch), 0
    for push in range(6):
        tensors = adapter(*layers)
        before = worker.slots.writes
        new = worker.push(tensors, scaling)
        check(worker, new, tensors, scaling)
        assert worker.slots.modules == worker.slots.layers
        assert (worker.slots.writes == before) == (push >= SLOTS), "a slot is written by the layers once"
        if old:
            worker.slots.remove(old)
        old = new


def test_an_adapter_that_vllm_evicted_is_scaled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    for _ in range(3):  # vLLM loads the first of a form itself
        tensors = adapter("0.q", "0.k", "1.o")
        number = worker.push(tensors, scaling=2.5)
        for _ in range(2):
            worker.slots.remove(number)
            worker.load(number)
            check(worker, number, tensors, scaling=2.5)
        worker.slots.remove(number)


def test_a_slot_that_held_another_form_is_written_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    wide, narrow = adapter("0.q", "0.k", "0.o", "1.o", rank=4), adapter("0.o", rank=2)
    for tensors in (narrow, wide, narrow, wide, narrow):  # all in the first slot
        before = worker.slots.writes
        number = worker.push(tensors)
        check(worker, number, tensors)
        assert worker.slots.writes > before
        worker.slots.remove(number)


def test_a_slot_that_vllm_filled_from_a_folder_is_written_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    worker.slots.remove(worker.push(adapter("0.o")))
    fused = {"0.qkv": Weights([torch.ones(4, 6)] * 2, [torch.ones(6, 4)] * 2, 1)}
    worker.slots._registered_adapters.cache[99] = Model(99, fused)
    worker.slots.activate_adapter(99)
    worker.slots.remove(99)
    tensors = adapter("0.o")
    check(worker, worker.push(tensors), tensors)


def test_layers_that_compute_with_an_adapter_are_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Layer.set_lora
    monkeypatch.setattr(Layer, "set_lora", lambda layer, index, a, b: own(layer, index, a * 1.0, b))
    worker, old = Worker(monkeypatch), 0
    for _ in range(5):
        tensors, before = adapter("0.o", "1.o"), worker.slots.writes
        new = worker.push(tensors)
        check(worker, new, tensors)
        assert worker.slots.writes >= before + 2
        if old:
            worker.slots.remove(old)
        old = new
