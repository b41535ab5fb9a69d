"""An engine in a host process: the effect of its death on the trainer, and its leftovers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from drivetrain import EngineDied, EngineState, EngineStateError, InferenceEngine, SamplingParams, create_engine
from engines import HANGING, OpenEngine, until_running

LONG = SamplingParams(max_new_tokens=900, ignore_eos=True)


async def long_requests(engine: InferenceEngine) -> list[asyncio.Task[object]]:
    """Start waiters of three kinds: a call, a stream, and a request that waits out a pause."""

    async def stream() -> None:
        async for _ in engine.generate_stream("streamed", LONG):
            pass

    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(engine.generate(["a", "b"], LONG)),
        asyncio.create_task(stream()),
    ]
    await until_running(engine, 3)
    await engine.pause_generation("in_place")
    tasks.append(asyncio.create_task(engine.generate("waits", LONG)))
    await asyncio.sleep(0.05)
    return tasks


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, r"was silent for 2\.\d s")]
)
async def test_every_waiter_hears_of_a_dead_or_frozen_host_and_the_trainer_lives_on(
    open_engine: OpenEngine, number: signal.Signals, reason: str
) -> None:
    async with open_engine(isolation="process", timeouts={"heartbeat": 2.0}) as engine:
        assert engine.host_pid is not None
        host = psutil.Process(engine.host_pid)
        tasks = await long_requests(engine)
        os.kill(engine.host_pid, number)
        async with asyncio.timeout(HANGING):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert re.search(reason, str(results[0]))
        kinds = [type(result) for result in results]
        assert kinds[:2] == [EngineDied, EngineDied]
        assert kinds[2] in (EngineDied, EngineStateError)
        await asyncio.sleep(0.1)
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineStateError, match="failed"):
            await engine.generate("x")
    assert not host.is_running() or host.status() == psutil.STATUS_ZOMBIE
    async with open_engine(isolation="process") as another:
        await another.generate("the trainer lives on", SamplingParams(max_new_tokens=2))


async def test_teardown_leaves_nothing_behind(open_engine: OpenEngine) -> None:
    me = psutil.Process()
    async with open_engine(isolation="process"):
        pass
    children, files, threads = len(me.children(recursive=True)), me.num_fds(), threading.active_count()
    for _ in range(3):
        async with open_engine(isolation="process") as engine:
            waiting = asyncio.create_task(engine.generate("in flight", LONG))
            await until_running(engine, 1)
        assert (await waiting).completions[0].finish_reason.value == "abort"
        await engine.teardown()
    assert len(me.children(recursive=True)) == children
    assert me.num_fds() <= files
    assert threading.active_count() <= threads


async def test_an_inline_engine_leaves_no_thread_behind(open_engine: OpenEngine) -> None:
    async with open_engine():
        pass
    before = {thread.name for thread in threading.enumerate()}
    async with open_engine() as engine:
        await engine.generate("x", SamplingParams(max_new_tokens=2))
    assert not [t for t in threading.enumerate() if t.name.startswith("drivetrain") and t.name not in before]


def test_an_engine_starts_off_the_main_thread_and_leaves_signal_handlers_alone(model: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    failures: list[BaseException] = []

    async def use(isolation: str) -> None:
        async with create_engine("transformers", model=str(model), isolation=isolation) as engine:
            output = await engine.generate("x", SamplingParams(max_new_tokens=3, ignore_eos=True))
            assert len(output.completions[0].token_ids) == 3

    def work() -> None:
        try:
            for isolation in ("inline", "process"):
                asyncio.run(use(isolation))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert failures == []
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_host_sees_the_gpu_variables_as_they_are_and_goes_when_the_trainer_is_killed(
    model: Path, tmp_path: Path
) -> None:
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from drivetrain import create_engine, SamplingParams

        async def main():
            engine = create_engine("transformers", model={str(model)!r}, isolation="process")
            await engine.start()
            params = SamplingParams(max_new_tokens=900, ignore_eos=True)
            task = asyncio.create_task(engine.generate("x", params))
            await asyncio.sleep(0.2)
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(engine.host_pid))
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3,1"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as trainer:
        pid_file = tmp_path / "pid"
        for _ in range(600):
            if pid_file.exists() and pid_file.read_text():
                break
            time.sleep(0.1)
        host = psutil.Process(int(pid_file.read_text()))
        assert host.environ()["CUDA_VISIBLE_DEVICES"] == "3,1"
        trainer.kill()
        trainer.wait()
    gone, alive = psutil.wait_procs([host], timeout=60)
    assert not alive, alive
    assert gone
