"""Engines whose processes are killed or frozen: every caller gets an error in time, and the trainer goes on.

The engine always runs in a host process here, which finds the backend through its entry point.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import psutil

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DeadlineExceeded, DrivetrainError, EngineDied, EngineStartError, EngineStateError
from drivetrain.process.process_tree import runs
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.sampling import SamplingParams
from drivetrain.types.weights import DiskSource, WeightUpdateRequest
from drivetrain_conformance.assertions.leftovers import Holdings, check_nothing_left, temporary_folder
from drivetrain_conformance.assertions.memory_use import processes_of
from drivetrain_conformance.assertions.refusals import raises, refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assets.made_adapters import make_adapter, tensors_in
from drivetrain_conformance.assets.weight_sources import Between, tensors_of
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, check_held
from drivetrain_conformance.harness.time_limits import LIMIT, Countdown, slowdown, within
from drivetrain_weight_sync import LoraSync, WeightSync
from drivetrain_weight_sync.transports.updatable_engine import UpdateUnderWay

HEARTBEAT: Final = 2.0
"""Heartbeat timeout, in seconds, in the case that freezes a host."""


# While requests are in flight -----------------------------------------------------------------------------------------


@case(own_engine=True, slow=True)
async def a_host_killed_while_it_generates(bench: Bench) -> None:
    """When the host is killed every caller gets EngineDied in time; the trainer lives on and can open another."""
    async with _hosted(bench) as engine:
        prompts = bench.prompts(3, engine=engine)
        before = await bench.greedy(prompts, engine=engine)
        async with _callers(engine, [_generating(engine, prompts) for _ in range(3)]):
            _signal_host(engine, signal.SIGKILL)
        await _is_failed(engine, prompts[0])
    async with bench.open() as another:
        check_same(bench, await bench.greedy(prompts, engine=another), before, another)


@case(Capability.STREAMING, own_engine=True)
async def a_host_killed_while_it_streams(bench: Bench) -> None:
    """When the host is killed every reader of a stream gets EngineDied in time, however much it has read."""
    async with _hosted(bench) as engine:
        prompts = bench.prompts(3, engine=engine)
        _ = [chunk async for chunk in engine.generate_stream(prompts, _long(engine, 2))]
        async with _callers(engine, [_streaming(engine, prompts) for _ in range(2)]):
            _signal_host(engine, signal.SIGKILL)
        await _is_failed(engine, prompts[0])


@case(Capability.PAUSE_WAIT, own_engine=True)
async def a_host_killed_while_it_is_paused(bench: Bench) -> None:
    """When a paused host is killed, a request that waits for the pause to end gets a typed error."""
    async with _hosted(bench) as engine:
        prompt = bench.prompt(engine=engine)
        await engine.pause_generation(PauseMode.WAIT)
        waiting = asyncio.create_task(engine.generate(prompt, _long(engine)))
        await asyncio.sleep(0.05)
        _signal_host(engine, signal.SIGKILL)
        async with within():
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(error, EngineDied), f"the request that waited ended in {error!r}"
        await _is_failed(engine, prompt)


@case(Capability.PAUSE_IN_PLACE, own_engine=True)
async def a_host_killed_with_frozen_requests(bench: Bench) -> None:
    """When the host is killed, requests that a pause had frozen get EngineDied in time."""
    async with _hosted(bench) as engine:
        prompts = bench.prompts(2, engine=engine)
        await engine.pause_generation(PauseMode.IN_PLACE)
        await engine.continue_generation()
        async with bench.in_flight(prompts, _long(engine), engine) as task:
            await engine.pause_generation(PauseMode.IN_PLACE)
            await check_held(engine, task)
            _signal_host(engine, signal.SIGKILL)
            with refused(EngineDied, naming=str(engine.host_pid)):
                async with within():
                    await task
        await _is_failed(engine, prompts[0])


@case(own_engine=True)
async def a_frozen_host(bench: Bench) -> None:
    """A stopped host counts as dead after one heartbeat timeout of silence; no caller waits longer."""
    async with _hosted(bench, timeouts={"heartbeat": HEARTBEAT}) as engine:
        prompts = bench.prompts(2, engine=engine)
        async with _callers(engine, [_generating(engine, prompts) for _ in range(2)]):
            _signal_host(engine, signal.SIGSTOP)
        await _is_failed(engine, prompts[0])


@case(own_engine=True)
async def a_process_of_the_engine_that_is_killed(bench: Bench) -> None:
    """When the largest process below the host is killed, calls are answered correctly or end in EngineDied.

    If the engine has no process below its host, the host is killed.
    """
    async with _hosted(bench) as engine:
        prompts = bench.prompts(2, engine=engine)
        before = await bench.greedy(prompts, engine=engine)
        host, *below = processes_of(engine)
        victim = max(below, key=lambda process: process.memory_info().rss, default=host)
        victim.kill()
        countdown = Countdown(5)
        try:
            while countdown.left():
                async with within():
                    check_same(bench, await bench.greedy(prompts, engine=engine), before, engine)
                await asyncio.sleep(0.05)
        except EngineDied:
            await _is_failed(engine, prompts[0])
        else:
            assert victim is not host, "the host was killed, and the engine still answers"


# At other moments -----------------------------------------------------------------------------------------------------


@case(own_engine=True)
async def a_host_killed_while_it_starts(bench: Bench) -> None:
    """If the host is killed during start, start() fails in time with EngineStartError, and leaves nothing behind."""
    with temporary_folder(bench.folder("temporary")):
        before = Holdings.now()
        engine = bench.create(isolation="process")
        starting = asyncio.create_task(engine.start())
        async with within():
            while engine.host_pid is None and not starting.done():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
        if not starting.done():
            _signal_host(engine, signal.SIGKILL)
        with refused(EngineStartError, otherwise="it started, though its host was killed"):
            async with within():
                await starting
        assert engine.state is EngineState.FAILED
        await engine.teardown()
        await check_nothing_left(before)


@case(Capability.SLEEP_KV_CACHE, own_engine=True)
async def a_host_killed_while_it_sleeps(bench: Bench) -> None:
    """The death of a sleeping engine is noticed without any call to it; it cannot be woken."""
    async with _hosted(bench) as engine:
        prompt = bench.prompt(engine=engine)
        await engine.sleep([MemoryTag.KV_CACHE])
        _signal_host(engine, signal.SIGKILL)
        await _is_failed(engine, prompt)


@case(own_engine=True, slow=True)
async def a_host_killed_while_it_is_closed(bench: Bench) -> None:
    """If the host is killed while it is being closed, closing raises no error, and leaves nothing behind."""
    async with _hosted(bench) as engine:
        closing = asyncio.create_task(engine.teardown())
        await asyncio.sleep(0)
        _signal_host(engine, signal.SIGKILL)
        async with within():
            await closing
            await engine.teardown()
        assert engine.state is EngineState.CLOSED


@case(Capability.WEIGHTS_DISK, own_engine=True)
async def a_host_killed_during_an_update(bench: Bench) -> None:
    """If the engine is killed during an update, the update ends in EngineDied, and the old version stays published."""
    async with _hosted(bench) as engine:
        own = engine.get_weight_version()
        request = WeightUpdateRequest(version="never", source=DiskSource(path=str(bench.other_weights())))
        with refused(EngineDied, otherwise="the update was committed by a dead engine"):
            async with within(), engine.weight_update(request) as update:
                _signal_host(engine, signal.SIGKILL)
                for index in range(update.buckets):
                    await update.load([index])
        assert engine.get_weight_version() == own
        await _is_failed(engine, bench.prompt(engine=engine))


@case(Capability.WEIGHTS_SHARED_MEMORY, own_engine=True)
async def a_host_killed_during_a_push(bench: Bench) -> None:
    """If the engine is killed during a push through shared memory, the push ends in EngineDied and frees the memory."""
    before = Holdings.now()
    async with _hosted(bench) as engine:
        own = engine.get_weight_version()
        doomed = _Doomed(engine)
        async with WeightSync.connect(tensors_of(bench.model), doomed, "shared_memory") as sync:
            with refused(EngineDied, otherwise="the push was committed by a dead engine"):
                async with within():
                    await sync.push(version="never")
        assert doomed.began, "the push ended before the update began"
        assert engine.get_weight_version() == own
        await _is_failed(engine, bench.prompt(engine=engine))
    left = Holdings.now().shared_memory_since(before)
    assert not {name for name in left if "drivetrain" in name}, f"in shared memory lie {sorted(left)}"


@case(
    Capability.LORA,
    Capability.WEIGHTS_LORA_TENSORS,
    Capability.WEIGHTS_SHARED_MEMORY,
    config={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    own_engine=True,
    slow=True,
)
async def a_host_killed_while_it_takes_an_adapter(bench: Bench) -> None:
    """If the engine is killed while it takes an adapter as tensors, the push ends in EngineDied and frees the memory.

    A frozen engine lets the push end in DeadlineExceeded after ``timeouts.control``, or in EngineDied.
    """
    adapter = tensors_in(make_adapter(bench.model, bench.folder("adapter"), seed=1).path)
    before = Holdings.now()
    for number, ends in ((signal.SIGKILL, (EngineDied,)), (signal.SIGSTOP, (EngineDied, DeadlineExceeded))):
        async with _hosted(bench, timeouts={"control": HEARTBEAT * 2**bench.attempt}) as engine:
            doomed = _Doomed(engine, number)
            async with LoraSync.connect(adapter, doomed, "a", "shared_memory") as sync:
                doomed.spared = True
                try:
                    await sync.push(version="first")
                except DeadlineExceeded as error:
                    raise TooLate("the machine is too busy for a push within timeouts.control") from error
                doomed.spared = False
                with raises(ends, f"a push to an engine that got {number.name}"):
                    async with within():
                        await sync.push(version="never")
            assert doomed.began, "the push ended before the update began"
            assert engine.get_weight_version() == "first"
            if number is signal.SIGSTOP:
                _signal_host(engine, signal.SIGKILL)
    left = Holdings.now().shared_memory_since(before)
    assert not {name for name in left if "drivetrain" in name}, f"in shared memory lie {sorted(left)}"


# ----------------------------------------------------------------------------------------------------------------------


class _Doomed(Between):
    """Signals the engine's host as soon as a weight update has begun, or an adapter was sent."""

    began = False
    spared = False
    """If true, no signal is sent."""

    def __init__(self, engine: InferenceEngine, number: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(engine)
        self._victim = engine
        self._number = number

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        if not self.spared:
            self.began = True
            _signal_host(self._victim, self._number)
        await super().update_named_weights(request)

    @asynccontextmanager
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[UpdateUnderWay, None]:
        async with super().weight_update(request, at_once=at_once) as update:
            self.began = True
            _signal_host(self._victim, signal.SIGKILL)
            yield update


Call = Callable[[], Coroutine[object, object, object]]


@asynccontextmanager
async def _hosted(bench: Bench, **fields: object) -> AsyncGenerator[InferenceEngine, None]:
    """Open an engine in a host process; require that none of its processes is left at the end."""
    processes: list[psutil.Process] = []
    try:
        async with bench.open(isolation="process", **fields) as engine:
            assert engine.host_pid is not None
            processes = processes_of(engine)
            yield engine
            async with within():
                await engine.teardown()
    finally:
        left = await _left(processes)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert not left, f"of the engine's processes these are left: {left}"


def _signal_host(engine: InferenceEngine, number: signal.Signals) -> None:
    assert engine.host_pid is not None
    os.kill(engine.host_pid, number)


async def _left(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after some time; return early once none does."""
    countdown = Countdown()
    while (left := [process for process in processes if runs(process)]) and countdown.left():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return left


def _long(engine: InferenceEngine, tokens: int = 800) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS))


def _generating(engine: InferenceEngine, prompts: Sequence[Sequence[int]]) -> Call:
    asked, params = [list(prompt) for prompt in prompts], _long(engine)
    return lambda: engine.generate(asked, params)


def _streaming(engine: InferenceEngine, prompts: Sequence[Sequence[int]]) -> Call:
    asked, params = [list(prompt) for prompt in prompts], _long(engine)

    async def read() -> None:
        async for _ in engine.generate_stream(asked, params):
            pass

    return read


@asynccontextmanager
async def _callers(engine: InferenceEngine, calls: Sequence[Call]) -> AsyncGenerator[None, None]:
    """Call the engine again and again while the block kills it; each caller must get an error, and state FAILED.

    The event loop must not be blocked meanwhile.
    """
    doomed = False
    longest = 0.0

    async def ask(call: Call) -> tuple[bool, DrivetrainError, EngineState]:
        while True:
            begun_alive = not doomed
            try:
                await call()
            except DrivetrainError as error:
                return begun_alive, error, engine.state

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, (time.monotonic() - before) / slowdown())

    asking = [asyncio.create_task(ask(call)) for call in calls]
    ticking = asyncio.create_task(tick())
    try:
        async with within():
            while not ((await engine.stats()).running or any(task.done() for task in asking)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        yield
        doomed = True
        async with within():
            ends = await asyncio.gather(*asking)
    finally:
        for task in (*asking, ticking):
            task.cancel()
        await asyncio.wait([*asking, ticking])
    for begun_alive, error, state in ends:
        assert state is EngineState.FAILED, f"when a caller got {error!r}, the engine was {state.value}"
        when = "that was under way" if begun_alive else "after the death"
        assert isinstance(error, EngineDied), f"a call {when} ended in {error!r}"
        assert str(engine.host_pid) in str(error), f"the error does not name the process: {error}"
    assert longest < LIMIT / 3, f"the event loop stood still for {longest:.1f} s"


async def _is_failed(engine: InferenceEngine, prompt: list[int]) -> None:
    """Assert that the engine failed for good: each call says at once that it died and why, and it can be closed."""
    async with within():
        while engine.state is not EngineState.FAILED:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    assert engine.describe().state.startswith("failed (")
    why = engine.status.why
    assert why, "the engine does not say why it failed"
    for call in (
        lambda: engine.generate(prompt, SamplingParams(max_new_tokens=1)),
        engine.stats,
        engine.pause_generation,
        engine.continue_generation,
        engine.sleep,
        engine.wake_up,
        lambda: engine.load_weights_from_disk("nowhere", "never"),
        engine.start,
    ):
        await _died(call(), why)
    async with within():
        await engine.teardown()
    assert engine.describe().state == "closed"
    await _died(engine.generate(prompt, SamplingParams(max_new_tokens=1)), why)


async def _died(asked: Coroutine[object, object, object], why: str) -> None:
    """Require a call to end in time with EngineDied and the reason."""
    try:
        with refused(EngineDied, naming=why, otherwise="a dead engine did what it was asked to do"):
            async with within():
                await asked
    except EngineStateError as error:
        raise AssertionError(f"a call after the death is refused for the engine's state alone: {error!r}") from error
