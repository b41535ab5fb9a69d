"""Tracing SGLang's loader where it derives tensors from loaded ones, and freezing requests."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import EngineOutOfMemory
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_sglang.in_engine.worker import Worker, tensors_of
from drivetrain_weight_sync.tracing.derived_tensors import Derived
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

MANIFEST = WeightManifest((TensorSpec("kv_b_proj", "float32", (6, 4)), TensorSpec("norm", "float32", (3,))))


class Mla(nn.Module):
    """Loads as SGLang's models with MLA do, from release 0.5.17 on."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.randn(3), requires_grad=False)
        self.w_kc: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        names = [name for name, tensor in weights if self.get_parameter(name).data.copy_(tensor) is not None]
        self.post_load_weights(weight_names=names)

    def post_load_weights(self, weight_names: list[str] | None = None) -> None:
        if weight_names is None or "kv_b_proj" in weight_names:
            half = self.kv_b_proj[:3].T.contiguous().T
            self.w_kc = half if self.w_kc is None else self.w_kc.copy_(half)


class Outer(nn.Module):
    """A model whose language model loads and derives, as in Kimi-VL."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Mla()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.language_model.load_weights(weights)


class OfModel(Worker):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def model(self) -> nn.Module:
        return self._model


@pytest.mark.parametrize("kind", [Mla, Outer])
def test_what_mla_derives_follows_the_projection_and_stays_where_it_is(kind: type[nn.Module]) -> None:
    model, fresh = kind(), Mla()
    inner = model.language_model if isinstance(model, Outer) else model
    assert isinstance(inner, Mla)
    first = {"kv_b_proj": torch.randn(6, 4), "norm": torch.randn(3)}
    inner.load_weights(first.items())
    worker = OfModel(model)
    target = TracedTarget(worker.load_weights, MANIFEST, model=model)
    target.derived = Derived(worker.after_loading(), target.storages)
    assert not target.converted, "the projection is copied, read back and verified as other tensors are"
    held = inner.w_kc
    pushed = {"kv_b_proj": torch.randn(6, 4), "norm": torch.randn(3)}
    target.begin()
    target.load(pushed.items())
    target.finish()
    fresh.load_weights(pushed.items())
    assert inner.w_kc is held
    assert held is not None
    assert fresh.w_kc is not None
    assert torch.equal(held, fresh.w_kc)
    assert "post_load_weights" not in vars(inner), "the model is as it was"


class OfScheduler(Worker):
    def __init__(self, scheduler: object) -> None:
        self._scheduler = scheduler


def test_the_watchdog_watches_no_frozen_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else SGLang ends itself once a pause in place has lasted ``watchdog_timeout``."""
    io_struct = SimpleNamespace(PauseGenerationReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    scheduler = SimpleNamespace(_engine_paused=False, enable_overlap=False, pause_generation=lambda asked: None)
    scheduler.cur_batch_for_debug = object()
    OfScheduler(scheduler).freeze(PauseMode.IN_PLACE)
    assert scheduler.cur_batch_for_debug is None


def test_a_wake_up_without_room_asks_the_memory_saver_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver ends the process if the driver refuses it memory: ``benchmarks/gpu/scarce_memory.py`` shows it."""
    asked: list[list[str]] = []
    io_struct = SimpleNamespace(ResumeMemoryOccupationReqInput=lambda tags: tags)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    worker = Worker(SimpleNamespace(tp_group=SimpleNamespace(world_size=1)))
    monkeypatch.setattr(worker, "_memory", None, raising=False)
    monkeypatch.setattr(worker, "_dispatch", asked.append)
    both = {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
    worker.asleep = set(both)
    worker.bytes_asleep = {MemoryTag.WEIGHTS: 2_000_000_000, MemoryTag.KV_CACHE: 1_000_000_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2_500_000_000, 80_000_000_000))
    with pytest.raises(EngineOutOfMemory, match=r"3\.00 GB are wanted of the GPU, and 2\.50 GB are free.*sleeps on"):
        worker.wake_up(frozenset(both))
    assert not asked
    assert worker.asleep == both
    worker.wake_up(frozenset({MemoryTag.WEIGHTS}))
    assert asked == [["weights"]]
    assert worker.asleep == {MemoryTag.KV_CACHE}


class Quantised(nn.Module):
    """A layer of which an update fills the weight, and nothing the scale of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.k_scale = nn.Parameter(torch.ones(1), requires_grad=False)


class OfSavedMemory(OfScheduler):
    """Loses the values of memory that it releases, as SGLang's memory saver does."""

    def __init__(self, scheduler: object, model: Quantised) -> None:
        Worker.__init__(self, scheduler)
        self._quantised = model

    @property
    def model(self) -> nn.Module:
        return self._quantised

    def _dispatch(self, request: object) -> None:
        if request == "release":
            self._quantised.weight.zero_()
            self._quantised.k_scale.zero_()


def test_parameters_that_no_update_fills_outlast_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of a quantised model's cache were 0 after a sleep on a GPU: ``architectures.py --sleep`` shows it."""
    io_struct = SimpleNamespace(
        ReleaseMemoryOccupationReqInput=lambda tags: "release", ResumeMemoryOccupationReqInput=lambda tags: "resume"
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1_000, 1_000))
    one_rank, grammars = SimpleNamespace(world_size=1), SimpleNamespace(grammar_queue=[])
    model = Quantised()
    worker = OfSavedMemory(
        SimpleNamespace(tp_group=one_rank, waiting_queue=[], grammar_manager=grammars, is_fully_idle=lambda: True),
        model,
    )
    target = SimpleNamespace(storages=[model.weight.untyped_storage()])
    for name, value in {"_memory": None, "target": target, "receiver": Idle(), "writer": Idle()}.items():
        monkeypatch.setitem(vars(worker), name, value)
    worker.sleep(frozenset({MemoryTag.WEIGHTS}))
    assert not model.k_scale.any()
    worker.wake_up(frozenset({MemoryTag.WEIGHTS}))
    assert model.k_scale.all()
    assert not model.weight.any()


def test_the_tensors_of_a_pool_include_those_of_pools_that_it_holds() -> None:
    """gpt-oss and Gemma have a pool for each kind of attention, and a cache in eight bits lies in bytes."""
    kind: Any = type("Pool", (), {"__module__": "sglang.srt.mem_cache.memory_pool"})
    outer, inner = kind(), kind()
    outer.full_kv_pool, outer.layers, inner.owner = inner, [torch.ones(1)], outer
    inner.k_buffer = [torch.ones(2, dtype=torch.uint8), torch.ones(3)]
    assert sorted(len(tensor) for tensor in tensors_of(outer)) == [1, 2, 3]


class Idle:
    """A receiver and a writer that have nothing to do."""

    def forget_held(self) -> None: ...

    def stop(self) -> None: ...
