"""verl's trainers, unchanged, with the engine of BACKEND in the environment of ENGINE_PYTHON: ``make test-verl``."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain.process.process_tree import runs
from drivetrain.testing import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples/verl_grpo.py"
REWARD = Path(__file__).parents[1] / "helpers/verl_reward.py"
MARK = "DRIVETRAIN_TEST_OF_VERL"
"""Environment variable of all processes of a run, with its folder."""
HANGING = 120.0
"""Seconds after which processes count as left behind, on a machine however busy."""
STEPS = 8
_spec = importlib.util.spec_from_file_location("verl_grpo", EXAMPLE)
assert _spec is not None
assert _spec.loader is not None
verl_grpo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verl_grpo)


def train(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Run the example, and require that none of its processes is left; return its exit status and its output."""
    command = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--keep", str(folder)]
    command += ["--backend", os.environ.get("BACKEND", "transformers")]
    if "ENGINE_PYTHON" in os.environ:
        command += ["--python", os.environ["ENGINE_PYTHON"]]
    output = folder / "output.txt"
    with output.open("w") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment, MARK: str(folder)},
        )
        try:
            status = process.wait(timeout=1800)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # verl too; Ray's processes end with it
    ends = time.monotonic() + HANGING
    while left := [one for one in psutil.process_iter() if of_this_run(one, folder)]:
        assert time.monotonic() < ends, f"verl has ended, and of the run these are left: {left}"
        time.sleep(0.5)
    return status, output.read_text()


def of_this_run(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder) and runs(process)
    except psutil.Error:
        return False  # ended meanwhile, or owned by another user


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    return dict(verl_grpo.steps(folder))


@pytest.mark.parametrize(
    ("options", "behind"),
    [
        (["--trainer", "v0"], 0),
        (["--trainer", "sync"], 0),
        (["--trainer", "colocate_async"], 1),
        (["--trainer", "separate_async"], 2),
        (["--trainer", "fully_async"], 0),
        (["--trainer", "sync", "--lora", "merged", "--ranks", "2"], 0),
        (["--trainer", "sync", "--lora", "adapter"], 0),
        (["--trainer", "sync", "--lora", "adapter", "--ranks", "2"], 0),
    ],
    ids=[
        *("v0", "sync", "colocate_async", "separate_async", "fully_async"),
        *("two-ranks-merged-adapter", "adapter", "two-ranks-adapter"),
    ],
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
            assert logged["training/rollout_probs_diff_mean"] < (1e-3 if "merged" not in options else 1e-2)
    scores = [logged["critic/score/mean"] for logged in steps.values()]
    assert mean(scores[-2:]) > mean(scores[:2]) + 0.05


def test_one_step_off_trains_on_tokens_of_the_weights_before(tmp_path: Path) -> None:
    """The weights change at odd steps alone: there, the policy is still the one that sampled the tokens."""
    actor = "actor_rollout_ref.actor.optim"
    resting = [f"reward.custom_reward_function.path={REWARD}", "reward.custom_reward_function.name=score_at_odd_steps"]
    resting += [f"{actor}.betas=[0.0,0.0]", f"{actor}.weight_decay=0"]
    _, output = train(tmp_path, "--trainer", "one_step_off", *resting)
    assert (tmp_path / "metrics.jsonl").exists(), output
    steps = metrics(tmp_path)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, logged in steps.items():
        assert verl_grpo.versions(tmp_path, step, logged) == (step - 1, step - 1)
        difference = logged["training/rollout_probs_diff_mean"]
        assert difference < 1e-5 if step % 2 else difference > 1e-4
    assert steps[STEPS - 1]["critic/score/mean"] > steps[1]["critic/score/mean"] + 0.05


def test_experts_of_the_rollout_reach_the_trainer(tmp_path: Path) -> None:
    """verl's FSDP trainers do not replay them; its metrics count them, from the batch that the trainer has."""
    kept = tmp_path / "experts"
    kept.mkdir()
    loop = tmp_path / "loop.yaml"
    loop.write_text("- name: keeping_experts\n  _target_: verl_agent_loop.KeepingExperts\n")
    rollout = "actor_rollout_ref.rollout"
    options = [
        *("--trainer", "sync", "--steps", "2", "--model", "qwen3_moe"),
        f"{rollout}.enable_rollout_routing_replay=true",
        f"{rollout}.moe_load_balance_metrics_interval=1",
        f"{rollout}.agent.default_agent_loop=keeping_experts",
        f"{rollout}.agent.agent_loop_config_path={loop}",
    ]
    helpers = os.pathsep.join(filter(None, [str(REWARD.parent), os.environ.get("PYTHONPATH")]))
    _, output = train(tmp_path, *options, PYTHONPATH=helpers, EXPERTS_OF_VERL=str(kept))
    assert (tmp_path / "metrics.jsonl").exists(), output
    steps = metrics(tmp_path)
    assert sorted(steps) == [1, 2]
    samples = [np.load(file) for file in kept.iterdir()]
    layers, experts_per_token = 1, 2
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3_moe", num_hidden_layers=layers), dtype=torch.float32)
    for sample in samples:
        ids, experts = sample["ids"], torch.from_numpy(sample["experts"])
        assert experts.dtype is torch.int16
        assert experts.shape == (len(ids) - 1, layers, experts_per_token)
        if sample["step"] == 0:  # the weights that the engine started with
            with torch.no_grad():
                (logits,) = model(torch.tensor(ids[None]), output_router_logits=True).router_logits
            expected = logits.reshape(len(ids), -1).topk(experts_per_token).indices[:-1].sort(-1).values
            assert torch.equal(experts[:, 0].long().sort(-1).values, expected)
    for step, logged in steps.items():
        assert logged["rollout/moe/routed_experts_found"] == 1
        of_step = [sample for sample in samples if sample["step"] == step - 1]
        assert len(of_step) == verl_grpo.ROWS * verl_grpo.SAMPLES
        drawn = logged["response_length/mean"] * len(of_step)
        counted = (drawn - len(of_step)) * layers * experts_per_token
        assert logged["rollout/moe/routed_expert_assignments"] == pytest.approx(counted)
        assert logged["training/rollout_probs_diff_mean"] < 1e-3


def test_it_trains_a_vision_model_on_images(tmp_path: Path) -> None:
    _, output = train(tmp_path, "--trainer", "sync", "--model", "qwen2_5_vl", "--images")
    assert (tmp_path / "metrics.jsonl").exists(), output
    steps = metrics(tmp_path)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, logged in steps.items():
        assert verl_grpo.versions(tmp_path, step, logged) == (step - 1, step - 1)
        assert logged["training/rollout_probs_diff_mean"] < 1e-3
    scores = [logged["critic/score/mean"] for logged in steps.values()]
    assert mean(scores[-2:]) > mean(scores[:2]) + 0.05


def test_with_full_determinism_two_runs_roll_out_the_same(tmp_path: Path) -> None:
    seen = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        _, output = train(folder, "--trainer", "v0", "--steps", "2", "actor_rollout_ref.rollout.full_determinism=true")
        assert (folder / "rollouts").exists(), output
        seen.append({file.name: file.read_text() for file in (folder / "rollouts").iterdir()})
    assert sorted(seen[0]) == ["1.jsonl", "2.jsonl"]
    assert seen[0] == seen[1]


def distilling(teacher: Path, loss: str) -> list[str]:
    """Return settings by which verl trains on the logprobs of a teacher alone, which an engine of BACKEND serves."""
    one = "distillation.teacher_models.teacher_model"
    engine = {"backend": os.environ.get("BACKEND", "transformers")}
    engine |= {"python": os.environ["ENGINE_PYTHON"]} if "ENGINE_PYTHON" in os.environ else {}
    return [
        "distillation.enabled=true",
        "distillation.n_gpus_per_node=1",
        "distillation.nnodes=1",
        f"distillation.distillation_loss.loss_mode={loss}",
        "distillation.distillation_loss.use_task_rewards=false",
        f"{one}.model_path={teacher}",
        f"{one}._target_=drivetrain_trainers.verl.teacher.TeacherConfig",
        f"{one}.inference.tensor_model_parallel_size=1",
        *(f"+{one}.inference.engine_kwargs.drivetrain.{name}={value}" for name, value in engine.items()),
    ]


@pytest.mark.parametrize(
    ("trainer", "loss", "seed", "falls"),
    [("sync", "forward_kl_topk", 1, True), ("v0", "k3", 1, True), ("sync", "forward_kl_topk", 0, False)],
    ids=["likely-tokens", "own-tokens", "itself"],
)
def test_a_student_learns_of_a_teacher(trainer: str, loss: str, seed: int, falls: bool, tmp_path: Path) -> None:
    teacher = tiny_model("qwen2", num_hidden_layers=1, seed=seed)
    _, output = train(tmp_path, "--trainer", trainer, *distilling(teacher, loss))
    assert (tmp_path / "metrics.jsonl").exists(), output
    losses = [logged["actor/distillation/loss"] for _, logged in sorted(metrics(tmp_path).items())]
    assert len(losses) == STEPS
    if falls:
        assert 0 <= mean(losses[-2:]) < 0.7 * mean(losses[:2])
    else:
        assert abs(losses[0]) < 1e-4, "the teacher is the policy itself"


def several(teachers: dict[str, Path]) -> list[str]:
    """Return settings of several teachers, by data source."""
    engine = {"backend": os.environ.get("BACKEND", "transformers")}
    engine |= {"python": os.environ["ENGINE_PYTHON"]} if "ENGINE_PYTHON" in os.environ else {}
    settings = [
        "distillation.enabled=true",
        f"distillation.n_gpus_per_node={len(teachers)}",
        "distillation.nnodes=1",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.use_task_rewards=false",
        f"++ray_kwargs.ray_init.num_gpus={1 + len(teachers)}",  # on paper
    ]
    inference = "_target_: verl.workers.config.RolloutConfig, name: drivetrain, dtype: float32, "
    inference += "tensor_model_parallel_size: 1, prompt_length: 128, response_length: 16"
    for name, model in teachers.items():
        one = f"+distillation.teacher_models.{name}"
        settings += [
            f"{one}.key={name}",
            f"{one}.model_path={model}",
            f"{one}.num_replicas=1",
            f"{one}._target_=drivetrain_trainers.verl.teacher.TeacherConfig",
            f"{one}.inference={{{inference}}}",
            *(f"{one}.inference.engine_kwargs.drivetrain.{field}={value}" for field, value in engine.items()),
        ]
    return settings


def test_of_several_teachers_that_of_the_rows_data_source_scores_them(tmp_path: Path) -> None:
    """All rows have the data source "letters", whose teacher is the policy itself: the other one would have a loss."""
    teachers = {
        "letters": tiny_model("qwen2", num_hidden_layers=1, seed=0),
        "other": tiny_model("qwen2", num_hidden_layers=1, seed=1),
    }
    _, output = train(tmp_path, "--trainer", "sync", *several(teachers))
    assert (tmp_path / "metrics.jsonl").exists(), output
    losses = [logged["actor/distillation/loss"] for _, logged in sorted(metrics(tmp_path).items())]
    assert len(losses) == STEPS
    assert abs(losses[0]) < 1e-4


def test_a_configuration_that_is_refused_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    status, output = train(tmp_path, "actor_rollout_ref.rollout.enforce_eager=true")
    assert status
    assert "actor_rollout_ref.rollout.enforce_eager=True: the drivetrain rollout has no equivalent" in output
