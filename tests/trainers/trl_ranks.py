# pyright: reportMissingImports=false
"""TRL's GRPOTrainer in two processes (DDP and FSDP2 on gloo), with an engine each or one for all: ``make test-trl``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tiny_grpo import BACKENDS

RANKS: Final = 2
STEPS: Final = 16
HANGING: Final = 900.0
"""Seconds after which ranks count as hanging: half the timeout of their process group, on a machine however busy."""
SCRIPT: Final = Path(__file__).parents[1] / "helpers" / "trl_rank.py"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run(folder: Path, **settings: Any) -> dict[int, dict[str, Any]]:
    """Train on every rank; return what each one saw that lived to the end."""
    given = {"through": "rollout_func", "backend": "transformers", "share": False, "steps": 4, **settings}
    common = {**os.environ, "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), json.dumps(given)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            process.wait(HANGING)
    finally:
        for process in processes:
            process.kill()
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def require_trained(seen: Mapping[int, dict[str, Any]], through: str, kind: str = "MULTI_CPU") -> None:
    """Require on every rank that each token is of the step just trained, and that logprobs agree."""
    assert sorted(seen) == [*range(RANKS)]
    for rank in seen.values():
        assert rank["error"] is None
        assert rank["kind"] == kind
        assert rank["steps"] == [[step, [str(step)]] for step in range(STEPS)]
        gaps = rank["gaps" if through == "rollout_func" else "trl_gaps"]
        assert len(gaps) == STEPS
        assert max(gaps) <= 1e-4
        assert rank["rewards"][0] < 0.3
        assert rank["rewards"][-1] > 0.8
    assert not set(seen[0]["first"]) & set(seen[1]["first"])


@pytest.mark.parametrize("share", [False, True], ids=["an engine each", "one engine"])
@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
def test_the_reward_rises_on_every_rank(through: str, share: bool, tmp_path: Path) -> None:
    require_trained(run(tmp_path, through=through, share=share, steps=STEPS), through)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_train_with_one_engine_in_a_host_process(backend: str, tmp_path: Path) -> None:
    engine = {"isolation": "process"}
    require_trained(run(tmp_path, backend=backend, engine=engine, share=True, steps=STEPS), "rollout_func")


def test_two_ranks_train_with_one_fleet(tmp_path: Path) -> None:
    require_trained(run(tmp_path, fleet=2, share=True, steps=STEPS), "rollout_func")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
def test_two_ranks_push_the_shards_of_a_policy_that_fsdp2_splits(through: str, backend: str, tmp_path: Path) -> None:
    seen = run(tmp_path, through=through, backend=backend, share=True, fsdp=True, steps=STEPS)
    require_trained(seen, through, "FSDP")


@pytest.mark.parametrize("adapter", ["merged", "alone"])
@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
def test_two_ranks_push_an_adapter_that_fsdp2_splits(through: str, adapter: str, tmp_path: Path) -> None:
    engine = {"enable_lora": True} if adapter == "alone" else {}
    seen = run(tmp_path, through=through, share=True, fsdp=True, adapter=adapter, engine=engine, steps=STEPS)
    require_trained(seen, through, "FSDP")


def test_shards_that_are_refused_on_one_rank_end_the_rollout_on_both(tmp_path: Path) -> None:
    seen = run(tmp_path, share=True, fsdp=True, strike="refuse", on=1, at=2)
    for rank in range(RANKS):
        name, message = seen[rank]["error"]
        assert name == "InvalidWeights"
        assert "NaN" in message
        assert seen[rank]["steps"] == [[0, ["0"]], [1, ["1"]]]


@pytest.mark.parametrize(
    ("through", "share", "on"), [("rollout_func", True, 0), ("rollout_func", False, 1), ("use_vllm", False, 0)]
)
def test_a_push_that_is_refused_on_one_rank_fails_on_both(through: str, share: bool, on: int, tmp_path: Path) -> None:
    seen = run(tmp_path, through=through, share=share, strike="refuse", on=on, at=2)
    for rank in range(RANKS):
        name, message = seen[rank]["error"]
        assert name == "InvalidWeights"
        assert "model.embed_tokens.weight (NaN)" in message
        assert message.startswith(f"on rank {on} of the trainer: ") == (rank != on)
        assert seen[rank]["steps"] == [[0, ["0"]], [1, ["1"]]]


@pytest.mark.parametrize(("share", "on"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_a_rank_whose_other_one_is_killed_is_released(share: bool, on: int, tmp_path: Path) -> None:
    seen = run(tmp_path, share=share, strike="kill", on=on, at=2)
    (rank,) = seen
    assert rank != on
    name, message = seen[rank]["error"]
    assert name == "TrainerRankLost"
    assert f"rank {on} of the trainer ended" in message


@pytest.mark.parametrize(("share", "on"), [(True, 0), (False, 1)])
def test_an_engine_that_dies_ends_the_training_on_both_ranks(share: bool, on: int, tmp_path: Path) -> None:
    engine = {"isolation": "process"}
    seen = run(tmp_path, through="use_vllm", share=share, engine=engine, strike="engine", on=on, at=2)
    assert [seen[rank]["error"][0] for rank in range(RANKS)] == ["EngineDied"] * RANKS
    assert all("was killed by SIGKILL" in seen[rank]["error"][1] for rank in range(RANKS))
    assert f"on rank {on} of the trainer: " in seen[1 - on]["error"][1]


def test_ranks_that_would_push_to_one_engine_are_told_to_share_it(tmp_path: Path) -> None:
    seen = run(tmp_path, one_handle=True)
    for rank in range(RANKS):
        name, message = seen[rank]["error"]
        assert name == "InvalidRequest"
        assert "several ranks of the trainer would push to the engine at unix:" in message
        assert "pass share=True" in message


def test_ranks_share_the_engine_of_a_handle(tmp_path: Path) -> None:
    require_trained(run(tmp_path, one_handle=True, share=True, steps=STEPS), "rollout_func")
