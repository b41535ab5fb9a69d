"""Train with TRL's GRPOTrainer on any engine; one word switches the backend: --backend transformers, sglang or vllm.

A tiny policy with random weights learns to write lower-case letters. ``--weights`` chooses what is trained and pushed:
``full``, ``merged`` (a LoRA adapter, pushed merged into all weights) or ``adapter`` (the adapter alone). ``--through``
chooses the way into TRL: ``use_vllm``, where TRL reports the difference between the engine's logprobs and its own, or
``rollout_func``. ``--backend trl`` lets TRL generate by itself, for comparison. ``make demo-trl`` does all of this:

    pip install 'drivetrain[trl]'
    python examples/trl_rollouts.py --backend transformers
    python examples/trl_rollouts.py --backend vllm --python PYTHON-OF-AN-ENVIRONMENT-WITH-VLLM

With several processes (DDP), each has an engine of its own, or ``--share`` makes one for all:

    torchrun --nproc-per-node 2 examples/trl_rollouts.py --share
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from statistics import mean, median
from typing import Any, Final

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from drivetrain.testing import tiny_model
from drivetrain_trainers.trl import generation, rollout

PROMPTS: Final = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES, TOKENS, RANK = 16, 12, 8
LEARNING_RATE: Final = {"full": 2e-3, "merged": 1e-2, "adapter": 1e-2}
TOLERANCE: Final = 1e-4
"""Largest difference between a logprob of the engine's and TRL's; both compute in float32."""


def reward(completions: list[str], **_: object) -> list[float]:
    """Return the share of lower-case letters."""
    return [sum("a" <= letter <= "z" for letter in text) / TOKENS for text in completions]


class Watch(TrainerCallback):
    """Prints each step, and keeps its reward, its seconds and the largest difference of logprobs."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.gap = 0.0
        self._begun = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def on_log(self, args: object, state: Any, control: object, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Print the step."""
        if logs is None or "reward" not in logs or not state.is_world_process_zero:
            return
        self.rewards.append(logs["reward"])
        self.seconds.append(time.perf_counter() - self._begun)
        gap = logs.get("sampling/sampling_logp_difference/max")
        self.gap = max(self.gap, gap or 0.0)
        shown = "" if gap is None else f"  largest logprob difference {gap:.1e}"
        print(f"step {state.global_step:2}  reward {logs['reward']:.3f}  {self.seconds[-1]:.3f} s{shown}", flush=True)


def policy(folder: str, adapter: bool) -> torch.nn.Module:
    """Return the policy in float32, with a LoRA adapter or without."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))  # type: ignore[arg-type]
    return model


def main(backend: str, python: str | None, weights: str, through: str, steps: int, share: bool) -> None:
    """Train, and exit with 1 unless the reward has risen and the logprobs agree."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = str(tiny_model("qwen2"))
    engine: dict[str, object] = {"backend": backend, "model": folder, "dtype": "float32", "seed": 0}
    if python is not None:
        engine["python"] = os.path.abspath(python)
    if backend == "transformers":
        engine["isolation"] = "inline"
    if weights == "adapter":
        engine |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    lora_name = "policy" if weights == "adapter" else None
    own, replaced = backend == "trl", through == "use_vllm" and backend != "trl"
    settings = GRPOConfig(
        output_dir="build/trl",
        use_cpu=True,
        bf16=False,
        use_vllm=replaced,
        max_steps=steps,
        learning_rate=LEARNING_RATE[weights],
        lr_scheduler_type="constant",
        per_device_train_batch_size=len(PROMPTS) * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    way: Any = nullcontext()
    if replaced:
        way = generation(engine, lora_name=lora_name, share=share)
    elif not own:
        way = rollout(engine, lora_name=lora_name, share=share)
    watch = Watch()
    with way:
        trainer = GRPOTrainer(
            model=policy(folder, weights != "full"),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * steps]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[watch],
            rollout_func=None if own or replaced else way,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not trainer.is_world_process_zero():
        return
    first, last = mean(watch.rewards[:2]), mean(watch.rewards[-2:])
    agreement = f", largest logprob difference {watch.gap:.1e}" if replaced else ""
    seconds = median(watch.seconds)
    print(f"{backend}, {weights}: reward {first:.2f} → {last:.2f}, {seconds:.3f} s a step (median){agreement}")
    if last < first + 0.3 or watch.gap > TOLERANCE:
        raise SystemExit(f"the reward did not rise by 0.3, or logprobs differ by more than {TOLERANCE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="transformers", help="A backend of drivetrain, or trl.")
    parser.add_argument("--python", help="Python of the environment that holds the engine; by default this one.")
    parser.add_argument("--weights", choices=LEARNING_RATE, default="full")
    parser.add_argument("--through", choices=("use_vllm", "rollout_func"), default="use_vllm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--share", action="store_true", help="One engine for all processes of the trainer.")
    given = parser.parse_args()
    main(given.backend, given.python, given.weights, given.through, given.steps, given.share)
