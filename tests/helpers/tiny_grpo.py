# pyright: reportMissingImports=false
"""A small GRPO training with TRL's own trainer, for ``make test-trl``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from drivetrain.testing import tiny_model

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
PROMPTS: Final = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES: Final = 8
TOKENS: Final = 8
RANK: Final = 8
BACKENDS: Final = os.environ.get("BACKENDS", "transformers").split()
ENVIRONMENTS: Final = Path(os.environ.get("ENVIRONMENTS", ".venvs"))
"""Folder with an environment for each backend but transformers."""


def folder() -> str:
    """Folder of the policy's first weights."""
    return str(tiny_model("qwen2"))


def engine_of(backend: str, **more: object) -> dict[str, object]:
    """Configuration of an engine in float32: in this process, or in the backend's environment."""
    config: dict[str, object] = {"backend": backend, "model": folder(), "dtype": "float32", "seed": 0}
    if backend == "transformers":
        config["isolation"] = "inline"
    else:
        config["python"] = str((ENVIRONMENTS / backend / "bin" / "python").absolute())
    return config | more


def policy(lora: dict[str, object] | None = None) -> Any:
    """Return the policy; ``lora`` are further fields of its adapter's configuration."""
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    if lora is None:
        return model
    torch.manual_seed(0)
    fields: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", **lora}
    return get_peft_model(model, LoraConfig(**fields))


def letters(completions: Sequence[str], **_: object) -> list[float]:
    """Return the share of lower-case letters of each completion."""
    return [sum("a" <= letter <= "z" for letter in text) / TOKENS for text in completions]


def trainer(
    model: Any, reward: Callable[..., list[float]] = letters, *, rollout_func: object = None, **settings: Any
) -> Any:
    """Return a ``GRPOTrainer``; ``settings`` are fields of its ``GRPOConfig``."""
    torch.set_num_threads(1)
    batch = {"per_device_train_batch_size": len(PROMPTS) * SAMPLES, "num_generations": SAMPLES}
    given = {"output_dir": "build/trl", "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none"}
    given |= {"logging_steps": 1, "disable_tqdm": True, "gradient_checkpointing": False, "max_steps": 2}
    given |= {"max_completion_length": TOKENS, "lr_scheduler_type": "constant", "learning_rate": 3e-3}
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 64])
    made = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**{**given, **batch, **settings}),
        train_dataset=rows,
        eval_dataset=rows.select(range(len(PROMPTS))),
        processing_class=AutoTokenizer.from_pretrained(folder()),
        rollout_func=rollout_func,
    )
    made.remove_callback(PrinterCallback)
    return made


def logged(trainer: Any, name: str) -> list[float]:
    """Return a metric of every step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
