"""Decode steps whose tensors are fixed give the logits of plain steps, and their graphs are dropped in time.

A graph is replaced here by its computation, run again on the same tensors: that is what CUDA does of a captured one.
``benchmarks/gpu/conformance.py`` runs the suite with real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_transformers.decode_graphs import DecodeGraphs, can_be_fixed, columns_of_step, rows_of_step
from drivetrain_transformers.kv_cache import RunningCache
from drivetrain_transformers.model import LoadedModel

Computation = Callable[[], torch.Tensor]
PROMPTS = [[5, 6, 7], [9] * 40, list(range(10, 90)), [200, 4], [33] * 11, [1, 2, 3, 4, 5, 6]]


class Captured:
    """Counts the graphs that are captured and replayed; can make them wrong."""

    def __init__(self) -> None:
        self.made = 0
        self.replayed = 0
        self.error: Exception | None = None
        self.wrong = False

    def __call__(self, compute: Computation) -> Computation:
        if self.error is not None:
            raise self.error
        self.made += 1
        compute()

        def replay() -> torch.Tensor:
            self.replayed += 1
            logits = compute()
            return logits.flip(0) if self.wrong else logits

        return replay


class Batch:
    """A running batch, decoded with graphs and, on a cache of its own, without."""

    def __init__(self, architecture: str, prompts: list[list[int]]) -> None:
        self.captured = Captured()
        config = EngineConfig(backend="transformers", model=str(tiny_model(architecture)), device="cpu")
        self.model = LoadedModel.load(config, lambda stage: None)
        assert can_be_fixed(self.model.module)
        graphs = DecodeGraphs(self.model.module, self.captured)
        self.caches = [RunningCache(graphs), RunningCache()]
        self.ids: list[int] = []
        self.join(prompts)

    def join(self, prompts: list[list[int]]) -> None:
        nobody: list[str | None] = [None] * len(prompts)
        for cache in self.caches:
            past = self.model.empty_cache()
            self.model.prefill(prompts, nobody, past, 0, all_positions=False)
            cache.admit(past, list(range(len(prompts))), [len(prompt) for prompt in prompts])
        self.ids += [prompt[0] for prompt in prompts]

    def leave(self, row: int) -> None:
        for cache in self.caches:
            cache.release(row)
        self.ids[row] = self.ids[-1]
        self.ids.pop()

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode one token of each row; return the logits with and without graphs."""
        found = []
        for cache in self.caches:
            cache.open_column()
            found.append(self.model.decode(self.ids, [None] * len(self.ids), cache).logits.clone())
            cache.close_column()
        self.ids = found[1].argmax(-1).tolist()
        return found[0], found[1]

    def check(self, steps: int) -> None:
        for _ in range(steps):
            found, wanted = self.step()
            assert found.shape == wanted.shape
            assert torch.allclose(found, wanted, atol=2e-5), (found - wanted).abs().max()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3", "opt", "qwen3_moe"])
def test_replayed_steps_give_the_logits_of_plain_ones_while_rows_join_and_leave(architecture: str) -> None:
    batch = Batch(architecture, PROMPTS[:5])
    batch.check(70)
    assert batch.captured.replayed > 50
    for row in (1, 0):
        batch.leave(row)
        batch.check(6)
    batch.join([PROMPTS[5], PROMPTS[1]])
    batch.check(20)
    batch.join([list(range(5, 205))])  # moves to wider buffers
    batch.check(20)


def test_a_row_that_joins_reads_nothing_of_rows_that_were_computed_for_nobody() -> None:
    batch = Batch("qwen2", PROMPTS[:5])
    batch.check(10)
    weight = next(batch.model.module.parameters())
    kept = weight.clone()
    with torch.inference_mode():
        weight.fill_(float("nan"))
        found, _ = batch.step()
        weight.copy_(kept)
    assert found.isnan().all()
    for cache in batch.caches:
        for row in range(len(batch.ids) - 1, -1, -1):
            cache.erase(row)
            cache.release(row)
    batch.ids = []
    batch.join(PROMPTS[:6])
    batch.check(10)


def test_graphs_read_weights_that_changed_in_place() -> None:
    batch = Batch("qwen2", PROMPTS[:3])
    batch.check(10)
    made = batch.captured.made
    with torch.inference_mode():
        for parameter in batch.model.module.parameters():
            parameter.mul_(1.1)
    batch.check(10)
    assert batch.captured.made == made


def test_graphs_of_memory_that_moved_are_dropped() -> None:
    batch = Batch("qwen2", PROMPTS[:3])
    batch.check(10)
    made = batch.captured.made
    parameter = next(batch.model.module.parameters())
    parameter.data = parameter.data.clone() * 1.5
    batch.check(10)
    assert batch.captured.made == made + 1


def test_freeing_the_cache_drops_the_graphs() -> None:
    batch = Batch("qwen2", PROMPTS[:3])
    batch.check(10)
    made = batch.captured.made
    for cache in batch.caches:
        cache.clear(free=True)
    batch.ids = []
    batch.join(PROMPTS[:3])
    batch.check(10)
    assert batch.captured.made == made + 1


def test_a_step_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch("qwen2", PROMPTS[:3])
    batch.captured.error = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING, "drivetrain.transformers"):
        batch.check(10)
    assert batch.captured.made == 0
    assert [record.message for record in caplog.records] == [
        "a decode step cannot be captured as a CUDA graph: RuntimeError: operation not permitted when stream is "
        "capturing; steps run without graphs from here on, which takes more time for small batches"
    ]


def test_a_graph_that_gives_other_logits_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch("qwen2", PROMPTS[:3])
    batch.captured.wrong = True
    with caplog.at_level(logging.WARNING, "drivetrain.transformers"):
        batch.check(10)
    assert (batch.captured.made, batch.captured.replayed) == (1, 1)
    assert "gives other logits" in caplog.records[0].message


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("mistral", {"sliding_window": 16}),
        ("gemma3_text", {}),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_models_whose_steps_depend_on_more_are_left_alone(architecture: str, sizes: dict[str, Any]) -> None:
    config = EngineConfig(backend="transformers", model=str(tiny_model(architecture, **sizes)), device="cpu")
    assert not can_be_fixed(LoadedModel.load(config, lambda stage: None).module)


def test_shapes_are_rounded_up_to_few() -> None:
    assert [rows_of_step(rows, 512) for rows in (1, 3, 4, 5, 9, 64, 65, 100, 200, 512)] == [
        1,
        3,
        4,
        8,
        16,
        64,
        72,
        104,
        208,
        512,
    ]
    assert rows_of_step(5, 6) == 6
    assert columns_of_step(70, 129, 1000) == (64, 192)
    assert columns_of_step(0, 129, 150) == (0, 150)
