"""Train a small policy with TRL's GRPOTrainer in server mode. Nothing here knows drivetrain: TRL is given a URL.

The policy learns to write lower-case letters. TRL generates at the server, and broadcasts the weights to it through
NCCL before each generation. It needs TRL, the vLLM that TRL's client imports, and a GPU that the server does not use:

    CUDA_VISIBLE_DEVICES=1 drivetrain serve --backend transformers --model FOLDER &
    CUDA_VISIBLE_DEVICES=0 python examples/trl_server_mode.py --url http://127.0.0.1:8000 --model FOLDER

Prints a line of JSON for each step, with TRL's own metrics.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import requests
import torch
import transformers
import trl
import vllm
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES, TOKENS = 16, 12


def letters(completions: list[str], **_: Any) -> list[float]:
    """Return the share of lower-case letters in each completion."""
    return [sum("a" <= letter <= "z" for letter in text) / TOKENS for text in completions]


class PrintSteps(TrainerCallback):
    """Prints TRL's metrics, and the version of the weights that the server served in the step."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Print one step."""
        if logs is None or "reward" not in logs:
            return
        now = time.perf_counter()
        version = requests.get(f"{self._url}/weight_info", timeout=60).json()["weight_version"]
        names = {name: value for name, value in logs.items() if name.startswith("sampling/")}
        facts = {"step": state.global_step, "reward": logs["reward"], "version": version, "seconds": now - self._began}
        print(json.dumps(facts | names), flush=True)
        self._began = now


def main(url: str, model: str, steps: int) -> None:
    """Train."""
    packages = {"trl": trl, "vllm": vllm, "transformers": transformers, "torch": torch}
    print(json.dumps({name: package.__version__ for name, package in packages.items()}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=SAMPLES * len(PROMPTS),
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=letters,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            callbacks=[PrintSteps(url)],
        )
        trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server.")
    parser.add_argument("--model", required=True, help="Folder of the model that it serves.")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    main(given.url, given.model, given.steps)
