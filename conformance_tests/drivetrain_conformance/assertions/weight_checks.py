"""Checks of the weights that an engine holds and answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.types.outputs import Completion
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.assets.weight_sources import raw_bytes
from drivetrain_conformance.harness.testbench import Bench


def check_made_by(
    bench: Bench, completions: Sequence[Completion], model: Path, engine: InferenceEngine | None = None
) -> None:
    """Raise unless every token of these greedy completions is the choice of ``model``."""
    for completion in completions:
        check_greedy(bench, completion, engine, model)


async def check_holds(engine: InferenceEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every tensor of the engine, read from all its ranks, equals the trainer's."""
    for spec in (await engine.weight_manifest()).tensors:
        read = await engine.get_weights_by_name(spec.name)
        assert read.data == raw_bytes(tensors[spec.name]), f"{spec.name} is not what was pushed"


async def load_all(update: WeightTransaction) -> None:
    """Load every bucket, one by one."""
    for index in range(update.buckets):
        await update.load([index])
