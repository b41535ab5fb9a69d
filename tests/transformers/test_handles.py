"""Handles: one engine used by other processes, and what becomes of it when one of them is gone."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import pickle
import shutil
import signal
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drivetrain import (
    DiskSource,
    EngineBusy,
    EngineDied,
    EngineHandle,
    EngineInternalError,
    EngineState,
    EngineStateError,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    MemoryTag,
    PauseMode,
    PromptLike,
    SamplingParams,
    WeightTransferFailed,
    WeightUpdateRequest,
    WireError,
    attach,
    create_engine,
)
from drivetrain.attached.connection import OwnerConnection
from drivetrain.backend.toolkit.owned_folder import OwnedFolder
from drivetrain.engine import listener
from drivetrain.engine.holder_calls import Claims, HolderCalls
from drivetrain.process.wire import from_host, read
from drivetrain.types.weights import ApplyUpdate, PrepareUpdate, WeightMessage, WeightReply
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync
from engines import OpenEngine, tensors_for, until
from warm_python import Program, running

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
BOUND = 30.0


@asynccontextmanager
async def attached(handle: EngineHandle) -> AsyncIterator[InferenceEngine]:
    engine = await attach(handle)
    try:
        yield engine
    finally:
        await engine.teardown()


def own_threads() -> int:
    """Return how many threads of drivetrain's run; the event loop keeps others in a pool."""
    return sum(thread.name.startswith("drivetrain") for thread in threading.enumerate())


HOLDER = """
import asyncio, base64, pickle, sys
from drivetrain import PauseMode, SamplingParams, attach
from drivetrain_weight_sync import WeightSync

async def main():
    engine = await attach(pickle.loads(base64.b64decode(sys.argv[1])))
    long = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
    {code}
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
PAUSES = 'await engine.pause_generation("in_place")'
SLEEPS = 'await engine.pause_generation("retract"); await engine.sleep(["kv_cache"])'
GENERATES = "asyncio.create_task(engine.generate([[1, 2], [3, 4]], long))"
PREPARES = """
    import torch
    manifest = await engine.weight_manifest()
    tensors = {s.name: torch.randn(s.shape, dtype=getattr(torch, s.dtype)) for s in manifest.tensors}
    sync = WeightSync.connect(tensors, engine)
    await (await sync.start_weight_transfer(version="half")).wait()
"""


@asynccontextmanager
async def holder(handle: EngineHandle, code: str) -> AsyncIterator[Program]:
    """Run a holder in a process of its own; entered once it has done ``code``."""
    given = base64.b64encode(pickle.dumps(handle)).decode()
    async with running("-c", HOLDER.replace("{code}", code), given) as process:
        assert (await process.stdout.readline()).strip() == b"ready"
        yield process


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"], ids=["unix", "tcp"])
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_the_page_is_the_same_through_a_handle(
    open_engine: OpenEngine, isolation: str, listen: str | None
) -> None:
    prompts: list[PromptLike] = ["hello", [5, 6, 7]]
    async with open_engine(isolation=isolation) as engine:
        expected = await engine.generate(prompts, GREEDY)
        handle = await engine.handle(listen)
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert handle.key not in repr(handle)
        async with attached(handle) as other:
            output = await other.generate(prompts, GREEDY)
            assert [c.token_ids for c in output.completions] == [c.token_ids for c in expected.completions]
            assert [c.logprobs for c in output.completions] == [c.logprobs for c in expected.completions]
            assert [c.weight_versions for c in output.completions] == [c.weight_versions for c in expected.completions]
            streamed = [chunk async for chunk in other.generate_stream("hello", GREEDY)]
            assert [i for chunk in streamed for i in chunk.token_ids] == expected.completions[0].token_ids
            assert other.model_info == engine.model_info
            assert await other.chat_completion({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        assert engine.state.value == "ready"


async def test_stops_on_text_are_found_by_the_holder(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        whole = (await engine.generate("hello", SamplingParams(max_new_tokens=30, temperature=0.0))).completions[0]
        params = SamplingParams(max_new_tokens=30, temperature=0.0, stop=(whole.text[4:6],))
        expected = (await engine.generate("hello", params)).completions[0]
        async with attached(await engine.handle()) as other:
            found = (await other.generate("hello", params)).completions[0]
        assert (found.text, found.token_ids, found.matched_stop) == (
            expected.text,
            expected.token_ids,
            expected.matched_stop,
        )


async def test_holders_of_a_seeded_engine_draw_samples_of_their_own(open_engine: OpenEngine) -> None:
    params = SamplingParams(max_new_tokens=12, n=4)

    async def drawn(page: InferenceEngine, **more: object) -> list[tuple[int, ...]]:
        output = await page.generate([1, 2], params.model_copy(update=more))
        return [tuple(completion.token_ids) for completion in output.completions]

    async with open_engine(seed=7) as engine:
        handle = await engine.handle()
        async with attached(handle) as one, attached(handle) as other:
            pages = (engine, one, other)
            samples = [sample for page in pages for _ in range(2) for sample in await drawn(page)]
            assert len(set(samples)) == len(samples) == 24
            assert await drawn(one, seed=5) == await drawn(other, seed=5)


async def test_every_holder_sees_what_another_does(open_engine: OpenEngine) -> None:
    async with open_engine(enable_sleep=True) as engine:
        handle = await engine.handle()
        async with attached(handle) as one, attached(handle) as other:
            await one.pause_generation(PauseMode.IN_PLACE)
            assert one.state.value == engine.state.value == "paused"
            await until(lambda: other.state.value == "paused")
            waiting = asyncio.create_task(other.generate([1, 2], GREEDY))
            await other.continue_generation()
            await waiting
            await other.sleep([MemoryTag.KV_CACHE])
            await until(lambda: one.state.value == "asleep")
            with pytest.raises(EngineStateError, match="asleep"):
                await one.generate([1, 2], GREEDY)
            await one.wake_up()
            assert engine.state.value == "ready"
            await engine.update_weight_version("relabelled")
            await until(lambda: one.get_weight_version() == other.get_weight_version() == "relabelled")


async def test_weights_are_pushed_through_a_handle(open_engine: OpenEngine) -> None:
    async with open_engine(isolation="process") as engine, attached(await engine.handle()) as other:
        tensors = await tensors_for(other)
        async with WeightSync.connect(tensors, other) as sync:
            result = await sync.push(version="one")
            assert result.tensors == len(tensors)
            assert engine.get_weight_version() == other.get_weight_version() == "one"
            transfer = await sync.start_weight_transfer(version="two")
            await transfer.wait()
            await transfer.finish()
            assert (await other.generate([1, 2], GREEDY)).completions[0].weight_versions[0].version == "two"
        name = next(iter(tensors))
        served = await engine.get_weights_by_name(name)
        assert served.data == tensors[name].numpy().tobytes()


@pytest.mark.parametrize("strategy", ["shared_memory", "broadcast", "disk", "delta"])
async def test_every_way_of_weights_leads_through_a_handle(open_engine: OpenEngine, strategy: str) -> None:
    async with open_engine(isolation="process") as engine, attached(await engine.handle("127.0.0.1:0")) as other:
        tensors = await tensors_for(other)
        async with WeightSync.connect(tensors, other, strategy) as sync:
            for version in ("one", "two"):
                await sync.push(version=version)
        assert engine.get_weight_version() == "two"
        name = next(iter(tensors))
        assert (await engine.get_weights_by_name(name)).data == tensors[name].numpy().tobytes()


async def test_a_relative_path_is_the_holders(open_engine: OpenEngine, model: Path) -> None:
    push = (
        f"import os; os.chdir({str(model.parent)!r}); await engine.load_weights_from_disk({model.name!r}, 'relative')"
    )
    async with open_engine() as engine, holder(await engine.handle(), push):
        assert engine.get_weight_version() == "relative"


async def test_a_holder_without_a_pulse_is_dropped(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNKNOWN_S", 0.5)
    async with open_engine() as engine:
        handle = await engine.handle()
        assert handle.path is not None
        lost: list[str] = []
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(
            lambda: OwnerConnection(handle.key, lambda state: None, lost.append), handle.path
        )
        await until(lambda: bool(lost))
        async with attached(handle) as other:
            await asyncio.sleep(1.0)
            await other.generate([1, 2], GREEDY)


async def test_an_update_that_a_holder_breaks_off_leaves_the_engine_dirty(open_engine: OpenEngine) -> None:
    async with open_engine() as engine, attached(await engine.handle()) as other:
        folder = Path(engine.config.model)
        async with WeightSync.connect(await tensors_for(other), other, "shared_memory") as sync:
            with pytest.raises(WeightTransferFailed, match="ZeroDivisionError"):
                await _break_off(other, folder)
            assert engine.state.value == "dirty"
            await sync.push(version="whole")
        assert engine.state.value == "ready"


async def _nothing() -> None:
    """Do nothing."""


async def _break_off(
    engine: InferenceEngine, folder: Path, meanwhile: Callable[[], Awaitable[None]] = _nothing
) -> None:
    request = WeightUpdateRequest(version="half", source=DiskSource(path=str(folder)), mode=PauseMode.RETRACT)
    async with engine.weight_update(request) as update:
        await update.load([0])
        await meanwhile()
        raise ZeroDivisionError


async def test_two_holders_that_update_at_once_are_told_so(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        async with attached(handle) as one, attached(handle) as other:
            tensors = await tensors_for(one)
            async with WeightSync.connect(tensors, one) as first, WeightSync.connect(tensors, other) as second:
                transfer = await first.start_weight_transfer(version="first")
                await transfer.wait()
                await second.push(version="second")
                with pytest.raises(EngineBusy, match="since this one was prepared"):
                    await transfer.finish()
                assert engine.get_weight_version() == "second"
                assert engine.state.value == "ready"
                with pytest.raises(WeightTransferFailed, match="ZeroDivisionError"):
                    await _break_off(one, Path(engine.config.model), lambda: _told(second))
                await second.push(version="third")
            assert engine.get_weight_version() == "third"


async def test_the_end_of_an_update_is_not_that_of_the_same_holders_next_one(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine() as engine:
        handle, applying, may_end = await engine.handle(), asyncio.Semaphore(0), asyncio.Semaphore(0)
        apply_weights, receive_weights = engine.parts.backend.apply_weights, engine.parts.backend.receive_weights

        async def slow(update: ApplyUpdate) -> WeightReply:
            applying.release()
            await may_end.acquire()
            return await apply_weights(update)

        async def slow_to_prepare(message: WeightMessage) -> WeightReply:
            if isinstance(message, PrepareUpdate) and message.request.version == "2":
                applying.release()
                await may_end.acquire()
            return await receive_weights(message)

        monkeypatch.setattr(engine.parts.backend, "apply_weights", slow)
        monkeypatch.setattr(engine.parts.backend, "receive_weights", slow_to_prepare)
        async with attached(handle) as one, attached(handle) as other, within(seconds=BOUND):
            first, second = (asyncio.create_task(one.update_named_weights(_whole(engine, v))) for v in ("1", "2"))
            await applying.acquire()
            may_end.release()
            await first
            await applying.acquire()  # the second one prepares
            assert (engine.get_weight_version(), engine.state.value) == ("1", "ready")
            with pytest.raises(EngineBusy, match="under way"):
                await other.prepare_weight_update(_whole(engine, "other"))
            may_end.release()
            await applying.acquire()
            may_end.release()
            await second
            await other.prepare_weight_update(_whole(engine, "other"))


def _whole(engine: InferenceEngine, version: str) -> WeightUpdateRequest:
    return WeightUpdateRequest(version=version, source=DiskSource(path=engine.config.model), mode=PauseMode.RETRACT)


async def _told(sync: WeightSync) -> None:
    with pytest.raises((EngineBusy, EngineStateError), match="under way"):
        await sync.push(version="meanwhile")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("by", ["owner", "holder"])
async def test_a_request_is_aborted_by_another_holder(open_engine: OpenEngine, n: int, by: str) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        async with attached(handle) as one, attached(handle) as other:
            params = LONG.model_copy(update={"n": n})
            task = asyncio.create_task(one.generate([[1, 2], [3]], params, request_ids=["mine", "another"]))
            await until(lambda: engine.parts.in_flight.running == 2 * n)
            aborting = engine if by == "owner" else other
            await aborting.abort("mine")
            await until(lambda: engine.parts.in_flight.running == n)
            await aborting.abort("another")
            assert [one.finish_reason.value for one in (await task).completions] == ["abort"] * 2 * n


async def test_a_holder_need_not_have_heard_of_a_change_to_use_it(open_engine: OpenEngine) -> None:
    async with open_engine(enable_sleep=True) as engine, attached(await engine.handle()) as other:
        await engine.sleep([MemoryTag.KV_CACHE])
        await until(lambda: other.state.value == "asleep")
        asking = engine.wake_up()
        await asking
        assert other.state.value == "asleep"  # as long as this task gives the event loop no turn
        assert (await other.generate([1, 2], GREEDY)).completions[0].token_ids


@pytest.mark.parametrize(
    ("code", "kill"),
    [(PAUSES, signal.SIGKILL), (GENERATES, signal.SIGKILL), (PREPARES, signal.SIGKILL), (PAUSES, signal.SIGSTOP)],
    ids=["pauses", "generates", "prepares", "frozen"],
)
async def test_what_a_holder_held_is_undone_when_it_is_gone(open_engine: OpenEngine, code: str, kill: int) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        async with holder(handle, code) as process:
            os.kill(process.pid, kill)
            await until(lambda: engine.state.value == "ready" and not engine.parts.in_flight.running)
            async with attached(handle) as other, WeightSync.connect(await tensors_for(other), other) as sync:
                await until(lambda: not engine.parts.in_flight.running)
                await _pushed(sync)
                assert (await other.generate([1, 2], GREEDY)).completions[0].weight_versions[0].version == "after"
        assert engine.get_weight_version() == "after"


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_engine_that_a_gone_holder_put_to_sleep_says_so_until_it_is_woken(
    open_engine: OpenEngine, kill: int
) -> None:
    async with open_engine(enable_sleep=True, timeouts={"heartbeat": 1.0}) as engine:
        before = (await engine.generate([1, 2], GREEDY)).completions[0].token_ids
        handle = await engine.handle()
        async with attached(handle) as other, holder(handle, SLEEPS) as process:
            waiting = asyncio.create_task(other.generate([1, 2], GREEDY))  # the holder has paused, too
            await until(lambda: engine.parts.in_flight.waiting == 1)
            os.kill(process.pid, kill)
            await until(lambda: "which is gone" in engine.describe().state)
            assert not engine.is_paused
            with pytest.raises(EngineStateError, match=f"left so by process {process.pid} of .*, which is gone; wake"):
                await other.generate([1, 2], GREEDY)
            assert engine.status == other.status
            assert not waiting.done()
            await other.wake_up()
            assert engine.describe().state == "ready"
            assert (await waiting).completions[0].token_ids == before
            await other.sleep([MemoryTag.KV_CACHE])
            assert "gone" not in engine.describe().state
            await other.wake_up()


async def test_a_pause_of_the_owner_outlives_a_holder_that_had_paused(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        for again in (False, True):
            async with attached(handle) as other:
                await other.pause_generation(PauseMode.IN_PLACE)
                if again:
                    await engine.continue_generation()
                await engine.pause_generation(PauseMode.RETRACT)
            async with attached(handle):
                pass  # what the first one held is undone by then
            assert engine.is_paused
            await engine.continue_generation()


async def test_a_pause_outlives_each_holder_that_shares_it_but_the_last(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        async with attached(handle) as first:
            await first.pause_generation(PauseMode.IN_PLACE)
            async with attached(handle) as newest:
                await newest.pause_generation(PauseMode.IN_PLACE)
            async with attached(handle):
                pass  # what the newest one held is undone by then
            assert engine.is_paused
        await until(lambda: not engine.is_paused)


@pytest.mark.parametrize("first", ["killed", "alive"])
async def test_an_engine_that_others_put_to_sleep_too_is_not_left_asleep(open_engine: OpenEngine, first: str) -> None:
    """The name of a holder that is gone goes when another one sleeps, and that one's comes when it is gone, too."""
    async with open_engine(enable_sleep=True, timeouts={"heartbeat": 1.0}) as engine:
        handle = await engine.handle()
        async with attached(handle) as other:
            async with holder(handle, SLEEPS) as process:
                if first == "alive":
                    await other.sleep([MemoryTag.KV_CACHE])
                process.kill()
                await until(lambda: not engine.is_paused)  # the process had paused, too
            if first == "killed":
                await until(lambda: "which is gone" in engine.describe().state)
                await other.sleep([MemoryTag.KV_CACHE])
            async with attached(handle):
                pass
            assert engine.describe().state == "asleep (kv_cache)"
        await until(lambda: "left so by" in engine.describe().state)
        await engine.wake_up()
        assert engine.describe().state == "ready"


async def _pushed(sync: WeightSync) -> None:
    """Push as soon as the update of the holder that is gone was dropped."""
    async with within(seconds=BOUND):
        while True:
            try:
                await sync.push(version="after")
            except EngineBusy:
                await asyncio.sleep(0.05)
            else:
                return


OWNER = """
import asyncio, base64, pickle, sys
from drivetrain import create_engine

async def main():
    fields = {"model": sys.argv[1], "isolation": "inline", "timeouts": {"heartbeat": 10}}
    async with create_engine("transformers", **fields) as engine:
        print(base64.b64encode(pickle.dumps(await engine.handle())).decode(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_owner_that_is_gone_fails_the_calls_of_its_holders(model: Path, kill: int) -> None:
    async with running("-c", OWNER, str(model)) as process:
        handle = pickle.loads(base64.b64decode(await process.stdout.readline()))
        async with attached(handle) as engine:
            task = asyncio.create_task(engine.generate([[1, 2], [3]], LONG))
            await until(lambda: engine.parts.in_flight.running == 2)
            os.kill(process.pid, kill)
            async with within(seconds=BOUND):
                with pytest.raises(EngineDied):
                    await task
            await until(lambda: engine.state.value == "failed")
            for call in (lambda: engine.generate([1], GREEDY), engine.stats, engine.weight_manifest):
                with pytest.raises(EngineDied, match="failed"):
                    await call()


async def test_who_does_not_know_the_key_gets_nothing(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        handle = await engine.handle(key="the right key of some length")
        for wrong in ("a wrong key of some length", "w", handle.key * 100_000):
            with pytest.raises(WireError, match="key is wrong"):
                await attach(EngineHandle(handle.address, wrong))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", (1 << 20).to_bytes(4, "little"), b"\xff" * 4, b"\0\0\0\0"):
            reader, writer = await asyncio.open_unix_connection(handle.path)
            writer.write(junk)
            async with within(seconds=BOUND):
                answer = await reader.read()
            assert answer[:4] != b""
            read(from_host, memoryview(answer)[4 : 4 + int.from_bytes(answer[:4], "little")])  # a Hello, and no more
            writer.close()
        async with attached(handle) as other:
            await other.generate([1, 2], GREEDY)


async def test_wrong_arguments_are_refused_by_name(open_engine: OpenEngine) -> None:
    with pytest.raises(InvalidRequest, match="handle"):
        await attach("unix:/x")  # type: ignore[arg-type]
    for address in ("http://host:1", "tcp://host", "tcp://host:99999", "unix:relative"):
        with pytest.raises(InvalidRequest, match="address"):
            EngineHandle(address, "key")
    for key in ("", None, 7, "clé"):
        with pytest.raises(InvalidRequest, match="key"):
            EngineHandle("unix:/x", key)  # type: ignore[arg-type]
    async with open_engine() as engine:
        with pytest.raises(InvalidConfig, match="key"):
            await engine.handle(key="short")
        for listen in ("nowhere", "host:port", "127.0.0.1:99999", "no.such.host.invalid:1"):
            with pytest.raises(InvalidConfig, match="listen"):
                await engine.handle(listen)
        for name in ("node3/x", "node3:7000/", "[::1", "node3:8000", "node 3", "node3\n", "x@y", "*", "tcp://n"):
            with pytest.raises(InvalidConfig, match="announce") as refusal:
                await engine.handle("127.0.0.1:0", announce=name)
            assert refusal.value.field == "announce"
        for more in ({}, {"key": "k" * 20}):
            with pytest.raises(InvalidConfig, match="announce='node3' needs listen"):
                await engine.handle(announce="node3", **more)
        with pytest.raises(InvalidConfig, match="no host name") as refusal:
            await engine.handle("no/host:1")
        assert refusal.value.field == "listen"
        assert (await engine.handle("127.0.0.1:0", announce="::1")).address.startswith("tcp://[::1]:")
        handle = await engine.handle()
        async with attached(handle) as other:
            assert await other.handle() == handle
            with pytest.raises(EngineStateError, match="owner"):
                await other.handle("127.0.0.1:0")


async def test_a_closed_engine_disconnects_its_holders_and_leaves_no_socket(open_engine: OpenEngine) -> None:
    threads = own_threads()
    async with open_engine() as engine:
        handle = await engine.handle()
        assert handle.path is not None
        folder = Path(handle.path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        other = await attach(handle)
        closed = asyncio.create_task(other.generate([1, 2], LONG))
        await until(lambda: engine.parts.in_flight.running == 1)
    with pytest.raises(EngineDied, match="the engine's owner closed it"):
        await closed
    with pytest.raises(EngineDied, match="the engine's owner closed it"):
        await other.generate([1, 2], GREEDY)
    await other.teardown()
    assert not folder.exists()
    with pytest.raises(EngineStateError, match="no engine listens"):
        await attach(handle)
    await until(lambda: own_threads() <= threads)


async def test_only_a_handle_with_arguments_is_another_one(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        handle, at_once = await asyncio.gather(engine.handle(), engine.handle())
        assert at_once == handle
        other = await engine.handle("127.0.0.1:0")
        assert (await engine.handle(key="k" * 20)).key == "k" * 20
        for each in (await engine.handle(), other):
            async with attached(each) as holder:
                assert await holder.handle() == each
        assert await engine.handle() == handle


async def test_holders_come_and_go_without_a_trace(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:

        async def some(count: int) -> tuple[int, int]:
            for _ in range(count):
                async with attached(await engine.handle()) as other:
                    await other.generate([1, 2], SamplingParams(max_new_tokens=1))
            await asyncio.sleep(0.6)
            return own_threads(), len(os.listdir("/proc/self/fd"))

        await some(3)
        threads, descriptors = await some(3)
        await some(10)
        await until(lambda: own_threads() <= threads and len(os.listdir("/proc/self/fd")) <= descriptors)


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_an_event_loop_that_ends_within_a_holders_update_leaves_it(model: Path, isolation: str) -> None:
    """The update breaks off in order, also one whose host was killed while it loaded a bucket."""
    reported: list[dict[str, object]] = []

    async def main() -> tuple[InferenceEngine, HolderCalls]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        engine = create_engine("transformers", model=str(model), isolation=isolation)
        await engine.start()
        calls = HolderCalls("a holder", engine.parts, Claims())
        await calls.begin_update(WeightUpdateRequest(version="never", source=DiskSource(path=str(model))))
        loading = asyncio.create_task(calls.load_buckets([0]))
        await asyncio.sleep(0)
        if engine.host_pid is None:
            await loading
        else:
            os.kill(engine.host_pid, signal.SIGKILL)
        return engine, calls  # nobody tears it down, and the update is under way

    with asyncio.Runner() as runner:
        engine, _ = runner.run(main())
    assert not reported
    assert engine.get_weight_version() == "initial"
    assert engine.state in (EngineState.DIRTY, EngineState.FAILED)


async def test_a_socket_that_cannot_be_made_is_a_typed_error_and_the_engine_serves_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with create_engine("transformers", model=str(model), isolation="inline") as engine:
        with monkeypatch.context() as without:
            without.setattr("tempfile.tempdir", str(tmp_path / "missing"))
            with pytest.raises(EngineInternalError, match=r"missing .*name another folder by TMPDIR"):
                await engine.handle()
        await engine.handle()


async def test_an_engine_closes_though_its_sockets_folder_cannot_be_removed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(folder: OwnedFolder) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder.path))

    engine = create_engine("transformers", model=str(model), isolation="inline")
    await engine.start()
    folder = Path((await engine.handle()).address.removeprefix("unix:")).parent
    monkeypatch.setattr(OwnedFolder, "remove", busy)
    await engine.teardown()
    assert engine.state is EngineState.CLOSED
    assert "the folder of an engine's socket stays" in caplog.text
    shutil.rmtree(folder)
