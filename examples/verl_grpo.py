"""Train a tiny policy with verl's GRPO; its rollouts come from any drivetrain engine, chosen by one word.

The policy learns to write lower-case letters. ``drivetrain`` is a plugin of verl: nothing of verl is changed. On a
machine without a GPU, verl needs a platform for CPUs, which is in ``tests/support/verl-cpu``. ``make demo-verl
BACKEND=sglang`` does all of this:

    python -m venv verl && verl/bin/pip install verl==0.9.1 TransferQueue fastapi uvicorn cachetools \
        'drivetrain[transformers,ray]' ./tests/support/verl-cpu
    verl/bin/python examples/verl_grpo.py --backend sglang --python ENVIRONMENT_OF_SGLANG/bin/python

For ``--images``, verl also needs torchvision and qwen_vl_utils.
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
from io import BytesIO
from pathlib import Path
from statistics import mean

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
ROWS, SAMPLES, TOKENS = 8, 16, 16
LEARNING_RATE = 3e-3
V1 = ("sync", "colocate_async", "separate_async")
EXPERIMENTAL = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}
"""verl's experimental trainers, whose engines have GPUs of their own."""
PATIENCE = {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"}
"""Ray's deadlines for its own start. The default ones pass on a busy machine."""
TOLERANCE = 1e-3
"""Largest mean difference between probabilities of engine and trainer, both in float32."""
LORA_TOLERANCE = 1e-2
"""The same with merged adapters, whose weights verl rounds to bfloat16."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object], folder: str | None = None
) -> dict[str, object]:
    """Return the share of lower-case letters, and the steps whose weights sampled the response.

    Args:
        data_source: Not used.
        solution_str: The response.
        ground_truth: Not used.
        extra_info: Facts about the row and its response.
        folder: Where to write the result, in a file for each step of ``ROWS`` rows; None: nowhere.
    """
    score = sum("a" <= letter <= "z" for letter in solution_str) / TOKENS
    result = {"score": score, **{name: extra_info[name] for name in ("min_global_steps", "max_global_steps")}}
    if folder is not None:
        step = int(str(extra_info["index"])) // ROWS + 1
        with Path(folder, f"{step}.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


def write_prompts(path: Path, rows: int, images: bool = False) -> None:
    """Write a data set of verl's form, with an image in each prompt if asked for."""
    import pandas

    rows_of = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": "<image>" * images + PROMPTS[index % len(PROMPTS)]}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
            **({"images": [{"bytes": picture()}]} if images else {}),
        }
        for index in range(rows)
    ]
    pandas.DataFrame(rows_of).to_parquet(path)


def picture() -> bytes:
    """Return a PNG of noise."""
    from PIL import Image

    file = BytesIO()
    Image.effect_noise((56, 84), 90).convert("RGB").save(file, "png")
    return file.getvalue()


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
        yield f"actor_rollout_ref.model.lora.merge={str(given.lora == 'merged').lower()}"
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
    if given.trainer != "fully_async":
        yield f"data.train_batch_size={ROWS}"
    yield "data.max_prompt_length=128"
    yield f"data.max_response_length={TOKENS}"
    yield "data.dataloader_num_workers=0"
    yield f"reward.custom_reward_function.path={Path(__file__).resolve()}"
    yield "reward.num_workers=1"
    yield "trainer.logger=[file]"
    yield "trainer.val_before_train=false"
    yield "trainer.resume_mode=disable"
    if given.trainer != "fully_async":
        yield f"trainer.total_training_steps={given.steps}"
    yield f"trainer.n_gpus_per_node={given.ranks}"
    yield f"trainer.default_local_dir={work}/checkpoints"
    if given.trainer == "one_step_off":  # verl 0.9.1 ends in an error of its own if this trainer has to write them
        yield "data.shuffle=false"
        yield f"+reward.custom_reward_function.reward_kwargs.folder={work}/rollouts"
    else:
        yield f"trainer.rollout_data_dir={work}/rollouts"
    yield f"trainer.use_v1={str(given.trainer in V1).lower()}"
    if given.trainer in V1:
        yield f"trainer.v1.trainer_mode={given.trainer}"
        yield "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    if given.trainer == "separate_async" or given.trainer in EXPERIMENTAL:  # engines on GPUs of their own
        yield f"{rollout}.nnodes=1"
        yield f"{rollout}.n_gpus_per_node={given.ranks}"
        yield f"{rollout}.checkpoint_engine.backend=drivetrain"
        yield f"{rollout}.checkpoint_engine.custom_backend_module=drivetrain_trainers.verl.checkpoint_engine"
    if given.trainer == "separate_async":
        yield "trainer.v1.separate_async.parameter_sync_step=1"
    if given.trainer in EXPERIMENTAL:
        yield "hydra.searchpath=[pkg://verl.trainer.config]"
        yield "algorithm.rollout_correction.bypass_mode=false"
        yield "actor_rollout_ref.hybrid_engine=false"
        yield "rollout.nnodes=1"
        yield f"rollout.n_gpus_per_node={given.ranks}"
    if given.trainer == "fully_async":
        yield "data.train_batch_size=0"
        yield f"rollout.total_rollout_steps={ROWS * (given.steps + 1)}"  # the last step is not logged
        yield "async_training.trigger_parameter_sync_step=1"
    yield "+ray_kwargs.ray_init.address=local"
    yield f"ray_kwargs.ray_init.num_cpus={8 + 5 * given.ranks + (20 if given.trainer in EXPERIMENTAL else 0)}"
    yield f"+ray_kwargs.ray_init._temp_dir={work}/ray"
    yield "+ray_kwargs.ray_init.include_dashboard=false"
    yield "+ray_kwargs.ray_init.object_store_memory=200000000"
    if given.device == "cpu":
        yield "trainer.device=cpu"
        yield f"+ray_kwargs.ray_init.num_gpus={2 * given.ranks}"  # on paper


def environment(given: argparse.Namespace, work: Path) -> dict[str, str]:
    """Return the environment of verl's processes."""
    made = {**PATIENCE, **os.environ, "VERL_FILE_LOGGER_PATH": f"{work}/metrics.jsonl", "HF_HUB_OFFLINE": "1"}
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
    # Responses may hold Unicode's separators of lines, at which splitlines would cut a row.
    rows = [json.loads(row) for row in (work / f"rollouts/{step}.jsonl").read_text().split("\n") if row]
    return min(row["min_global_steps"] for row in rows), max(row["max_global_steps"] for row in rows)


def steps(work: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the number and the metrics of each step that trained."""
    for line in (work / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        if "critic/score/mean" in logged["data"]:
            yield int(logged["data"].get("training/global_step", logged["step"])), logged["data"]


def report(work: Path, trainer: str) -> tuple[list[float], float]:
    """Print a line for each step; return the rewards, and the largest mean difference of probabilities on policy."""
    rewards, gap = [], 0.0
    for step, metrics in steps(work):
        oldest, newest = versions(work, step, metrics)
        difference = metrics["training/rollout_probs_diff_mean"]
        update = next(seconds for name, seconds in metrics.items() if name.endswith(("update_weights", "param_sync")))
        rewards.append(metrics["critic/score/mean"])
        # Older weights have other probabilities. In one_step_off, version 1 is pushed after version 0 without a change.
        gap = max(gap, difference) if oldest == step - 1 and (trainer != "one_step_off" or step == 1) else gap
        print(
            f"step {step:2}  reward {rewards[-1]:.3f}  weight versions {oldest} to {newest}  "
            f"rollout_probs_diff mean {difference:.1e}  step {metrics['timing_s/step']:.2f} s  "
            f"update_weights {1e3 * update:.0f} ms",
            flush=True,
        )
    return rewards, gap


def main(given: argparse.Namespace) -> None:
    """Train, and exit with 1 unless the reward has risen and the probabilities agree."""
    from drivetrain.testing import tiny_model

    work = Path(tempfile.mkdtemp(prefix="vg-"))
    try:
        (work / "rollouts").mkdir()
        rows = ROWS * (given.steps + (given.trainer == "fully_async"))
        write_prompts(work / "train.parquet", rows, given.images)
        write_prompts(work / "val.parquet", ROWS, given.images)
        model = str(tiny_model(given.model) if given.images else tiny_model(given.model, num_hidden_layers=1))
        trainer = EXPERIMENTAL.get(given.trainer, "verl.trainer.main_ppo")
        command = [sys.executable, "-m", trainer, *arguments(given, work, model), *given.override]
        with (work / "verl.log").open("w") as log:
            ended = subprocess.run(
                command, env=environment(given, work), stdout=log, stderr=subprocess.STDOUT, cwd=work
            )
        if ended.returncode:
            raise SystemExit(f"{(work / 'verl.log').read_text()[-20_000:]}\nverl ended with {ended.returncode}")
        if given.keep is not None:
            shutil.copytree(work, given.keep, ignore=shutil.ignore_patterns("ray", "checkpoints"), dirs_exist_ok=True)
        rewards, gap = report(work, given.trainer)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if mean(rewards[-3:]) < rewards[0] + 0.3:
        raise SystemExit(f"the reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}; expected a rise by 0.3")
    tolerance = LORA_TOLERANCE if given.lora == "merged" else TOLERANCE
    if gap > tolerance:
        raise SystemExit(f"the probabilities of engine and trainer differ by {gap:.1e}; expected {tolerance:g} at most")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--backend", default="transformers", help="Backend of drivetrain.")
    made.add_argument("--python", help="Python of the engine's environment; the trainer's own if not given.")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="Field of the engine's config.")
    made.add_argument("--trainer", default="sync", choices=["v0", *V1, *EXPERIMENTAL], help="Trainer of verl.")
    made.add_argument("--model", default="qwen2", help="Architecture of the policy, as drivetrain.testing names it.")
    made.add_argument("--images", action="store_true", help="Put an image into each prompt, for --model qwen2_5_vl.")
    made.add_argument("--ranks", type=int, default=1, help="Ranks of the trainer; each has an engine.")
    made.add_argument("--lora", choices=["adapter", "merged"], help="Train an adapter, and push it or merged weights.")
    made.add_argument("--no-sleep", dest="sleep", action="store_false", help="Leave the engine's memory allocated.")
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--keep", type=Path, help="Folder for the log, the metrics and the rollouts.")
    made.add_argument("override", nargs="*", help="Further settings of verl.")
    return made


if __name__ == "__main__":
    main(parser().parse_args())
