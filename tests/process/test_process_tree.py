"""Resources that the processes of a killed host leave behind."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from drivetrain.process import shared_memory_files
from drivetrain.process.process_tree import MARK, SCRATCH, kill_family, runs
from drivetrain.process.shared_memory_files import (
    SharedMemoryList,
    list_shared_memory,
    listed,
    shared_memory_of,
    unlink_listed,
)

HANGING = 60.0
"""Seconds after which a test counts as hanging, on a machine however busy."""

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


def test_listed_memory_is_removed_once_no_process_uses_it(tmp_path: Path) -> None:
    unlink_listed(tmp_path)  # a host that was killed before it listed any
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_SEMAPHORE], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own = psutil.Process(process.pid)
        (semaphore,) = shared_memory_of([own])
        gone = tmp_path / "gone"
        list_shared_memory([semaphore, gone], tmp_path, own.create_time())
        with pytest.raises(BlockingIOError, match=semaphore.name):
            unlink_listed(tmp_path)
        for one in (*own.children(), own):  # the child is the resource tracker, which would have removed the semaphore
            one.kill()
    assert semaphore.exists()
    unlink_listed(tmp_path)
    assert not semaphore.exists()


def test_memory_that_was_there_before_the_host_is_not_listed(tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    dataset.write_text("rows")
    list_shared_memory([dataset], tmp_path, time.time() + 1)
    unlink_listed(tmp_path)
    assert dataset.exists()
    list_shared_memory([dataset], tmp_path, time.time() - 60)
    (listing,) = tmp_path.glob("drivetrain-*")
    listing.write_text(f"{listing.read_text()}7 /dev/sh")  # as a writer that was killed leaves it
    unlink_listed(tmp_path)
    assert not dataset.exists()


_MAPS = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(600)
"""


@contextmanager
def mapped(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Map a file in a process with a session of its own."""
    command = [sys.executable, "-c", _MAPS, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture
def shared_file() -> Iterator[Path]:
    file = Path("/dev/shm") / f"drivetrain-test-{uuid.uuid4().hex}"
    file.write_bytes(b"a" * 4096)
    yield file
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("older", [True, False])
def test_a_family_that_ends_leaves_what_was_there_before_it(shared_file: Path, older: bool) -> None:
    with mapped(shared_file) as process:
        kill_family(process.pid, "no mark", since=time.time() + (60 if older else -60))
    assert shared_file.exists() is older


@pytest.fixture
def folder_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, where other programs may make files at any time."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory_files, "_SHARED_MEMORY", folder)
    monkeypatch.setattr(shared_memory_files, "_PAUSE", 0)
    return folder


def new(file: Path) -> Path:
    file.write_bytes(b"a" * 4096)
    return file


def look(shared: SharedMemoryList, process: subprocess.Popen[str]) -> int:
    """Look three times; return how often the processes were asked for."""
    asked: list[psutil.Process] = []

    def processes() -> list[psutil.Process]:
        asked.append(psutil.Process(process.pid))
        return asked[-1:]

    for _ in range(3):
        shared.look(processes)
    return len(asked)


def test_memory_that_appears_later_is_listed(tmp_path: Path, folder_of_memory: Path) -> None:
    first = new(folder_of_memory / "first")
    shared = SharedMemoryList(tmp_path, 0.0)
    later = folder_of_memory / "later"
    with mapped(first) as process:
        assert look(shared, process) == 0, "no file appeared"
    with mapped(new(later)) as process:
        assert look(shared, process) == 2, "a file is there before it is mapped"
        assert listed(tmp_path) == shared.files() == {later}
        later.rename(first)
        assert look(shared, process) == 2
        assert listed(tmp_path) == shared.files() == {first}
    unlink_listed(tmp_path)
    assert not first.exists()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_memory_of_the_trainer_is_not_listed(tmp_path: Path, folder_of_memory: Path, is_mapped: bool) -> None:
    """It is mapped by this process too, or bears its number."""
    shared = SharedMemoryList(tmp_path, 0.0)
    lent = new(folder_of_memory / ("lent" if is_mapped else f"torch_{os.getpid()}_0"))
    with lent.open("r+b") as file, mapped(lent) as process:
        own = mmap.mmap(file.fileno(), 0) if is_mapped else None
        assert look(shared, process) == 2
        assert listed(tmp_path) == shared.files() == set()
        del own


def test_a_new_file_with_a_listed_name_is_kept(tmp_path: Path, folder_of_memory: Path) -> None:
    shared = SharedMemoryList(tmp_path, 0.0)
    other = new(tmp_path / "other")
    with mapped(new(folder_of_memory / "name")) as process:
        assert look(shared, process) == 2
    (name,) = listed(tmp_path)
    other.rename(name)
    assert listed(tmp_path) == shared.files() == set()
    unlink_listed(tmp_path)
    assert name.exists()


_ENDS_AFTER_ITS_CHILDREN = """
import os, sys
from pathlib import Path
from drivetrain.process.process_tree import end_own_family
from drivetrain.process.shared_memory_files import list_shared_memory
files = [Path("/dev/shm") / name.format(os.getpid()) for name in sys.argv[1:]]
for file in files:
    file.write_bytes(b"a")
list_shared_memory(files, Path(os.environ["DRIVETRAIN_HOST_FOLDER"]), 0)
print(*files, flush=True)
end_own_family()
"""


def test_a_host_that_outlives_its_engine_removes_what_was_listed(tmp_path: Path) -> None:
    """None of these is mapped by then, and one bears the host's own number."""
    marks = {MARK: "a host of this test", SCRATCH: str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    names = [f"drivetrain-test-{uuid.uuid4().hex}", "engine_mq_{}_" + uuid.uuid4().hex]
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_AFTER_ITS_CHILDREN, *names],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,
        env={**os.environ, **marks},
    )
    files = [Path(file) for file in ended.stdout.split()]
    assert len(files) == 2
    left = [file for file in files if file.exists()]
    for file in left:
        file.unlink()
    assert not left


@pytest.mark.parametrize("name", [b"a\nb", b"\xff", b"a b"])
def test_memory_of_any_name_is_listed_and_removed(tmp_path: Path, name: bytes) -> None:
    files = [tmp_path / os.fsdecode(name), tmp_path / "plain"]
    for file in files:
        file.write_bytes(b"")
    list_shared_memory(files, tmp_path, 0)
    unlink_listed(tmp_path)
    assert [file.exists() for file in files] == [b"\n" in name, False], "a name with a line break is left"


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


_HAS_A_CORE_WITH_A_WORKER = """
import os, time
from drivetrain.process.process_tree import end_with
host = os.getpid()
if core := os.fork():
    os.waitpid(core, 0)
elif worker := os.fork():
    print(os.getpid(), worker, flush=True)
    end_with(host)
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("marked", [True, False])
def test_a_core_whose_host_was_killed_alone_ends_the_rest_of_it(marked: bool, tmp_path: Path) -> None:
    """Without a mark the session is not the host's own, and only the core ends."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    marks = {MARK: "a host of this test", SCRATCH: str(scratch)} if marked else {}
    with subprocess.Popen(
        [sys.executable, "-c", _HAS_A_CORE_WITH_A_WORKER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **marks},
    ) as host:
        assert host.stdout is not None
        core, worker = (psutil.Process(int(pid)) for pid in host.stdout.readline().split())
        assert runs(core)
        host.kill()
        host.wait()
        until(lambda: not runs(core))
        assert runs(worker) is not marked
        assert scratch.exists() is not marked
        if not marked:
            worker.kill()


_OUTLIVES_ITS_FIRST_THREAD = """
import ctypes, threading
def say():
    print("first thread ends", flush=True)
    ended.wait()
ended = threading.Event()
threading.Thread(target=say).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_runs_until_its_last_thread_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", _OUTLIVES_ITS_FIRST_THREAD], stdout=subprocess.PIPE) as ran:
        process = psutil.Process(ran.pid)
        try:
            assert ran.stdout is not None
            assert ran.stdout.readline()
            until(lambda: process.status() == psutil.STATUS_ZOMBIE)
            assert runs(process)
        finally:
            process.kill()
        until(lambda: not runs(process))


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + HANGING
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)
