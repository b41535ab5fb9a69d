"""Helpers of several modules of this group: a push, sources, a port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import psutil
import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    WeightSyncError,
)
from drivetrain_conformance.assertions.full_disk import full_disk
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assets.weight_sources import (
    tensors_of,
    write_checkpoint,
)
from drivetrain_conformance.cases.weight_sync.checks import check_serves, check_state
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import Strategy, WeightInput, WeightSync

ONE_BUCKET: Final = 1 << 40


async def check_a_full_disk_changes_nothing(bench: Bench, strategy: Strategy | str) -> None:
    """Fill the disk for the folder of pushes: the push fails and the engine keeps its weights."""
    engine, directory, own = bench.engine, bench.folder("pushes"), bench.engine.get_weight_version()
    async with WeightSync.connect(tensors_of(bench.other_weights()), engine, strategy, directory=directory) as sync:
        with full_disk([psutil.Process()]), raises(WeightSyncError, "a push on a full disk") as failure:
            await sync.push(version="bad")
        assert str(directory) in str(failure.error), f"the error does not name the folder: {failure.error}"
        assert not list(directory.iterdir()), f"a push on a full disk left {list(directory.iterdir())}"
        check_state(engine, EngineState.READY)
        await check_serves(bench, bench.model, own)


async def holds_float32(engine: InferenceEngine) -> bool:
    """Return True if every float weight of the engine is a float32."""
    return {spec.dtype for spec in (await engine.weight_manifest()).tensors if "float" in spec.dtype} == {"float32"}


def widened(bench: Bench, narrow: dict[str, torch.Tensor]) -> Path:
    """Write a folder with the same values in float32."""
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in narrow.items()}
    return write_checkpoint(bench.folder("widened"), bench.other_weights(), tensors)


async def push_source(
    engine: InferenceEngine, source: WeightInput, version: str, bucket_bytes: int = ONE_BUCKET
) -> None:
    """Push once through shared memory."""
    async with WeightSync.connect(source, engine, "shared_memory", bucket_bytes=bucket_bytes) as sync:
        await sync.push(version=version)


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
