"""Hosts forked from a process that has imported the engine. test_death.py tests their deaths."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from drivetrain import EngineDied, EngineStartError, GenerateRequest
from drivetrain.process import HostedBackend
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness import fork_server
from drivetrain_conformance.harness.fork_server import ForkServer, serve_forks

Ask = Callable[..., GenerateRequest]
Make = Callable[..., HostedBackend]


@pytest.fixture(autouse=True)
def one_thread(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


async def test_forked_hosts_serve_side_by_side_and_import_once(
    make: Make, ask: Ask, capfd: pytest.CaptureFixture[str]
) -> None:
    with ForkServer("fake") as server:
        first, second = make(), make()
        for backend in (first, second):
            await backend.start(print)
            assert psutil.Process(backend.pid).ppid() == server.pid
        assert (await first.generate(ask(tokens=3))).token_ids == [0, 1, 2]
        await first.close()
        assert (await second.generate(ask(tokens=3))).token_ids == [0, 1, 2]
        await second.close()
    assert capfd.readouterr().out.count("fakeplug is preloaded") == 1


async def test_a_forked_host_has_the_environment_of_its_trainer(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drivetrain.host")
    with ForkServer("fake"):
        monkeypatch.setenv("FAKE_MARKER", "set after the fork server began")
        backend = make()
        await backend.start(print)
        await backend.close()
    assert "starting with marker set after the fork server began" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_hosts_of_a_forked_command_are_forked_as_well() -> None:
    command = ["host", "--backend", "fake", "--model", str(tiny_model("qwen2")), "--isolation", "process"]
    said = b""
    with ForkServer("fake", program="command") as server:
        forked = server.start(command, os.environ, ())
        while not (line := forked.stdout.readline()).startswith(b"endpoint: "):
            assert line, f"it ended with {forked.wait(60)}: {said!r}"
            said += line
        below = psutil.Process(forked.pid).children(recursive=True)
        assert len(below) == 2, f"below the command run {below}: expected its fork server and the host"
        assert all(fork_server.__file__ in process.cmdline() for process in below)
        os.kill(forked.pid, signal.SIGTERM)
        assert forked.wait(60) == 0
        assert not any(process.is_running() for process in below)
        forked.stdout.close()


async def test_the_end_of_the_fork_server_is_the_end_of_its_hosts(make: Make, ask: Ask) -> None:
    with ForkServer("fake"):
        backend = make()
        await backend.start(print)
        host = psutil.Process(backend.pid)
    assert isinstance(await backend.died(), EngineDied)
    gone, _ = psutil.wait_procs([host], 5)
    assert gone == [host]


async def test_what_ends_a_forked_start_is_told(make: Make) -> None:
    with ForkServer("fake"):
        backend = make("exit on start")
        with pytest.raises(EngineStartError, match=r"exit code 7[\s\S]*the last words of the engine"):
            await backend.start(print)


@pytest.mark.parametrize(("trouble", "words"), [("odd", "OddError: nothing to import"), ("thread", "1 threads")])
def test_imports_that_fail_or_leave_threads_are_refused(
    trouble: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PRELOAD", trouble)
    before = psutil.Process().children()
    with pytest.raises(EngineStartError, match=words), ForkServer("fake"):
        pass
    assert psutil.Process().children() == before


def test_imports_that_start_cuda_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = tmp_path / "nvidia-uvm"
    opened.touch()
    monkeypatch.setattr(fork_server, "CUDA_FILE", str(opened))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, ExitStack() as files:
        assert serve_forks(theirs.detach(), lambda: files.enter_context(opened.open()), lambda _: 0) == 1
        assert b"started CUDA" in ours.recv(1024)


def test_a_python_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(EngineStartError, match="cannot run '/nowhere/python'"):
        ForkServer("fake", python="/nowhere/python")
