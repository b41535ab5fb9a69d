"""Ranks of a trainer agree after each step, and all of them learn what failed on one: ``make test-trl``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

RANKS: Final = 3
SCRIPT: Final = Path(__file__).parents[1] / "helpers" / "agreeing_rank.py"
HANGING: Final = 600.0
LONG: Final = 10 * HANGING
"""A timeout of the process group that no test comes to."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run(*steps: list[str], timeout: float = LONG, wait_for: tuple[int, ...] = (0, 1, 2)) -> list[list[Any]]:
    """Do each rank's steps; return what these ranks printed, and nothing of the others."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(own), str(timeout)],
            env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank, own in enumerate(steps)
    ]  # fmt: skip
    try:
        said = [processes[rank].communicate(timeout=HANGING)[0] if rank in wait_for else "" for rank in range(RANKS)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [[json.loads(line) for line in lines.splitlines()] for lines in said]


FACTS: Final = [{"rank": rank} for rank in range(RANKS)]


def test_every_rank_gets_the_facts_of_all() -> None:
    assert run(*[["agree", "agree"]] * RANKS) == [[FACTS, FACTS]] * RANKS


@pytest.mark.parametrize("failing", range(RANKS))
def test_all_ranks_fail_where_one_does_and_go_on_together(failing: int) -> None:
    steps = [["agree", "fail" if rank == failing else "agree", "agree"] for rank in range(RANKS)]
    own, others = f"wrong on {failing}", f"on rank {failing} of the trainer: wrong on {failing}"
    for rank, seen in enumerate(run(*steps)):
        assert seen == [FACTS, ["InvalidRequest", own if rank == failing else others], FACTS]


def test_ranks_that_fail_at_once_go_on_together() -> None:
    seen = run(["fail", "agree"], ["fail", "agree"], ["agree", "agree"])
    assert [one[1] for one in seen] == [FACTS] * RANKS
    assert [one[0][0] for one in seen] == ["InvalidRequest"] * RANKS


@pytest.mark.parametrize("dead", range(RANKS))
def test_a_rank_that_dies_is_named_to_all_others_at_once(dead: int) -> None:
    steps = [["agree", "die" if rank == dead else "agree"] for rank in range(RANKS)]
    seen = run(*steps)
    for rank in {*range(RANKS)} - {dead}:
        name, message = seen[rank][1]
        assert name == "TrainerRankLost"
        assert f"rank {dead} of the trainer ended" in message


def test_a_rank_that_hangs_is_named_after_the_groups_timeout() -> None:
    """Rank 1 hears it from rank 0, or has waited as long itself."""
    seen = run(["agree", "agree"], ["agree", "agree"], ["agree", "hang"], timeout=20.0, wait_for=(0, 1))
    name, message = seen[0][1]
    assert (name, "waiting for ranks 2 of the trainer" in message) == ("DeadlineExceeded", True)
    assert seen[1][1][0] == "DeadlineExceeded"
