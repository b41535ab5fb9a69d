"""The whole loop against a real engine, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drivetrain import Capability, EngineConfig
from drivetrain.cli import main
from drivetrain.testing import tiny_model
from drivetrain_demo.trainer import Trainer
from drivetrain_transformers.engine import TransformersBackend
from drivetrain_weight_sync import WeightSync, WeightSyncResult

Demo = Callable[..., tuple[int, str, str]]
SMALL = ("--prompts-per-step", "4", "--n", "4", "--minibatches", "2")


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Demo:
    """Run ``drivetrain demo`` in this process; return (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["demo", "--out", str(tmp_path / "out"), *arguments])
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    return run


def document(demo: Demo, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the demo with ``--json`` and return what it printed."""
    ended, out, err = demo(*arguments, "--json")
    assert ended == code, err
    printed: dict[str, Any] = json.loads(out)
    return printed


@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_each_rollout_comes_from_the_weights_just_pushed(demo: Demo, tmp_path: Path, isolation: str) -> None:
    shown = document(demo, "--steps", "3", "--isolation", isolation, *SMALL)
    assert (shown["backend"], shown["isolation"], shown["steps"], shown["ok"]) == ("transformers", isolation, 3, True)
    assert [record["version"] for record in shown["records"]] == ["step-0", "step-1", "step-2", "step-3"]
    assert all(record["versions_seen"] == [record["version"]] for record in shown["records"])
    assert shown["weight_versions_ok"]
    assert 0 < shown["max_logprob_gap"] < 1e-3
    assert shown["sync_seconds_median"] > 0
    trained = shown["records"][:-1]
    assert all(record["sleep_seconds"] > 0 and record["wake_seconds"] > 0 for record in trained)
    assert shown["records"][-1]["sync_seconds"] is None
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert shown["plot"] == str(tmp_path / "out" / "demo.png")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(demo: Demo) -> None:
    def rewards(seed: int) -> list[float]:
        shown = document(demo, "--steps", "2", "--seed", str(seed), "--n", "8", "--no-plot", "--max-new-tokens", "8")
        return [record["reward"] for record in shown["records"]]

    first = rewards(1)
    assert rewards(1) == first
    assert rewards(2) != first


def test_the_reward_rises(demo: Demo) -> None:
    shown = document(demo, "--steps", "30", "--no-plot")
    assert shown["reward_last"] - shown["reward_first"] > 0.2
    assert [check["name"] for check in shown["checks"]] == ["weight versions", "logprobs", "reward rise"]


def test_a_reward_that_does_not_rise_fails_the_run(demo: Demo) -> None:
    shown = document(demo, "--steps", "20", "--learning-rate", "0", "--no-plot", *SMALL, code=1)
    (failed,) = [check for check in shown["checks"] if not check["passed"]]
    assert failed["name"] == "reward rise"
    assert shown["weight_versions_ok"]


def test_without_training_the_policy_is_only_looked_at(demo: Demo) -> None:
    shown = document(demo, "--steps", "0", *SMALL)
    assert (shown["steps"], len(shown["records"]), shown["sync_seconds_median"]) == (0, 1, None)
    assert any("not judged" in note for note in shown["notes"])


def test_a_model_and_prompts_of_the_users_in_bfloat16(demo: Demo, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype="bfloat16")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12 * 12 =", "answer": 144}\n{"prompt": "Half of 10?", "answer": 5}\n', "utf-8")
    shown = document(
        demo,
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--steps",
        "2",
        "--max-new-tokens",
        "5",
        "--no-plot",
        *SMALL,
    )
    assert (shown["dtype"], shown["plot"]) == ("bfloat16", None)
    assert [check["name"] for check in shown["checks"]] == ["weight versions", "logprobs"]
    assert 1e-4 < shown["max_logprob_gap"] < 0.5


def test_what_the_engine_does_not_claim_is_left_out_and_said(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = TransformersBackend.capabilities

    def fewer(config: EngineConfig) -> frozenset[Capability]:
        return claimed(config) - {Capability.SLEEP_KV_CACHE, Capability.SEED}

    monkeypatch.setattr(TransformersBackend, "capabilities", fewer)
    shown = document(demo, "--steps", "1", "--isolation", "inline", "--no-plot", *SMALL)
    assert shown["records"][0]["sleep_seconds"] is None
    assert shown["records"][0]["sync_seconds"] > 0
    assert any("sleep_kv_cache" in note for note in shown["notes"])
    assert any("seed" in note for note in shown["notes"])


def test_completions_of_another_version_end_the_run(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    push = WeightSync.push

    async def mislabel(self: WeightSync, *, version: str) -> WeightSyncResult:
        return await push(self, version="step-1" if version == "step-2" else version)

    monkeypatch.setattr(WeightSync, "push", mislabel)
    shown = document(demo, "--steps", "4", "--no-plot", *SMALL, code=1)
    assert not shown["weight_versions_ok"]
    assert len(shown["records"]) == 3
    (failed,) = [check for check in shown["checks"] if not check["passed"]]
    assert "step 2: the completions carry step-1; expected step-2" in failed["detail"]


def test_weights_that_did_not_arrive_end_the_run(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    push, load = WeightSync.push, Trainer.load
    trainers: list[Trainer] = []

    def remember(*arguments: Any, **named: Any) -> Trainer:
        trainers.append(load(*arguments, **named))
        return trainers[-1]

    async def push_then_change(self: WeightSync, *, version: str) -> WeightSyncResult:
        result = await push(self, version=version)
        if version == "step-1":
            with torch.no_grad():
                for parameter in trainers[-1].model.parameters():
                    parameter.mul_(1.05)
        return result

    monkeypatch.setattr(Trainer, "load", remember)
    monkeypatch.setattr(WeightSync, "push", push_then_change)
    ended, out, _ = demo("--steps", "4", "--no-plot", *SMALL)
    assert ended == 1
    assert "FAILED logprobs: step 1: engine and trainer differ by up to" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--steps", "3", "--expect-rise"), "20 steps"),
        (("--set", "dtype"), "FIELD=VALUE"),
        (("--set", "model=other"), "--model"),
        (("--n", "1"), "--n"),
        (("--device", "nonsense"), "nonsense"),
    ],
)
def test_wrong_usage_is_refused(demo: Demo, arguments: tuple[str, ...], complaint: str) -> None:
    ended, out, err = demo(*arguments)
    assert ended == 2
    assert complaint in " ".join(err.replace("│", " ").split())
    assert out == ""


def test_a_wrong_prompts_file_is_refused_before_an_engine_is_made(demo: Demo, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3 + 4 ="}\n', "utf-8")
    ended, _, err = demo("--prompts", str(prompts))
    assert ended == 1
    assert "line 1: answer is missing" in err
    assert "starting" not in err


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_an_interrupt_ends_the_engine_too(isolation: str) -> None:
    command = [sys.executable, "-m", "drivetrain", "demo", "--isolation", isolation, "--no-plot", *SMALL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        while not (line := running.stderr.readline()).startswith("step-1:"):
            assert line, "the demo ended before its second step"
        children = psutil.Process(running.pid).children(recursive=True)
        assert len(children) == (isolation == "process")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
