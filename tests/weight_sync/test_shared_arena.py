"""An arena is visible to other processes while it is open, and is removed however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.transports.shared_arena import Arena, MappedArena

OWNER = """
import os, sys, tempfile
if sys.argv[1] == "file":
    del os.memfd_create
from drivetrain_weight_sync.transports.shared_arena import Arena
arena = Arena(1 << 20)
arena.memory.fill_(7)
print(arena.path, flush=True)
sys.stdin.readline()
"""


def owner(kind: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), TMPDIR=str(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_mapping_outlives_an_owner_that_is_killed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    process, path = owner("memory", tmp_path)
    mapped = MappedArena(path, 1 << 20)
    assert mapped.still(path, 1 << 20)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert torch.all(mapped.memory == 7)
    assert not Path(path).exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        mapped.still(path, 1 << 20)


def test_without_anonymous_files_it_is_a_file_that_is_removed_at_exit(tmp_path: Path) -> None:
    process, path = owner("file", tmp_path)
    assert Path(path).parent == tmp_path
    assert torch.all(MappedArena(path, 1 << 20).memory == 7)
    process.communicate("\n")
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_closing_removes_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena = Arena(100)
    assert [str(path) for path in tmp_path.iterdir()] == [arena.path]
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_a_closed_arena_comes_back() -> None:
    def shared() -> int:
        return int(Path("/proc/self/status").read_text().split("RssShmem:")[1].split()[0])

    before = shared()
    arena = Arena(64 << 20)
    assert shared() - before >= 64 << 10
    arena.close()
    time.sleep(0.01)
    assert shared() - before < 1 << 10


def test_an_empty_arena_can_be_made_and_mapped() -> None:
    arena = Arena(0)
    assert len(MappedArena(arena.path, 0).memory) >= 0
    arena.close()


def test_what_others_map_cannot_be_larger_than_it_is() -> None:
    arena = Arena(4096)
    with pytest.raises(InvalidRequest, match="holds 4096 bytes, but the source says 8192"):
        MappedArena(arena.path, 8192)
    arena.close()
