"""Starting an engine in a host process, in this environment or another one, and failing to start it."""

from __future__ import annotations

import asyncio
import os
import site
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import pytest

from drivetrain import (
    Capability,
    DeadlineExceeded,
    EngineConfig,
    EngineStartError,
    GenerateRequest,
    InvalidConfig,
    Isolation,
    StopKind,
    UnknownBackend,
    UnsupportedCapability,
    WireError,
    create_engine,
)
from drivetrain.backend import registry
from drivetrain.backend.plugin_classes import plugin_manager
from drivetrain.backend.toolkit.launcher_variables import outside_the_trainers_group
from drivetrain.process import HostedBackend, handshake, probe, wire

Ask = Callable[..., GenerateRequest]
Make = Callable[..., HostedBackend]
Config = Callable[..., EngineConfig]


@pytest.fixture
def empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of an empty environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    return str(tmp_path / "empty" / "bin" / "python")


@pytest.fixture
def other_environment(tmp_path: Path, plugin: Path) -> str:
    """The Python of another environment, with the same packages as this one and the plugin."""
    folder = tmp_path / "other"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "same.pth").write_text("\n".join(lines))
    return str(folder / "bin" / "python")


async def test_the_hosts_output_is_logged_line_by_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="drivetrain.host"):
        backend = make()
        await backend.start(print)
        await backend.close()
    lines = [record.message for record in caplog.records if record.name == "drivetrain.host"]
    assert f"[{backend.pid}] fakeplug is imported" in lines


async def test_a_start_that_raises_carries_the_hosts_last_lines(make: Make) -> None:
    backend = make("odd start")
    with pytest.raises(EngineStartError, match=r"(?s)OddError: no such luck.*the last words of the engine"):
        await backend.start(print)
    assert backend.child_processes() == []
    backend = make("start error")
    with pytest.raises(EngineStartError, match=r"(?s)the model is broken.*the last words of the engine"):
        await backend.start(print)


async def test_a_host_that_ends_while_it_starts_says_how_and_its_last_lines(make: Make) -> None:
    with pytest.raises(EngineStartError, match=r"(?s)ended with exit code 7 while starting.*the last words"):
        await make("exit on start").start(print)


async def test_a_host_that_ends_while_it_starts_names_its_exception_first(make: Make) -> None:
    # On a busy machine its socket is seen closed long before its exit code.
    first = (
        r"^the host process \d+ .* (exit code 7|closed its call socket) while starting; "
        r"first exception in its log: .*OddError: no such layer\n"
    )
    with pytest.raises(EngineStartError, match=first) as raised:
        await make("long traceback on start").start(print)
    assert str(raised.value).splitlines()[-1] == "warning 199"


async def test_a_host_that_is_killed_while_it_starts_says_by_which_signal(make: Make) -> None:
    backend = make("block start")
    reports: asyncio.Queue[str] = asyncio.Queue()
    starting = asyncio.create_task(backend.start(reports.put_nowait))
    await asyncio.wait_for(reports.get(), 60)
    psutil.Process(backend.pid).kill()
    with pytest.raises(EngineStartError, match="was killed by SIGKILL"):
        await starting


async def test_an_error_of_drivetrains_own_in_the_start_stays_what_it_is(make: Make) -> None:
    with pytest.raises(InvalidConfig, match="refused as asked") as caught:
        await make("refuse").start(print)
    assert caught.value.field == "engine_kwargs.trouble"


async def test_an_unknown_backend_is_told_by_the_host(plugin: Path, config_for: Config) -> None:
    backend = HostedBackend(config_for(), "fakke")
    with pytest.raises(UnknownBackend, match="did you mean 'fake'"):
        await backend.start(print)


async def test_a_start_that_takes_too_long_is_ended_at_the_deadline(make: Make) -> None:
    backend = make("block start", start=1.5, close=0.3)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"timed out after 1.5 s waiting for the fake engine to start"):
        await backend.start(print)
    assert time.monotonic() - began < 60, "the start lasts for ten minutes"
    assert backend.child_processes() == []


async def test_cancelling_a_start_kills_the_host(make: Make) -> None:
    backend = make("block start")
    reports: asyncio.Queue[str] = asyncio.Queue()
    starting = asyncio.create_task(backend.start(reports.put_nowait))
    await asyncio.wait_for(reports.get(), 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert backend.child_processes() == []


@pytest.mark.slow
async def test_a_start_that_blocks_longer_than_the_heartbeat_limits_succeeds(make: Make) -> None:
    await make("long start", heartbeat=0.5, event_loop=0.5).start(print)


async def test_a_progress_callback_that_raises_does_not_end_the_start(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def report(text: str) -> None:
        raise ValueError(f"cannot show {text}")

    await make().start(report)
    assert "failed on 'reading the model'" in caplog.text


async def test_a_plugin_on_this_processs_import_path_alone_is_found_by_the_host(
    make: Make, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.syspath_prepend(plugin)
    await make().start(print)


async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(make: Make) -> None:
    for turns in range(0, 12, 2):
        starting = asyncio.create_task(make().start(print))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_a_host_of_another_wire_version_is_refused_with_the_remedy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "WIRE_VERSION", wire.WIRE_VERSION + 1)
    backend = make()
    theirs, ours = wire.WIRE_VERSION, wire.WIRE_VERSION + 1
    with pytest.raises(
        WireError, match=rf"speaks wire version {theirs} .* this side {ours} .*install the same version"
    ):
        await backend.start(print)


# Another environment's Python -----------------------------------------------------------------------------------------


async def test_the_host_can_be_another_environments_python(make: Make, other_environment: str, ask: Ask) -> None:
    backend = make(python=other_environment)
    await backend.start(print)
    assert backend.pid is not None
    assert psutil.Process(backend.pid).cmdline()[0] == other_environment
    assert (await backend.generate(ask())).token_ids == [0, 1, 2, 3]


async def test_an_environment_without_drivetrain_is_refused_with_the_remedy(
    empty_environment: str, config_for: Config
) -> None:
    config = config_for(python=empty_environment)
    with pytest.raises(EngineStartError, match=r"does not hold this drivetrain; .* -m pip install drivetrain"):
        await HostedBackend(config, "fake").start(print)
    with pytest.raises(EngineStartError, match=r"does not hold this drivetrain; .* -m pip install drivetrain"):
        probe(config)


async def test_a_python_that_cannot_be_run_is_refused_by_its_path(config_for: Config, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(EngineStartError, match=r"cannot run '.*give python= the path"):
            await HostedBackend(config_for(python=str(path)), "fake").start(print)


# Asking before starting -----------------------------------------------------------------------------------------------


def test_a_probe_tells_what_the_backend_says_of_itself(other_environment: str, config_for: Config) -> None:
    config = config_for(python=other_environment)
    result = probe(config)
    assert result.capabilities == {Capability.STREAMING, Capability.SEED}
    assert result.native_stops == {StopKind.STRING}
    assert result.config_names == {"seed": "random_seed"}
    assert result.default_isolation is Isolation.PROCESS
    assert result.engine_distribution == "pluggy"
    assert result.engine_version[0].isdigit()
    assert result.python_version == ".".join(map(str, sys.version_info[:3]))
    assert HostedBackend.capabilities(config) == result.capabilities


@pytest.fixture(params=["here", "in another environment"])
def python(
    request: pytest.FixtureRequest, other_environment: str, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """The ``python`` of a configuration; the backend is asked in this process, or in another environment's."""
    monkeypatch.syspath_prepend(plugin)
    monkeypatch.setattr(registry, "_manager", plugin_manager())
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.delitem(sys.modules, "fakeplug", raising=False)
    return None if request.param == "here" else other_environment


def test_a_wrong_value_is_refused_before_a_host_is_started(python: str | None, config_for: Config) -> None:
    children = psutil.Process().children(recursive=True)
    with pytest.raises(InvalidConfig, match="refused as asked") as caught:
        create_engine(config_for("invalid", python))
    assert caught.value.field == "engine_kwargs.trouble"
    assert psutil.Process().children(recursive=True) == children


def test_an_unclaimed_capability_is_named_before_a_wrong_value(python: str | None, config_for: Config) -> None:
    with pytest.raises(UnsupportedCapability, match="deterministic"):
        create_engine(config_for("invalid", python), deterministic=True)


def test_a_probe_depends_on_the_configuration(plugin: Path, config_for: Config) -> None:
    config = config_for().model_copy(update={"seed": 1})
    assert probe(config).capabilities == {Capability.STREAMING}


def test_a_probe_raises_what_describing_the_backend_raised(plugin: Path, config_for: Config) -> None:
    with pytest.raises(UnknownBackend, match="did you mean 'fake'"):
        probe(config_for().model_copy(update={"backend": "fakke"}))


def test_a_probe_ends_at_its_deadline_and_leaves_nothing(plugin: Path, config_for: Config) -> None:
    began, children = time.monotonic(), psutil.Process().children(recursive=True)
    with pytest.raises(DeadlineExceeded, match="timed out after 2 s"):
        probe(config_for("slow probe"), deadline=2)
    assert time.monotonic() - began < 60, "the probe lasts for ten minutes"
    assert psutil.Process().children(recursive=True) == children


def test_a_probe_of_something_that_is_no_host_is_refused(config_for: Config, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    os.chmod(script, 0o755)
    with pytest.raises(WireError, match="answered the probe with b'hello"):
        probe(config_for(python=str(script)))


TORCHRUN: Final = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    **{"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"},
}
"""A part of the variables that torchrun sets for the first of two ranks."""


@pytest.mark.parametrize("hosts", ["forked"])
async def test_an_engine_of_a_trainer_under_torchrun_forms_a_group_of_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these variables, torch before 2.14 waits for a store that nobody serves."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    await make("own group").start(print)


def test_engines_that_start_in_the_trainers_process_see_no_launcher_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with outside_the_trainers_group():
        assert not TORCHRUN.keys() & os.environ.keys()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert {name: os.environ[name] for name in TORCHRUN} == TORCHRUN
