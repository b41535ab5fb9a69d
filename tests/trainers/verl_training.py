"""verl's trainers, unchanged, with the engine of BACKEND in the environment of ENGINE_PYTHON: ``make test-verl``."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/verl_grpo.py"
STEPS = 8
_spec = importlib.util.spec_from_file_location("verl_grpo", EXAMPLE)
assert _spec is not None
assert _spec.loader is not None
verl_grpo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verl_grpo)


def train(folder: Path, *options: str) -> tuple[int, str]:
    """Run the example; return its exit status and its output."""
    command = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--keep", str(folder)]
    command += ["--backend", os.environ.get("BACKEND", "transformers")]
    if "ENGINE_PYTHON" in os.environ:
        command += ["--python", os.environ["ENGINE_PYTHON"]]
    output = folder / "output.txt"
    with output.open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(timeout=1800)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # verl too; Ray's processes end with it
    return status, output.read_text()


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"] for line in logged if "critic/score/mean" in line["data"]}


@pytest.mark.parametrize(
    ("options", "behind"),
    [
        (["--trainer", "v0"], 0),
        (["--trainer", "sync"], 0),
        (["--trainer", "colocate_async"], 1),
        (["--trainer", "separate_async"], 2),
        (["--trainer", "sync", "--lora", "--ranks", "2"], 0),
    ],
    ids=["v0", "sync", "colocate_async", "separate_async", "two-ranks-lora"],
)
def test_it_trains_on_tokens_of_the_weights_that_it_has_just_pushed(
    options: list[str], behind: int, tmp_path: Path
) -> None:
    _, output = train(tmp_path, *options)
    assert (tmp_path / "metrics.jsonl").exists(), output
    steps = metrics(tmp_path)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, logged in steps.items():
        oldest, newest = verl_grpo.versions(tmp_path, step, logged)
        assert step - 1 - behind <= oldest <= newest <= step - 1
        if oldest == step - 1:
            assert logged["training/rollout_probs_diff_mean"] < (1e-3 if "--lora" not in options else 1e-2)
    scores = [logged["critic/score/mean"] for logged in steps.values()]
    assert mean(scores[-2:]) > mean(scores[:2]) + 0.05


def test_a_configuration_that_is_refused_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    status, output = train(tmp_path, "actor_rollout_ref.rollout.enforce_eager=true")
    assert status
    assert "actor_rollout_ref.rollout.enforce_eager=True: the drivetrain rollout has no equivalent" in output
