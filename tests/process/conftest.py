from __future__ import annotations

import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

import warm_python
from drivetrain import EngineConfig, GenerateRequest, LogprobsMode, SamplingParams, Timeouts
from drivetrain.process import HostedBackend


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with the backend "fake", on the import path of new processes; returns its folder."""
    site = tmp_path / "site"
    info = site / "fakeplug-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fakeplug.py"), site)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fakeplug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain]\nfake = fakeplug\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    return site


@pytest.fixture
def config_for() -> Callable[..., EngineConfig]:
    """Makes configurations of the backend "fake": ``config_for(trouble, python, **timeouts)``."""

    def build(trouble: str | None = None, python: str | None = None, **timeouts: float) -> EngineConfig:
        return EngineConfig(
            backend="fake",
            model="none",
            engine_kwargs={} if trouble is None else {"trouble": trouble},
            python=python,
            timeouts=Timeouts(**timeouts),
        )

    return build


@pytest.fixture
def hosts() -> str:
    """The way host processes are created: "spawned", or "forked" where a test is parametrized so."""
    return "spawned"


@pytest.fixture
async def make(
    plugin: Path, config_for: Callable[..., EngineConfig], hosts: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., HostedBackend]]:
    """Makes hosted backends, and closes them at the end; nothing of them may be left then."""
    if hosts == "forked":
        warm_python.server()  # stays until the test run ends
    before = _held()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launched = warm_python.forked_hosts() if hosts == "forked" else nullcontext()
    made: list[HostedBackend] = []

    def build(trouble: str | None = None, python: str | None = None, **timeouts: float) -> HostedBackend:
        made.append(HostedBackend(config_for(trouble, python, **timeouts), "fake"))
        return made[-1]

    with launched:
        yield build
        for backend in made:
            await backend.close()
    threads, files, children = _held()
    # Fewer is no leak: a thread of an earlier test may end meanwhile.
    assert threads <= before[0]
    assert files <= before[1]
    assert not [child for child in children if child not in before[2]]


@pytest.fixture
async def hosted(make: Callable[..., HostedBackend]) -> HostedBackend:
    """A started hosted backend."""
    backend = make()
    await backend.start(print)
    return backend


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """Makes requests: ``ask(request_id, tokens, **sampling_params)``."""

    def build(request_id: str = "r", tokens: int = 4, **params: object) -> GenerateRequest:
        sampling = SamplingParams.model_validate(params)
        return GenerateRequest(request_id, list(range(tokens)), sampling, tokens, (0,), LogprobsMode.TEMPERATURE)

    return build


def _held() -> tuple[int, int, list[psutil.Process]]:
    """Return counts of threads and files, and child processes; some may belong to an engine that other tests share."""
    me = psutil.Process()
    return threading.active_count(), me.num_fds(), me.children(recursive=True)
