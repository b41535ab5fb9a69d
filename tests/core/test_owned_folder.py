"""Folders that are removed after their owners were killed, and never while one lives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans

OWNER = """
import os, sys, time
from pathlib import Path
from drivetrain.backend.toolkit.owned_folder import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]), "ours-")
(folder.path / "sub").mkdir()
(folder.path / "sub" / "file").write_text("x")
print(folder.path, flush=True)
if "forks" in sys.argv:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def owner(parent: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that owns a folder in ``parent``; yield it with the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(params=["in the temporary folder", "elsewhere"])
def parent(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "in the temporary folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_goes_once_its_owner_was_killed_and_not_before(parent: Path) -> None:
    with owner(parent) as (process, folder):
        remove_orphans(parent, "ours-")
        assert (folder / "sub" / "file").read_text() == "x"
        process.kill()
        process.wait()
        remove_orphans(parent, "theirs-")
        assert folder.exists()
        remove_orphans(parent, "ours-")
        assert not folder.exists()


def test_a_folder_stays_while_any_process_has_its_lock(parent: Path) -> None:
    folder = OwnedFolder(parent, "ours-")
    assert folder.lock is not None
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder.lock])
    folder.let_go()
    remove_orphans(parent, "ours-")
    assert folder.path.exists()
    heir.communicate(b"\n")
    remove_orphans(parent, "ours-")
    assert not folder.path.exists()


def test_a_forked_child_does_not_keep_the_folder_of_a_killed_owner(parent: Path) -> None:
    with owner(parent, "forks") as (process, folder):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            remove_orphans(parent, "ours-")
            assert not folder.exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_folders_of_other_hosts_stay(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of a network may lock within one host only."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "another-host")
        folder = OwnedFolder(parent, "ours-")
        folder.let_go()
    remove_orphans(parent, "ours-")
    assert folder.path.exists()


def test_names_in_the_temporary_folder_are_as_short_as_those_of_mkdtemp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, plain = OwnedFolder(tmp_path, "ours-"), tempfile.mkdtemp(prefix="ours-")
    assert len(str(ours.path)) == len(plain)
    assert OwnedFolder(Path("/tmp"), "drivetrain-test-").path.name.count("-") == 2


def test_a_folder_whose_owner_was_killed_before_it_had_the_lock_goes_after_an_hour(parent: Path) -> None:
    folder = OwnedFolder(parent, "ours-")
    folder.let_go()
    (folder.path / "lock").rename(folder.path / "locking")
    remove_orphans(parent, "ours-")
    assert folder.path.exists()
    an_hour_ago = time.time() - 3700
    os.utime(folder.path, (an_hour_ago, an_hour_ago))
    remove_orphans(parent, "ours-")
    assert not folder.path.exists()


def test_a_folder_without_locks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    with monkeypatch.context() as without_locks:
        without_locks.setattr("fcntl.flock", refuse)
        folder = OwnedFolder(tmp_path, "ours-")
    assert folder.lock is None
    os.utime(folder.path, (0.0, 0.0))
    remove_orphans(tmp_path, "ours-")
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_removal_is_idempotent_and_ends_what_another_owner_began(tmp_path: Path) -> None:
    folder = OwnedFolder(tmp_path, "ours-")
    (folder.path / "file").write_text("x")
    (folder.path / "lock").unlink()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_owned_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "ours-file").write_text("x")
    (tmp_path / "ours-folder").mkdir()
    (tmp_path / "ours-link").symlink_to(tmp_path / "ours-folder")
    (tmp_path / "ours-foreign").mkdir()
    (tmp_path / "ours-foreign" / "lock").write_text("another-host")
    remove_orphans(tmp_path, "ours-")
    remove_orphans(tmp_path / "missing", "ours-")
    assert len(list(tmp_path.iterdir())) == 4
