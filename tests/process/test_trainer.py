"""The fate of a host when its trainer dies, freezes or exits. Each trainer here is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from drivetrain.process.process_tree import runs

TRAINER = """
import asyncio, atexit, os, sys, time
from drivetrain import EngineConfig, GenerateRequest, LogprobsMode, SamplingParams
from drivetrain.process import HostedBackend

def request(name="r"):
    return GenerateRequest(name, [1, 2], SamplingParams(), 2, (), LogprobsMode.RAW)

def engine(trouble="", **timeouts):
    kwargs = {"trouble": trouble}
    return HostedBackend(EngineConfig(backend="fake", model="none", engine_kwargs=kwargs, timeouts=timeouts), "fake")

async def main():
"""


Run = Callable[[str], "tuple[subprocess.Popen[str], psutil.Process]"]


@pytest.fixture
def trainer(plugin: Path) -> Iterator[Run]:
    """Runs a trainer whose main() is the given code; returns it and its host, whose pid it prints first."""
    processes: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[subprocess.Popen[str], psutil.Process]:
        source = TRAINER + textwrap.indent(textwrap.dedent(code), "    ") + "\nasyncio.run(main())\n"
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        return process, psutil.Process(int(process.stdout.readline()))

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def rest_of_output(process: subprocess.Popen[str]) -> str:
    """Read the rest of stdout; communicate() would miss what reading the first line has buffered."""
    assert process.stdout is not None
    return process.stdout.read()


def gone(*processes: psutil.Process, within: float) -> bool:
    """Return True if all processes end in time; a zombie, which init has not reaped yet, counts as ended."""
    until = time.monotonic() + within
    while any(map(runs, processes)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_killed_trainer_takes_its_host_and_the_engines_children_with_it(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine("detached child")
        await backend.start(lambda text: None)
        print(backend.pid, flush=True)
        await asyncio.sleep(600)
    """)
    (child,) = host.children()
    process.kill()
    assert gone(host, child, within=60)


def test_a_killed_trainer_takes_a_host_with_it_whose_event_loop_is_blocked(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine()
        await backend.start(lambda text: None)
        print(backend.pid, flush=True)
        await backend.generate(request("block"))
    """)
    time.sleep(0.3)
    process.kill()
    assert gone(host, within=60)


def test_a_killed_trainer_takes_a_host_with_it_that_is_still_starting(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine("block start")
        await backend.start(lambda text: print(backend.pid, flush=True))
    """)
    process.kill()
    assert gone(host, within=60)


def test_a_host_outlives_no_trainer_even_if_a_forked_worker_holds_its_sockets(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine()
        await backend.start(lambda text: None)
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
        print(backend.pid, flush=True)
        print(worker, flush=True)
        await asyncio.sleep(600)
    """)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        process.kill()
        assert gone(host, within=60)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_that_ends_leaves_its_parents_engine_alone(trainer: Run) -> None:
    process, _ = trainer("""
        backend = engine()
        await backend.start(lambda text: None)
        worker = os.fork()
        if worker == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(worker, 0)
        print(backend.pid, flush=True)
        print((await backend.generate(request())).token_ids)
        await backend.close()
    """)
    assert rest_of_output(process) == "[1, 2]\n"
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("ending", ["return", "raise SystemExit(0)", "await backend.generate(request('exit'))"])
def test_a_trainer_that_forgets_to_close_ends_and_leaves_no_host(trainer: Run, ending: str) -> None:
    process, host = trainer(f"""
        backend = engine("detached child")
        await backend.start(lambda text: None)
        print(backend.pid, flush=True)
        sys.stdin.readline()  # until the test has looked up the host
        {ending}
    """)
    process.communicate("\n", timeout=60)
    assert process.returncode == (1 if "generate" in ending else 0)
    assert gone(host, within=0.1)


def test_an_interrupted_trainer_leaves_no_host(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine()
        await backend.start(lambda text: None)
        print(backend.pid, flush=True)
        await backend.generate(request("wait"))
    """)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert gone(host, within=0.1)


def test_programs_can_be_interrupted_though_the_tests_run_in_the_background() -> None:
    ignored = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)"
    tests = f"{ignored}; import subprocess, sys; from tests import conftest; conftest.pytest_configure()"
    program = f"subprocess.run([sys.executable, '-c', {ignored!r}])"
    in_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", f"{tests}; {program}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(in_background, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False"]


@pytest.mark.slow
def test_a_pause_of_trainer_and_host_together_ends_neither(trainer: Run) -> None:
    process, host = trainer("""
        backend = engine(heartbeat=1.0, event_loop=1.0)
        await backend.start(lambda text: None)
        print(backend.pid, flush=True)
        for _ in range(25):
            await asyncio.sleep(0.1)
            await backend.generate(request())
        print("alive")
        await backend.close()
    """)
    time.sleep(0.5)
    host.suspend()
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    host.resume()
    assert rest_of_output(process) == "alive\n"
