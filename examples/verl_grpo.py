"""Train a tiny policy with verl's GRPO; its rollouts come from any drivetrain engine, chosen by one word.

The policy learns to write lower-case letters. ``drivetrain`` is a plugin of verl: nothing of verl is changed. On a
machine without a GPU, verl needs a platform for CPUs, which is in ``tests/support/verl-cpu``. ``make demo-verl
BACKEND=sglang`` does all of this:

    python -m venv verl && verl/bin/pip install verl==0.9.1 TransferQueue fastapi uvicorn cachetools \
        'drivetrain[transformers,ray]' ./tests/support/verl-cpu
    verl/bin/python examples/verl_grpo.py --backend sglang --python ENVIRONMENT_OF_SGLANG/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
ROWS, SAMPLES, TOKENS = 8, 16, 16
LEARNING_RATE = 3e-3
TRAINERS = ("v0", "sync", "colocate_async", "separate_async")
TOLERANCE = 1e-3
"""Largest mean difference between probabilities of engine and trainer, both in float32."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> dict[str, object]:
    """Return the share of lower-case letters, and the steps whose weights sampled the response."""
    score = sum("a" <= letter <= "z" for letter in solution_str) / TOKENS
    return {"score": score, **{name: extra_info[name] for name in ("min_global_steps", "max_global_steps")}}


def write_prompts(path: Path, rows: int) -> None:
    """Write a data set of verl's form."""
    import pandas

    rows_of = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(rows)
    ]
    pandas.DataFrame(rows_of).to_parquet(path)


def arguments(given: argparse.Namespace, work: Path, model: str) -> Iterator[str]:
    """Yield verl's configuration."""
    rollout = "actor_rollout_ref.rollout"
    engine = f"{rollout}.engine_kwargs.drivetrain"
    # These lines choose the engine.
    yield f"{rollout}.name=drivetrain"
    yield f"+{engine}.backend={given.backend}"
    if given.python is not None:
        yield f"+{engine}.python={given.python}"
    for field in given.set:
        yield f"+{engine}.{field}"

    yield f"{rollout}.tensor_model_parallel_size=1"
    yield f"{rollout}.free_cache_engine={str(given.sleep).lower()}"
    yield f"{rollout}.dtype=float32"
    yield f"{rollout}.n={SAMPLES}"
    yield f"{rollout}.calculate_log_probs=true"
    yield f"{rollout}.log_prob_micro_batch_size_per_gpu={ROWS * SAMPLES // given.ranks}"
    yield f"{rollout}.agent.num_workers=1"
    yield f"actor_rollout_ref.model.path={model}"
    yield "actor_rollout_ref.model.use_remove_padding=false"
    yield "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    if given.lora:
        yield "actor_rollout_ref.model.lora_rank=8"
        yield "actor_rollout_ref.model.lora.merge=true"
    actor = "actor_rollout_ref.actor"
    yield f"{actor}.strategy=fsdp2"
    yield f"{actor}.use_kl_loss=false"
    yield f"{actor}.ppo_mini_batch_size={ROWS}"
    yield f"{actor}.ppo_micro_batch_size_per_gpu={ROWS * SAMPLES // given.ranks}"
    yield f"{actor}.optim.lr={LEARNING_RATE * (3 if given.lora else 1)}"
    yield f"{actor}.fsdp_config.model_dtype=fp32"
    yield f"{actor}.fsdp_config.dtype=float32"
    yield f"{actor}.fsdp_config.use_torch_compile=false"
    yield f"++{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}"
    yield f"{actor}.use_torch_compile=false"
    yield "algorithm.adv_estimator=grpo"
    yield f"data.train_files={work}/train.parquet"
    yield f"data.val_files={work}/val.parquet"
    yield f"data.train_batch_size={ROWS}"
    yield "data.max_prompt_length=128"
    yield f"data.max_response_length={TOKENS}"
    yield "data.dataloader_num_workers=0"
    yield f"reward.custom_reward_function.path={Path(__file__).resolve()}"
    yield "reward.num_workers=1"
    yield "trainer.logger=[file]"
    yield "trainer.val_before_train=false"
    yield "trainer.resume_mode=disable"
    yield f"trainer.total_training_steps={given.steps}"
    yield f"trainer.n_gpus_per_node={given.ranks}"
    yield f"trainer.default_local_dir={work}/checkpoints"
    yield f"trainer.rollout_data_dir={work}/rollouts"
    yield f"trainer.use_v1={str(given.trainer != 'v0').lower()}"
    if given.trainer != "v0":
        yield f"trainer.v1.trainer_mode={given.trainer}"
        yield "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    if given.trainer == "separate_async":  # more engines, on GPUs of their own, as many as the trainer has
        yield f"{rollout}.nnodes=1"
        yield f"{rollout}.n_gpus_per_node={given.ranks}"
        yield f"{rollout}.checkpoint_engine.backend=drivetrain"
        yield f"{rollout}.checkpoint_engine.custom_backend_module=drivetrain_trainers.verl.checkpoint_engine"
        yield "trainer.v1.separate_async.parameter_sync_step=1"
    yield "+ray_kwargs.ray_init.address=local"
    yield f"ray_kwargs.ray_init.num_cpus={8 + 5 * given.ranks}"
    yield f"+ray_kwargs.ray_init._temp_dir={work}/ray"
    yield "+ray_kwargs.ray_init.include_dashboard=false"
    yield "+ray_kwargs.ray_init.object_store_memory=200000000"
    if given.device == "cpu":
        yield "trainer.device=cpu"
        yield f"+ray_kwargs.ray_init.num_gpus={2 * given.ranks}"  # on paper


def environment(given: argparse.Namespace, work: Path) -> dict[str, str]:
    """Return the environment of verl's processes."""
    made = {**os.environ, "VERL_FILE_LOGGER_PATH": f"{work}/metrics.jsonl", "HF_HUB_OFFLINE": "1"}
    if given.device == "cpu":
        made |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    return made


def versions(work: Path, step: int, metrics: Mapping[str, float]) -> tuple[int, int]:
    """Return the oldest and the newest weights that sampled a token of a step: its rollouts have them, or V1's metrics.

    Step 1 trains on tokens of version 0.
    """
    staleness = "training/off_policy/trajectory_staleness"
    if f"{staleness}/min" in metrics:
        return step - 1 - int(metrics[f"{staleness}_worst/max"]), step - 1 - int(metrics[f"{staleness}/min"])
    rows = [json.loads(row) for row in (work / f"rollouts/{step}.jsonl").read_text().splitlines()]
    return min(row["min_global_steps"] for row in rows), max(row["max_global_steps"] for row in rows)


def report(work: Path) -> tuple[list[float], float]:
    """Print a line for each step; return the rewards, and the largest mean difference of probabilities on policy."""
    rewards, gap = [], 0.0
    for line in (work / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        step, metrics = logged["step"], logged["data"]
        if "critic/score/mean" not in metrics:
            continue
        oldest, newest = versions(work, step, metrics)
        difference = metrics["training/rollout_probs_diff_mean"]
        rewards.append(metrics["critic/score/mean"])
        gap = max(gap, difference) if oldest == step - 1 else gap  # older weights have other probabilities
        print(
            f"step {step:2}  reward {rewards[-1]:.3f}  weight versions {oldest} to {newest}  "
            f"rollout_probs_diff mean {difference:.1e}  step {metrics['timing_s/step']:.2f} s  "
            f"update_weights {1e3 * metrics['timing_s/update_weights']:.0f} ms",
            flush=True,
        )
    return rewards, gap


def main(given: argparse.Namespace) -> None:
    """Train, and exit with 1 unless the reward has risen and the probabilities agree."""
    from drivetrain.testing import tiny_model

    work = Path(tempfile.mkdtemp(prefix="vg-"))
    try:
        write_prompts(work / "train.parquet", ROWS * given.steps)
        write_prompts(work / "val.parquet", ROWS)
        model = str(tiny_model("qwen2", num_hidden_layers=1))
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(given, work, model), *given.override]
        with (work / "verl.log").open("w") as log:
            ended = subprocess.run(
                command, env=environment(given, work), stdout=log, stderr=subprocess.STDOUT, cwd=work
            )
        if ended.returncode:
            raise SystemExit(f"{(work / 'verl.log').read_text()[-20_000:]}\nverl ended with {ended.returncode}")
        rewards, gap = report(work)
        if given.keep is not None:
            shutil.copytree(work, given.keep, ignore=shutil.ignore_patterns("ray", "checkpoints"), dirs_exist_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if mean(rewards[-3:]) < rewards[0] + 0.3:
        raise SystemExit(f"the reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}; expected a rise by 0.3")
    if gap > TOLERANCE:
        raise SystemExit(f"the probabilities of engine and trainer differ by {gap:.1e}; expected {TOLERANCE:g} at most")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--backend", default="transformers", help="Backend of drivetrain.")
    made.add_argument("--python", help="Python of the engine's environment; the trainer's own if not given.")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="Field of the engine's config.")
    made.add_argument("--trainer", default="sync", choices=TRAINERS, help="Trainer of verl.")
    made.add_argument("--ranks", type=int, default=1, help="Ranks of the trainer; each has an engine.")
    made.add_argument("--lora", action="store_true", help="Train an adapter; merged weights are pushed.")
    made.add_argument("--no-sleep", dest="sleep", action="store_false", help="Leave the engine's memory allocated.")
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--keep", type=Path, help="Folder for the log, the metrics and the rollouts.")
    made.add_argument("override", nargs="*", help="Further settings of verl.")
    return made


if __name__ == "__main__":
    main(parser().parse_args())
