"""Hosts that die, freeze or lose a child: every waiter gets an error in time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import psutil
import pytest

from cgroups import freezer
from drivetrain import EngineDied, GenerateRequest, GenerateResult
from drivetrain.process import HostedBackend
from drivetrain.process.process_tree import runs
from drivetrain.process.shared_memory_files import shared_memory_of
from fleets import until

Ask = Callable[..., GenerateRequest]
Make = Callable[..., HostedBackend]

BOUND = 60.0
"""Seconds after which a wait counts as hanging."""

pytestmark = pytest.mark.parametrize("hosts", ["spawned", "forked"])


async def started(backend: HostedBackend) -> int:
    await backend.start(print)
    assert backend.pid is not None
    return backend.pid


async def dies(backend: HostedBackend, cause: Callable[[], object], match: str, ask: Ask) -> None:
    """Check that ``cause`` ends a call, a stream and the host, with the reason ``match``, and later calls at once."""

    async def read() -> None:
        async for _ in backend.stream(ask("wait in a stream")):
            pass

    died = asyncio.create_task(backend.died())
    waiters: list[Coroutine[None, None, object]] = [
        backend.generate(ask("wait")),
        backend.generate(ask("wait")),
        read(),
    ]
    tasks = [asyncio.ensure_future(waiter) for waiter in waiters]
    await asyncio.sleep(0.2)
    assert backend.pid is not None
    process = psutil.Process(backend.pid)
    family = [process, *process.children(recursive=True)]
    cause()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), BOUND)
    for result in (*results, await died):
        assert isinstance(result, EngineDied)
        assert re.search(match, str(result))
    assert not any(map(runs, family))
    assert not process.is_running()
    for call in (backend.generate(ask()), backend.abort(["r"]), anext(backend.stream(ask()))):
        with pytest.raises(EngineDied, match=match):
            call.__await__().send(None)  # at once: it waits for nothing
    await backend.close()


async def test_an_engine_that_dies_in_a_living_host_has_said_why(make: Make, ask: Ask) -> None:
    backend = make()
    await started(backend)
    words = r"(?s)^the engine's process ended\nlast lines of its log:.*\nthe last words of the engine$"
    with pytest.raises(EngineDied, match=words):
        await backend.generate(ask("engine died"))
    await backend.close()


async def test_a_killed_host(make: Make, ask: Ask) -> None:
    backend = make()
    pid = await started(backend)
    await dies(backend, lambda: os.kill(pid, signal.SIGKILL), rf"host process {pid} .* killed by SIGKILL", ask)


async def test_closing_a_host_that_was_killed_this_moment_succeeds(make: Make) -> None:
    backend = make()
    os.kill(await started(backend), signal.SIGKILL)
    await backend.close()


async def test_a_host_that_exits_says_with_which_code_and_its_last_lines(make: Make, ask: Ask) -> None:
    backend = make()
    await started(backend)

    def exits() -> None:
        spared.append(asyncio.ensure_future(backend.generate(ask("exit"))))

    spared: list[asyncio.Future[GenerateResult]] = []
    await dies(backend, exits, r"(?s)ended with exit code 3.*last lines of its log:.*starting with marker", ask)
    assert isinstance(spared[0].exception(), EngineDied)


async def test_a_frozen_host(make: Make, ask: Ask) -> None:
    backend = make(heartbeat=1.5)
    pid = await started(backend)
    await dies(backend, lambda: os.kill(pid, signal.SIGSTOP), r"was silent for 1\.\d s .timeouts.heartbeat=1.5", ask)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
async def test_a_host_in_a_frozen_control_group(make: Make, ask: Ask, version: int, hosts: str) -> None:
    """Version 2 lets a frozen process be killed. Version 1 keeps it: calls fail without waiting for the thaw."""
    if (version, hosts) == (1, "forked"):
        pytest.skip("the fork server of the tests keeps a file open until the host has ended")
    backend = make(heartbeat=1.0)
    host = psutil.Process(await started(backend))
    with freezer(version) as group:
        if group is None:
            pytest.skip(f"this process may not make a control group of version {version}")
        waiting = asyncio.create_task(backend.generate(ask("wait")))
        await asyncio.sleep(0.2)
        group.freeze(host)
        kept = "; it was killed, and the kernel does not end it" if version == 1 else ""
        with pytest.raises(EngineDied, match=rf"was silent for 1\.\d s .timeouts.heartbeat=1.{kept}"):
            await asyncio.wait_for(waiting, BOUND)
        assert runs(host) == (version == 1)
        await backend.close()
    psutil.wait_procs([host], BOUND)
    assert not runs(host)


async def test_an_engine_whose_child_is_in_a_frozen_control_group(make: Make, ask: Ask) -> None:
    backend = make("child", heartbeat=1.0)
    await started(backend)
    child = (await backend.stats()).kv_cache_bytes
    with freezer(2) as group:
        if group is None:
            pytest.skip("this process may not make a control group of version 2")
        reason = rf"lost a process that its engine needs: process {child} \(sleep\) has been stopped for 1\.\d s"
        await dies(backend, lambda: group.freeze(psutil.Process(child)), reason, ask)


async def test_a_host_whose_engine_holds_the_interpreter(make: Make, ask: Ask) -> None:
    backend = make(heartbeat=1.0)
    await started(backend)
    holding: list[asyncio.Future[GenerateResult]] = []

    def hold() -> None:
        holding.append(asyncio.ensure_future(backend.generate(ask("hold"))))

    await dies(backend, hold, r"was silent for 1\.\d s", ask)
    assert isinstance(holding[0].exception(), EngineDied)


async def test_a_host_that_is_frozen_while_it_starts(make: Make) -> None:
    backend = make("block start", heartbeat=1.0)
    reports: asyncio.Queue[str] = asyncio.Queue()
    starting = asyncio.create_task(backend.start(reports.put_nowait))
    await asyncio.wait_for(reports.get(), BOUND)
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGSTOP)
    with pytest.raises(Exception, match=r"was silent for \d"):
        await asyncio.wait_for(starting, BOUND)


async def test_a_host_whose_event_loop_stands_still(make: Make, ask: Ask) -> None:
    backend = make(event_loop=1.0)
    await started(backend)
    blocked: list[asyncio.Future[GenerateResult]] = []

    def block() -> None:
        blocked.append(asyncio.ensure_future(backend.generate(ask("block"))))

    await dies(backend, block, "did not run its event loop for .*timeouts.event_loop=1", ask)
    assert isinstance(blocked[0].exception(), EngineDied)


async def test_an_engine_whose_child_is_killed(make: Make, ask: Ask) -> None:
    backend = make("child")
    await started(backend)
    child = (await backend.stats()).kv_cache_bytes
    reason = rf"lost a process that its engine needs: process {child} \(sleep\) was killed by SIGKILL"
    await dies(backend, lambda: os.kill(child, signal.SIGKILL), reason, ask)


@pytest.mark.slow
@pytest.mark.parametrize(("child", "name"), [("child", "sleep"), ("titled child", "engine::rank_1")])
async def test_an_engine_whose_child_is_frozen(make: Make, ask: Ask, child: str, name: str) -> None:
    backend = make(child, heartbeat=1.5)
    await started(backend)
    pid = (await backend.stats()).kv_cache_bytes
    reason = rf"lost a process that its engine needs: process {pid} \({name}\) has been stopped for 1\.\d s"
    await dies(backend, lambda: os.kill(pid, signal.SIGSTOP), reason + r" .timeouts.heartbeat=1.5", ask)


@pytest.mark.slow
async def test_an_engine_whose_child_is_frozen_for_a_moment_lives_on(make: Make, ask: Ask) -> None:
    backend = make("child", heartbeat=1.5)
    await started(backend)
    child = (await backend.stats()).kv_cache_bytes
    for _ in range(5):  # in all longer than it may be frozen at once
        os.kill(child, signal.SIGSTOP)
        await asyncio.sleep(0.4)
        os.kill(child, signal.SIGCONT)
        await asyncio.sleep(0.4)
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]


@pytest.mark.slow
async def test_an_engine_that_cannot_look_at_its_child_lives_on(make: Make, ask: Ask) -> None:
    backend = make("child", heartbeat=1.0)
    host = psutil.Process(await started(backend))
    before = host.rlimit(psutil.RLIMIT_NOFILE)
    host.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))  # it opens no more files, those of /proc included
    await asyncio.sleep(2.5)
    host.rlimit(psutil.RLIMIT_NOFILE, before)
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]


async def test_shared_memory_of_a_child_that_was_killed_goes_with_the_host(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hosts of other tests have folders in the shared one, which may be removed between two looks.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = make("semaphore child")
    await started(backend)
    child = psutil.Process((await backend.stats()).kv_cache_bytes)
    (semaphore,) = shared_memory_of([child])
    await until(lambda: any(str(semaphore) in file.read_text() for file in tmp_path.glob("drivetrain-host-*/*memory")))
    # The first child is the resource tracker, which would have removed the semaphore.
    for process in (*child.children(), child):
        process.kill()
    assert "process" in str(await asyncio.wait_for(backend.died(), BOUND))
    assert not semaphore.exists()


async def test_a_child_that_the_engine_does_not_need_may_end(make: Make, ask: Ask) -> None:
    backend = make("unneeded child")
    await started(backend)
    child = psutil.Process((await backend.stats()).kv_cache_bytes)
    child.kill()
    await asyncio.sleep(1)
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]


async def test_an_engine_that_makes_no_step_any_more(make: Make, ask: Ask) -> None:
    backend = make("no step", step=0.5, weight_update=0.5)
    await started(backend)
    await dies(backend, lambda: None, "made no step for 0.5 s, with 3 requests in flight", ask)


async def test_an_engine_that_says_that_it_died(make: Make, ask: Ask) -> None:
    backend = make()
    await started(backend)
    last: list[asyncio.Future[GenerateResult]] = []

    def die() -> None:
        last.append(asyncio.ensure_future(backend.generate(ask("die"))))

    await dies(backend, die, "says that its engine died: its scheduler is gone", ask)
    assert isinstance(last[0].exception(), EngineDied)


async def test_a_child_in_a_session_of_its_own_goes_with_its_killed_host(make: Make, ask: Ask) -> None:
    backend = make("detached child")
    pid = await started(backend)
    assert os.getsid((await backend.stats()).kv_cache_bytes) != pid
    await dies(backend, lambda: os.kill(pid, signal.SIGKILL), "was killed by SIGKILL", ask)


async def test_a_killed_host_is_noticed_though_a_forked_child_holds_its_sockets(make: Make, ask: Ask) -> None:
    backend = make("forked child")
    pid = await started(backend)
    await dies(backend, lambda: os.kill(pid, signal.SIGKILL), "was killed by SIGKILL", ask)


async def test_children_end_with_a_close(make: Make) -> None:
    backend = make("forgotten child")
    await started(backend)
    child = psutil.Process((await backend.stats()).kv_cache_bytes)
    await backend.close()
    assert not child.is_running()


@pytest.mark.slow
async def test_a_trainer_that_blocks_its_event_loop_keeps_its_engine(make: Make, ask: Ask) -> None:
    backend = make(heartbeat=0.8, event_loop=0.8)
    await started(backend)
    waiting = asyncio.create_task(backend.generate(ask("wait")))
    await asyncio.sleep(0.05)
    time.sleep(3)  # noqa: ASYNC251 - a training step
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]
    await asyncio.sleep(0.5)
    assert not waiting.done()
    waiting.cancel()


async def test_an_idle_engine_lives_on(make: Make, ask: Ask) -> None:
    backend = make(heartbeat=0.5, event_loop=0.5)
    await started(backend)
    await asyncio.sleep(3)
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]
