"""Train a small policy with AReaL's whole trainer, `PPOTrainer`, whose rollouts come from `drivetrain serve`, on a CPU.

Nothing of AReaL is changed. It is given the server's address, and does the rest: rollouts by its `RemoteSGLangEngine`,
GRPO by its `FSDPEngine`, and after each step its weights by its own gloo group or from a folder. The policy learns to
write lower-case letters. ``make train-areal`` does all of this, and installs what AReaL 1.0.4 imports here, of the many
packages that it asks for:

    drivetrain serve --backend transformers --model FOLDER --dialect sglang &
    AREAL_SPMD_MODE=1 AREAL_LLM_SERVER_ADDRS=127.0.0.1:8000 torchrun --nproc-per-node 1 examples/areal_training.py \
        --model FOLDER
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from areal.api.cli_args import (
    ClusterSpecConfig,
    EvaluatorConfig,
    FSDPEngineConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    MicroBatchSpec,
    NameResolveConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
)
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import name_resolve
from areal.workflow.rlvr import RLVRWorkflow
from datasets import Dataset

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES, TOKENS = 16, 12


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Return the number of lower-case letters, of as many as tokens were asked for."""
    return min(sum("a" <= letter <= "z" for letter in completion) / TOKENS, 1.0)


def ids_of(text: str, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Return a prompt's token ids."""
    return tokenizer.encode(text)


def text_of(data: dict[str, Any]) -> str:
    """Return a row's prompt."""
    return data["text"]


def configuration(model: str, folder: Path, steps: int, updates: str, ranks: int) -> PPOConfig:
    """Return AReaL's configuration."""
    names = {"experiment_name": "drivetrain", "trial_name": "areal"}
    saving = {**names, "fileroot": str(folder)}
    return PPOConfig(
        **names,
        cluster=ClusterSpecConfig(
            name_resolve=NameResolveConfig(nfs_record_root=str(folder / "names")),
            fileroot=str(folder),
            n_nodes=1,
            n_gpus_per_node=ranks,
        ),
        total_train_epochs=steps,
        total_train_steps=steps,
        tokenizer_path=model,
        train_dataset=TrainDatasetConfig(batch_size=len(PROMPTS), path="", type="rl", shuffle=False),
        gconfig=GenerationHyperparameters(n_samples=SAMPLES, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True),
        rollout=InferenceEngineConfig(
            **names,
            backend="sglang:d1",
            consumer_batch_size=len(PROMPTS),
            max_head_offpolicyness=0,
            tokenizer_path=model,
        ),
        actor=PPOActorConfig(
            **names,
            backend=f"fsdp:d{ranks}",
            path=model,
            attn_impl="sdpa",
            dtype="float32",
            weight_update_mode=updates,
            disable_dropout=True,
            # One sequence each: AReaL packs sequences for flash attention, and others would attend across them.
            mb_spec=MicroBatchSpec(n_mbs=len(PROMPTS) * SAMPLES // ranks),
            optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0),
            fsdp=FSDPEngineConfig(),
            ppo_n_minibatches=1,
            kl_ctl=0.0,
            reward_norm=NormConfig(mean_level="group", std_level=None, group_size=SAMPLES),
            adv_norm=None,
            use_decoupled_loss=True,
            max_new_tokens=TOKENS,
        ),
        saver=SaverConfig(**saving),
        recover=RecoverConfig(**saving, mode="disabled"),
        evaluator=EvaluatorConfig(**saving),
        stats_logger=StatsLoggerConfig(**saving),
    )


def main(model: str, steps: int, updates: str) -> None:
    """Train, and exit with 1 unless the reward has risen and AReaL computes the logprobs that the server gave."""
    rewards: list[float] = []
    gaps: list[float] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        config = configuration(model, Path(folder), steps, updates, int(os.environ["WORLD_SIZE"]))
        name_resolve.reconfigure(config.cluster.name_resolve)  # as AReaL does when it reads a configuration
        trainer = PPOTrainer(config, train_dataset=Dataset.from_list([{"text": text} for text in PROMPTS]))
        log = trainer.stats_logger.commit

        def look_and_log(epoch: int, step: int, global_step: int, stats: dict[str, float]) -> None:
            rewards.append(stats["ppo_actor/task_reward/avg"])
            gaps.extend(abs(stats[f"ppo_actor/update/compute_logp/kl_div_direct/{of}"]) for of in ("min", "max"))
            log(epoch, step, global_step, stats)

        trainer.stats_logger.commit = look_and_log
        trainer.train(workflow=RLVRWorkflow(reward, config.gconfig, trainer.tokenizer, False, ids_of, text_of))
        trainer.close()
    if int(os.environ["RANK"]) == 0:
        print("rewards", *(f"{one:.2f}" for one in rewards), f"largest logprob difference {max(gaps):.1e}", flush=True)
        if rewards[-1] < rewards[0] + 0.3 or max(gaps) > 1e-3:
            raise SystemExit("the reward did not rise by 0.3, or the logprobs differ by more than 0.001")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder of the model that the server serves.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--updates", choices=("xccl", "disk"), default="xccl", help="How the weights are sent.")
    given = parser.parse_args()
    main(given.model, given.steps, given.updates)
