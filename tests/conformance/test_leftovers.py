"""Resources of other processes are not counted as left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drivetrain_conformance.assertions.leftovers import Holdings

_HOLDS_A_SEMAPHORE = """
import multiprocessing, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
sys.stdin.read()
"""
"""The creator of a named semaphore maps it under a temporary name."""


def test_a_semaphore_of_a_process_that_lives_is_its_own() -> None:
    before = Holdings.now()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        name = f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        assert name in Holdings.now().shared_memory
        assert name not in Holdings.now().left_since(before)
        process.stdin.close()
    file = Path("/dev/shm/drivetrain-test-of-leftovers")
    file.touch()
    try:
        assert file.name in Holdings.now().left_since(before), "nobody uses it"
    finally:
        file.unlink()
