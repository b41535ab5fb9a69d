"""What the processes of a killed host leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from drivetrain.host.reap import kill_family, semaphores_of

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
        assert semaphores_of([psutil.Process(process.pid)]) == {semaphore}
        # With its resource tracker, which would have removed the semaphore a moment later.
        kill_family(process.pid, "no mark")
    assert not semaphore.exists()
