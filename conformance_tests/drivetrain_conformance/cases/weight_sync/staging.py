"""Pushes that are staged while the engine serves."""

from __future__ import annotations

import shutil

from drivetrain.errors import (
    InvalidRequest,
    WeightSyncError,
)
from drivetrain.types.capability import Capability
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assets.weight_sources import from_disk, nowhere, tensors_of, write_checkpoint
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves, unchanged
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def a_push_is_staged_while_the_engine_serves(bench: Bench) -> None:
    """A transfer by WeightSync leaves the old weights serving until finish(), and then serves the staged ones."""
    engine, other = bench.engine, bench.other_weights()
    version, source = engine.get_weight_version(), tensors_of(other)
    async with WeightSync.connect(source, engine, "shared_memory") as sync:
        given_up = await sync.start_weight_transfer(version="never")
        await given_up.cancel()
        handle = await sync.start_weight_transfer(version=NEW)
        async with within():
            await handle.wait()
        assert handle.progress == 1
        for tensor in source.values():
            tensor.zero_()  # finish() must apply the staged values, not the source's later ones
        await check_serves(bench, bench.model, version)
        await handle.finish()
        await check_serves(bench, other, NEW)
        with raises(WeightSyncError, "a transfer that was given up"):
            await given_up.finish()


@case(Capability.WEIGHT_STAGING, Capability.WEIGHTS_DISK, changes_weights=True)
async def weights_are_staged_while_generation_goes_on(bench: Bench) -> None:
    """A transfer by the engine leaves the old weights serving until finish(), and then serves the staged ones."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    staged = write_checkpoint(bench.folder("staged"), bench.model, tensors_of(other))
    handle = await engine.start_weight_transfer(from_disk(staged))
    await check_serves(bench, bench.model, version)
    async with within():
        await handle.wait()
    assert handle.staged
    shutil.rmtree(staged)  # finish() must apply the staged values, without the source
    await check_serves(bench, bench.model, version)
    await handle.finish()
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHT_STAGING, Capability.WEIGHTS_DISK)
async def a_cancelled_transfer_changes_nothing(bench: Bench) -> None:
    """A cancelled transfer, staged or not, cannot be finished; a transfer from a bad folder fails, naming it."""
    engine, other = bench.engine, bench.other_weights()
    early = await engine.start_weight_transfer(from_disk(other))
    async with unchanged(bench):
        await early.cancel()
        late = await engine.start_weight_transfer(from_disk(other))
        await late.wait()
        await late.cancel()
        for handle in (early, late):
            assert not handle.staged
            with raises(WeightSyncError, "a transfer that was given up"):
                await handle.finish()
        bad = await engine.start_weight_transfer(from_disk(nowhere(bench.models)))
        with raises((InvalidRequest, WeightSyncError), "a folder that is not there") as refusal:
            await bad.finish()
        assert "nowhere" in str(refusal.error)
