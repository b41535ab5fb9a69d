"""Weights read back and validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import (
    EngineStateError,
    InvalidRequest,
    WeightSyncError,
)
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import SharedMemorySource, WeightUpdateRequest
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assets.weight_sources import Between, a_matrix, raw_bytes, tensors_of
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves, same_weights_again
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import WeightSync
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.tensors.dtypes import dtype_of


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def tensors_read_back_are_those_that_were_pushed(bench: Bench) -> None:
    """get_weights_by_name() returns every tensor of the manifest bitwise as it was last pushed.

    The second push changes only the last bit of each value: a small step of training arrives, too.
    """
    engine, pushed = bench.engine, tensors_of(bench.other_weights())
    async with WeightSync.connect(pushed, engine, "shared_memory", bucket_bytes=1) as sync:
        with raises(InvalidRequest, "a tensor that the model has not") as refusal:
            await engine.get_weights_by_name("model.ghost.weight")
        assert "model.ghost.weight" in str(refusal.error)
        for name in pushed:  # a read after the push must not return the values from before it
            await engine.get_weights_by_name(name)
        await sync.push(version=NEW)
        await _check_all_read_back(engine, pushed)
        for tensor in pushed.values():
            if tensor.is_floating_point():
                tensor.view(_BITS[tensor.itemsize]).bitwise_xor_(1)
        await sync.push(version="one bit later")
        await _check_all_read_back(engine, pushed)


_BITS: Final = {2: torch.int16, 4: torch.int32}
"""Integers as wide as a float, by their bytes."""


async def _check_all_read_back(engine: InferenceEngine, pushed: Mapping[str, torch.Tensor]) -> None:
    manifest = await engine.weight_manifest()
    names = [*(spec.name for spec in manifest.tensors), *manifest.aliases]
    by_main_name = {manifest.aliases.get(name, name): tensor for name, tensor in pushed.items()}
    for name in names:
        read, tensor = await engine.get_weights_by_name(name), by_main_name[manifest.aliases.get(name, name)]
        assert read.spec.shape == tuple(tensor.shape), name
        assert read.data == raw_bytes(tensor), f"{name} is not what was pushed"


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_DISK)
async def weights_are_validated_where_they_lie(bench: Bench) -> None:
    """validate_weights() checks every tensor; check_weight_sync_integrity() accepts the right version and no other."""
    engine = bench.engine
    await same_weights_again(bench)
    report = await engine.validate_weights()
    assert report.ok, f"NaN in {report.nan}, infinity in {report.infinite}"
    assert report.checked == len((await engine.weight_manifest()).tensors)
    version = engine.get_weight_version()
    right = await engine.check_weight_sync_integrity(version)
    assert right.ok
    assert right.actual_version == version
    wrong = await engine.check_weight_sync_integrity("of-no-step")
    assert not wrong.ok
    assert wrong.actual_version == version


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def a_tensor_of_zeros_is_reported(bench: Bench) -> None:
    """validate_weights() names all-zero tensors without calling them wrong.

    It names tensors with infinity or NaN, which only a sender that does not check them can bring, and calls them wrong.
    """
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    async with WeightSync.connect(tensors, engine, "shared_memory") as sync:
        before = set((await engine.validate_weights()).all_zero)
        name = a_matrix(await engine.weight_manifest())
        tensors[name].zero_()
        await sync.push(version=NEW)
    report = await engine.validate_weights()
    assert set(report.all_zero) - before == {name}
    assert report.ok
    await _check_bad_values_are_reported(bench, name)


async def _check_bad_values_are_reported(bench: Bench, name: str) -> None:
    """Push infinity and NaN past the sender's own check, and look at the report."""
    engine, tensors = bench.engine, tensors_of(bench.model)
    for value in (math.inf, -math.inf, math.nan):
        between = Between(engine)
        between.change = partial(_with_value, name=name, tensor=tensors[name], value=value)
        async with WeightSync.connect(tensors, between, "shared_memory") as sync:
            try:
                await sync.push(version="bad")
            except WeightSyncError:
                return  # the engine itself refuses such values
        report = await engine.validate_weights()
        found = report.nan if math.isnan(value) else report.infinite
        assert found == (name,), f"{name} holds {value}; NaN is reported in {report.nan}, infinity in {report.infinite}"
        assert not report.ok


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_DISK, Capability.SLEEP_WEIGHTS, changes_weights=True)
async def weights_asleep_are_not_read(bench: Bench) -> None:
    """Reading a tensor that is asleep raises a typed error, and the engine lives on."""
    engine, other = bench.engine, bench.other_weights()
    await same_weights_again(bench)
    manifest = await engine.weight_manifest()
    name = a_matrix(manifest)
    await engine.get_weights_by_name(name)
    await engine.sleep([MemoryTag.WEIGHTS])
    assert await engine.weight_manifest() == manifest, "asleep, it holds other tensors"
    with raises(EngineStateError, "reading a tensor that has no memory"):
        await engine.get_weights_by_name(name)
    with raises(EngineStateError, "validating tensors that have no memory"):
        await engine.validate_weights()
    await engine.wake_up([MemoryTag.WEIGHTS])
    await engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)


def _with_value(request: WeightUpdateRequest, name: str, tensor: torch.Tensor, value: float) -> WeightUpdateRequest:
    """Write ``value`` into one element of a tensor in shared memory, and return the request with its digest."""
    source = request.source
    assert isinstance(source, SharedMemorySource)
    assert request.plan is not None
    index, placed = next(
        (index, placed)
        for index, bucket in enumerate(request.plan.buckets)
        for placed in bucket.tensors
        if placed.spec.name == name
    )
    changed = tensor.to(dtype_of(placed.spec), copy=True)
    changed.view(-1)[0] = value
    with open(source.path, "r+b") as arena:
        arena.seek(source.bucket_offsets[index] + placed.offset)
        arena.write(raw_bytes(changed))
    return request.model_copy(update={"digests": {**(request.digests or {}), name: digest(changed)}})
