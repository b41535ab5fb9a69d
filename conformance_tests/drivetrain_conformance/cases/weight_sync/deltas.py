"""Pushes of changed elements only."""

from __future__ import annotations

from pathlib import Path

import torch

from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain_conformance.assets.weight_sources import tensors_of, write_checkpoint
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves
from drivetrain_conformance.cases.weight_sync.pushing import check_a_full_disk_changes_nothing
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import WeightSync


@case(Capability.WEIGHTS_PLUGIN, changes_weights=True)
async def only_what_changed_is_pushed(bench: Bench) -> None:
    """A delta carries only changed values, and afterwards the engine answers as the new weights do.

    A delta that finds the disk full fails; the engine keeps its weights, and no file is left. An engine whose weights
    cannot be read back may get every tensor whole, but then each time, and no byte more.
    """
    await check_a_full_disk_changes_nothing(bench, "delta")
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        whole = await sync.push(version="whole")
        assert whole.sent_nbytes >= whole.nbytes
        mixed = _take_a_third(bench, policy)
        wholes: list[bool] = []
        for version, share in ((NEW, 0.7), ("again", 0.1)):
            sent = (await sync.push(version=version)).sent_nbytes
            wholes.append(sent == whole.sent_nbytes)
            assert sent < share * whole.sent_nbytes or (wholes[-1] and not bench.claims(Capability.READ_WEIGHTS)), (
                f"push {version!r} sent {sent} bytes, and a push of all tensors {whole.sent_nbytes}"
            )
            await check_serves(bench, mixed, version)
        assert len(set(wholes)) == 1, "of two pushes one sent all tensors, and the other one what changed"


@case(Capability.WEIGHTS_PLUGIN, Capability.WEIGHTS_DISK, changes_weights=True)
async def a_delta_is_never_added_to_other_weights(bench: Bench) -> None:
    """If the engine got other weights since the last push, the next push by delta sends every tensor whole."""
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        await sync.push(version="whole")
        await bench.engine.load_weights_from_disk(str(bench.other_weights()), "another")
        mixed = _take_a_third(bench, policy)
        result = await sync.push(version=NEW)
        assert result.sent_nbytes >= result.nbytes
        await check_serves(bench, mixed, NEW)


@case(Capability.WEIGHTS_PLUGIN, Capability.SLEEP_WEIGHTS, changes_weights=True)
async def a_delta_is_never_added_to_weights_that_slept(bench: Bench) -> None:
    """After a sleep of the weights a push by delta sends every tensor whole."""
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        await bench.engine.sleep(tags=[MemoryTag.WEIGHTS])
        await bench.engine.wake_up(tags=[MemoryTag.WEIGHTS])
        await sync.push(version="whole")
        await bench.engine.sleep(tags=[MemoryTag.WEIGHTS])
        await bench.engine.wake_up(tags=[MemoryTag.WEIGHTS])
        mixed = _take_a_third(bench, policy)
        result = await sync.push(version=NEW)
        assert result.sent_nbytes >= result.nbytes
        await check_serves(bench, mixed, NEW)


def _take_a_third(bench: Bench, policy: dict[str, torch.Tensor]) -> Path:
    """Set a third of the values to those of other weights; return a folder with the result."""
    other = tensors_of(bench.other_weights())
    for name, tensor in policy.items():
        tensor.view(-1)[::3] = other[name].view(-1)[::3]
    return write_checkpoint(bench.folder("mixed"), bench.model, policy)
