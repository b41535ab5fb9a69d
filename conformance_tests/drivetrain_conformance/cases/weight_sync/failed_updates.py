"""Updates that fail, are cancelled or run out of time."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pause_and_sleep import PAUSE_CAPABILITY
from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    DeadlineExceeded,
    WeightTransferFailed,
    WeightVerifyFailed,
)
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.sampling import SamplingParams
from drivetrain.types.weights import (
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assertions.weight_checks import check_made_by, load_all
from drivetrain_conformance.assets.weight_sources import Between, a_matrix, from_disk, tensors_of, with_another_digest
from drivetrain_conformance.cases.weight_sync.checks import (
    NEW,
    Late,
    check_boundary,
    check_dirty,
    check_recovers,
    check_serves,
    check_spans,
    check_state,
    same_label_again,
    same_weights_again,
)
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.holder_process import LIFTED_S, holder_of
from drivetrain_conformance.harness.testbench import Bench, TooLate, in_time
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync, make_plan


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def an_update_that_breaks_off_leaves_the_engine_dirty(bench: Bench) -> None:
    """When the sender is lost between two buckets the engine refuses to serve until a full update is committed."""
    engine = bench.engine
    version = engine.get_weight_version()
    await same_weights_again(bench)
    plan = make_plan((await engine.weight_manifest()).tensors, 1)
    with raises(WeightTransferFailed, "half of an update") as failure:
        async with engine.weight_update(from_disk(bench.other_weights(), plan=plan)) as update:
            await update.load(range(update.buckets // 2))
            raise ConnectionError("the trainer was lost")
    assert "the trainer was lost" in str(failure.error)
    await check_dirty(bench, version)
    await check_recovers(bench)
    version = engine.get_weight_version()
    async with holder_of(engine) as holder:
        if mode := next((mode for mode in PauseMode if bench.claims(PAUSE_CAPABILITY[mode])), None):
            await holder.pause(mode)
        await holder.begin_update(from_disk(bench.model, plan=plan))
        holder.kill()
        await _is_given_up(engine)
    await check_dirty(bench, version)
    await check_recovers(bench)  # the pause has ended with its holder


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def the_push_after_one_that_broke_off_just_works(bench: Bench) -> None:
    """A push that breaks between two buckets leaves the engine dirty; the same connection's next push mends it."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    between = Between(engine, buckets=1)
    async with WeightSync.connect(tensors_of(other), between, "shared_memory", bucket_bytes=1) as sync:
        with raises(WeightTransferFailed, "a part of an update"):
            await sync.push(version="broken")
        await check_dirty(bench, version)
        between.buckets = None
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_cancelled_update_leaves_the_engine_dirty(bench: Bench) -> None:
    """Cancelling the trainer's task during an update leaves the engine dirty, and a full push mends it."""
    engine = bench.engine
    version = engine.get_weight_version()
    await same_weights_again(bench)
    begun = asyncio.Event()

    async def stuck() -> None:
        async with engine.weight_update(from_disk(bench.other_weights())):
            begun.set()
            await asyncio.Event().wait()

    update = asyncio.create_task(stuck())
    async with within():
        await begun.wait()
    update.cancel()
    with raises(asyncio.CancelledError, "a cancelled update"):
        await update
    await check_dirty(bench, version)
    await check_recovers(bench)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def an_incomplete_update_is_not_committed(bench: Bench) -> None:
    """An update that leaves out a bucket, or loads one that does not exist, leaves the engine dirty."""
    engine = bench.engine
    version = engine.get_weight_version()
    with raises(WeightTransferFailed, "an update without any bucket"):
        async with engine.weight_update(from_disk(bench.other_weights())):
            pass
    await check_dirty(bench, version)
    with raises(WeightTransferFailed, "a bucket that is not in the plan"):
        async with engine.weight_update(from_disk(bench.other_weights())) as update:
            await load_all(update)
            await update.load([update.buckets])
    await check_dirty(bench, version)
    await check_recovers(bench)


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def what_arrives_otherwise_than_sent_is_found(bench: Bench) -> None:
    """A tensor with a wrong digest is named, its version is not published, and the engine is dirty.

    Matrices, norms and biases are tried, one of each kind of tensor in a layer.
    """
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    between = Between(engine)
    async with WeightSync.connect(tensors_of(other), between, "shared_memory") as sync:
        for name in _one_of_each_kind(await engine.weight_manifest()):
            between.change = partial(with_another_digest, name=name)
            with raises(WeightVerifyFailed, f"a tensor that is not what was sent ({name})") as failure:
                await sync.push(version="bad")
            assert failure.error.tensors == (name,)
            assert name in str(failure.error)
            await check_dirty(bench, version)
        between.change = lambda request: request
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_IN_PROCESS, changes_weights=True)
async def a_source_that_is_written_to_during_a_push_is_found(bench: Bench) -> None:
    """A push whose source is modified while it is read fails verification, naming the tensor."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    tensors, between = tensors_of(other), Between(engine)
    async with WeightSync.connect(tensors, between, "in_process") as sync:
        name = a_matrix(await engine.weight_manifest())

        def trains_on(request: WeightUpdateRequest) -> WeightUpdateRequest:
            tensors[name][0, 0] += 1
            return request

        between.change = trains_on
        with raises(WeightVerifyFailed, "a tensor that changed on the way") as failure:
            await sync.push(version="bad")
        assert failure.error.tensors == (name,)
        await check_dirty(bench, version)
        tensors[name].copy_(tensors_of(other)[name])
        between.change = lambda request: request
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, Capability.PAUSE_WAIT, own_engine=True, slow=True)
async def every_step_of_an_update_has_a_deadline(bench: Bench) -> None:
    """A step beyond timeouts.weight_update raises DeadlineExceeded; the engine is dirty only if the update began."""
    later = 2**bench.attempt
    limit, other = 0.4 * later, bench.other_weights()
    async with bench.open(timeouts={"weight_update": limit}) as engine:
        version, prompts = engine.get_weight_version(), bench.prompts(4 * later, engine=engine)
        long = SamplingParams(
            max_new_tokens=engine.model_info.context_length - len(prompts[0]),
            temperature=0,
            ignore_eos=engine.supports(Capability.IGNORE_EOS),
        )
        # No later request is waited for: an engine that runs few at once would first end these.
        async with bench.in_flight(prompts, long, engine, tokens=0) as running:
            waits = await _prepared(engine, from_disk(other, "late", mode="wait"))
            with in_time(running), raises(DeadlineExceeded, "a wait beyond its deadline"):
                await engine.update_named_weights(waits)
            check_state(engine, EngineState.READY)
            assert engine.get_weight_version() == version
            if running.done():
                raise TooLate("the requests ended, so nothing was waited for")
            check_made_by(bench, (await running).completions[:1], bench.model, engine)
        steps = await _prepared(engine, from_disk(other))
        with raises(DeadlineExceeded, "a step beyond its deadline"):
            async with engine.weight_update(steps) as update:
                took = min([await _seconds(load_all(update)) for _ in range(3)])  # the first time is slow
                often = math.ceil(5 * limit / took)
                for more in (1, 5, 25):  # the measured time may have been inflated by other work
                    await update.load(list(range(update.buckets)) * often * more)
        check_state(engine, EngineState.DIRTY)
        assert engine.get_weight_version() == version
        try:
            await engine.load_weights_from_disk(str(other), NEW)
        except DeadlineExceeded as error:
            raise TooLate("the machine is too busy for an update within the deadline") from error
        check_state(engine, EngineState.READY)
        assert engine.get_weight_version() == NEW
        check_made_by(bench, await bench.greedy(prompts[:3], engine=engine), other, engine)


async def _prepared(engine: InferenceEngine, request: WeightUpdateRequest) -> WeightUpdateRequest:
    """Prepare an update ahead: a deadline here would change nothing, so a busy machine must not come to it later."""
    try:
        await engine.prepare_weight_update(request)
    except DeadlineExceeded as error:
        check_state(engine, EngineState.READY)
        raise TooLate("the machine is too busy to prepare an update within the deadline") from error
    return request


async def _is_given_up(engine: InferenceEngine) -> None:
    """Return once nothing is left of an update whose sender was killed, nor of its pause."""
    async with within("the pause and the update of a holder that was killed", LIFTED_S):
        while engine.state is not EngineState.DIRTY or engine.status.paused is not None:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)


async def _seconds(step: Coroutine[object, object, None]) -> float:
    begun = time.monotonic()
    await step
    return time.monotonic() - begun


@case(
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    Capability.VERSION_SPANS,
    changes_weights=True,
    slow=True,
)
async def requests_outlive_an_update_that_breaks_off(bench: Bench) -> None:
    """Requests in flight and new ones wait while the engine is dirty, and complete once an update is committed."""
    engine, other = bench.engine, bench.other_weights()
    await same_weights_again(bench)
    await same_label_again(engine)

    async with _outlived(bench, bench.model, other, "recovered") as late:
        with raises(WeightTransferFailed, "an update that broke off"):
            async with engine.weight_update(from_disk(other)):
                late.arrive()
                assert await late.is_held(), "a request was served in the middle of an update"
                raise ConnectionError("the trainer was lost")

    async with holder_of(engine) as holder, _outlived(bench, other, bench.model, "again") as late:
        await holder.begin_update(from_disk(bench.model))
        late.arrive()
        assert await late.is_held(), "a request was served in the middle of another process's update"
        holder.kill()
        await _is_given_up(engine)


@asynccontextmanager
async def _outlived(bench: Bench, old: Path, new: Path, recovered: str) -> AsyncGenerator[Late, None]:
    """Require requests to wait while the block leaves the engine dirty, and to complete once ``new`` is pushed.

    Yields a request that arrives in the block.
    """
    engine = bench.engine
    version = engine.get_weight_version()
    async with bench.in_flight(bench.prompts(2), bench.long()) as running, Late(bench) as late:
        yield late
        await check_dirty(bench, version)
        assert await late.is_held(), "a request was served by weights of no version"
        with in_time(running):
            assert not running.done(), "requests went on with weights of no version"
        await engine.load_weights_from_disk(str(new), recovered)
        async with within():
            completions = (await running).completions
        for completion in completions:
            check_spans(completion, version, recovered)
            check_boundary(bench, completion, old, new)
        check_made_by(bench, [await late.completion()], new)
    await check_serves(bench, new, recovered)


def _one_of_each_kind(manifest: WeightManifest) -> list[str]:
    """Return the names of floating-point tensors that no other is tied to, one of each kind of tensor in a layer."""
    tied = set(manifest.aliases.values())
    kinds: dict[str, list[str]] = {}
    for spec in manifest.tensors:
        if "float" in spec.dtype and spec.name not in tied:
            kinds.setdefault(re.sub(r"\d+", "", spec.name), []).append(spec.name)
    return [names[len(names) // 2] for names in kinds.values()]
