"""Resources that the processes of a killed host leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from drivetrain.process.process_tree import kill_family, shared_memory_of

_HOLDS_A_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


def test_named_semaphores_of_the_killed_are_removed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_SEMAPHORE], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        semaphore = Path("/dev/shm") / f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        assert shared_memory_of([psutil.Process(process.pid)]) == {semaphore}
        # Kill it together with its resource tracker, which would have removed the semaphore a moment later.
        kill_family(process.pid, "no mark")
    assert not semaphore.exists()


_HOLDS_MEMORY = """
import mmap, os, sys, time
names = [f"engine_mq_{os.getpid()}_2728a4de", f"trainer-{os.getppid()}-a{os.getpid()}b"]
for name in names:
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        globals()[name] = mmap.mmap(file.fileno(), 4096)
print(*names, flush=True)
time.sleep(60)
"""


def test_memory_that_is_named_after_the_killed_is_removed_and_no_other() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_MEMORY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        own, other = (Path("/dev/shm") / name for name in process.stdout.readline().split())
        kill_family(process.pid, "no mark")
    assert not own.exists()
    assert other.exists()
    other.unlink()


_SHARES_MEMORY = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=len(sys.argv) < 2, size=4096, name=(sys.argv[1:] or [None])[0])
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
time.sleep(60)
"""


def test_memory_that_nobody_uses_any_more_is_removed_whatever_its_name() -> None:
    def sharing(*name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SHARES_MEMORY, *name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    with sharing() as engine:
        assert engine.stdout is not None
        name = engine.stdout.readline().strip()
        with sharing(name) as other:
            assert other.stdout is not None
            other.stdout.readline()
            kill_family(engine.pid, "no mark")
            assert (Path("/dev/shm") / name).exists(), "another process uses it"
            kill_family(other.pid, "no mark")
    assert not (Path("/dev/shm") / name).exists()
