"""One rank of several that agree after each step: prints what each step gave."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from drivetrain import DrivetrainError, InvalidRequest
from drivetrain_trainers.trl.rank_agreement import TrainerRanks

RANK = int(os.environ["RANK"])


def step(ranks: TrainerRanks, what: str) -> object:
    """Do a step; return the facts of all ranks, or the error."""
    try:
        match what:
            case "agree":
                return ranks.agree({"rank": RANK})
            case "fail":
                error = InvalidRequest(f"wrong on {RANK}", field="x")
                ranks.tell(error)
                raise error
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case _:
                raise AssertionError(what)
    except DrivetrainError as error:
        return [type(error).__name__, str(error)]
    return None


def main(steps: list[str], timeout: float) -> None:
    """Do all steps, and print what each gave as a line of JSON."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    ranks = TrainerRanks()
    for what in steps:
        sys.stdout.write(json.dumps(step(ranks, what)) + "\n")
        sys.stdout.flush()
    ranks.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), float(sys.argv[2]))
