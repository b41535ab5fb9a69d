from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from tests.faults.fault import Stage

ROOT = Path(__file__).parents[2]
OUTCOMES = pytest.StashKey[Counter[tuple[str, ...]]]()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage: every process started from here on can be struck."""
    folder = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRIVETRAIN_FAULTS", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        path = [str(ROOT / "tests/support/faults"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        _stop_what_forks()  # started by another file's tests, it would not know the stage
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()  # starts the processes that later ones are forked from
        first.join()
        first.close()
        try:
            yield Stage(folder)
        finally:  # processes that other tests fork could be struck
            _stop_what_forks()


def _stop_what_forks() -> None:
    """End the processes that ``multiprocessing`` forks others from; the next use starts them again."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples, as an engine belongs to the loop that started it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Counter[tuple[str, ...]]:
    """Counts of the faults' outcomes, shown at the end."""
    return request.config.stash.setdefault(OUTCOMES, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counted = config.stash.get(OUTCOMES, None)
    if not counted:
        return
    terminalreporter.section(f"what {counted.total()} faults came to")
    for key, number in sorted(counted.items()):
        terminalreporter.write_line(f"{number:4}  " + " | ".join(key))
    folder = ROOT / "build/faults"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[*key, number] for key, number in sorted(counted.items())]
    (folder / f"{rows[0][0]}.json").write_text(json.dumps(rows, indent=0))
