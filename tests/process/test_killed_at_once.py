"""Files of a trainer and its host that are killed: the next engine removes them once both have ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import warm_python
from drivetrain import InferenceEngine, create_engine
from drivetrain.process.process_tree import runs
from drivetrain.process.shared_memory_files import shared_memory_of
from fleets import until
from warm_python import Program, running

TRAINER = """
import asyncio, sys
from drivetrain import create_engine

async def main():
    async with create_engine("transformers", model=sys.argv[1], isolation="process") as engine:
        await engine.handle()
        print(engine.host_pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""

TRAINER_OF_A_HOST_WITH_SHARED_MEMORY = """
import asyncio, sys
from drivetrain import EngineConfig, GenerateRequest, LogprobsMode, SamplingParams
from drivetrain.process import HostedBackend

async def main():
    when = sys.argv[1]
    kwargs = {"trouble": "semaphore child"} if when == "at the start" else {}
    backend = HostedBackend(EngineConfig(backend="fake", model="m", engine_kwargs=kwargs), "fake")
    await backend.start(lambda stage: None)
    if when == "later":
        await asyncio.sleep(2)
        await backend.generate(
            GenerateRequest("semaphore child", [1], SamplingParams(), 1, (0,), LogprobsMode.TEMPERATURE)
        )
    print(backend.pid, (await backend.stats()).kv_cache_bytes, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def temporary(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own, with a path that leaves room for sockets."""
    warm_python.server()  # in the folder of the whole run
    folder = Path(tempfile.mkdtemp(prefix="dt-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@asynccontextmanager
async def trainer(model: Path) -> AsyncIterator[tuple[Program, int]]:
    """Start a trainer with a hosted engine and a handle to it; yield its process and its host's process id."""
    async with running("-c", TRAINER, str(model)) as process:
        host = int(await process.stdout.readline())
        try:
            yield process, host
        finally:
            if psutil.pid_exists(host):
                os.kill(host, signal.SIGKILL)


def owned(temporary: Path) -> list[Path]:
    """Return the folders of hosts and listeners."""
    return [*temporary.glob("drivetrain-host-*"), *temporary.glob("drivetrain-engine-*")]


async def until_ended(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid) or not runs(psutil.Process(pid)))


@asynccontextmanager
async def another_engine(model: Path) -> AsyncIterator[InferenceEngine]:
    """Open another engine with a handle to it, whose host is forked."""
    with warm_python.forked_hosts():
        async with create_engine("transformers", model=str(model), isolation="process") as engine:
            await engine.handle()
            yield engine


@pytest.mark.slow
async def test_folders_of_a_trainer_and_a_host_that_were_killed_at_once_go_with_the_next(
    model: Path, temporary: Path
) -> None:
    async with trainer(model) as (process, host):
        os.kill(process.pid, signal.SIGSTOP)  # so that it does not see its host die
        os.kill(host, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
    await until_ended(host)
    left = owned(temporary)
    assert len(left) == 2
    async with another_engine(model):
        await until(lambda: not any(folder.exists() for folder in left))  # a thread removes them
        assert len(owned(temporary)) == 2
    assert owned(temporary) == []


@pytest.mark.slow
async def test_the_folder_of_a_host_that_outlives_its_trainer_stays_until_it_ends(model: Path, temporary: Path) -> None:
    async with trainer(model) as (process, host):
        os.kill(host, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        await until_ended(process.pid)
        [scratch] = (folder for folder in owned(temporary) if folder.name.startswith("drivetrain-host-"))
        async with another_engine(model):
            assert scratch.exists()
            os.kill(host, signal.SIGCONT)
            await until_ended(host)
            assert not scratch.exists()
    assert owned(temporary) == []


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("when", ["at the start", "later"])
async def test_shared_memory_of_a_family_that_was_killed_at_once_goes_with_the_next(
    model: Path, temporary: Path, when: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRAINER_OF_A_HOST_WITH_SHARED_MEMORY, when), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    host, child = map(int, (await process.stdout.readline()).split())
    (semaphore,) = shared_memory_of([psutil.Process(child)])
    await until(lambda: any(str(semaphore) in file.read_text() for file in temporary.glob("drivetrain-host-*/*memory")))
    os.kill(process.pid, signal.SIGSTOP)
    # The child's own child is the resource tracker, which would have removed the semaphore.
    for pid in (*(one.pid for one in psutil.Process(child).children()), host, child, process.pid):
        os.kill(pid, signal.SIGKILL)
        if pid != process.pid:
            await until_ended(pid)
    await process.wait()
    assert semaphore.exists()
    async with another_engine(model):
        await until(lambda: not semaphore.exists())
    assert owned(temporary) == []
