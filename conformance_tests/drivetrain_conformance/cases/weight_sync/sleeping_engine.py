"""Pushes to an engine whose memory sleeps."""

from __future__ import annotations

from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    EngineStateError,
)
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assets.weight_sources import (
    tensors_of,
)
from drivetrain_conformance.cases.weight_sync.checks import check_serves, check_state
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import WeightSync


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, changes_weights=True)
async def rollouts_after_a_sleep_are_of_the_pushed_policy(bench: Bench) -> None:
    """Sleep, wake the weights, push, wake the cache, generate: answers come from the policy pushed in that step."""
    engine, policy = bench.engine, tensors_of(bench.model)
    async with WeightSync.connect(policy, engine, "shared_memory", bucket_bytes=100_000) as sync:
        await sync.push(version=engine.get_weight_version())  # the same weights, so this changes nothing
        both = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
        for step in (1, 2, 1):
            for name, tensor in tensors_of(bench.other_weights(step)).items():
                policy[name].copy_(tensor)
            await engine.sleep(both)
            with raises(EngineStateError, "a push to weights that have no memory") as refusal:
                await sync.push(version="too-early")
            assert refusal.error.state == "asleep"
            await engine.wake_up([MemoryTag.WEIGHTS])
            await sync.push(version=f"step-{step}")
            check_state(engine, EngineState.ASLEEP)
            await engine.wake_up([MemoryTag.KV_CACHE])
            await check_serves(bench, bench.other_weights(step), f"step-{step}")
