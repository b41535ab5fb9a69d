"""TRL's GRPOTrainer with its engine on the same GPU, asleep while it trains, beside TRL's own generation in one run.

    python benchmarks/gpu/trl_colocated.py {sglang,vllm,transformers} [--size 0.5b|1.8b] [--steps 10] [--batch 64]
        [--tokens 128] [--limit 200] [--engine-path PATH] [--json FILE]

Trains a bfloat16 policy at random twice, each time in a process of its own: with ``generation(…, sleep=True)`` of
:mod:`drivetrain_trainers.trl` in the place of vLLM, and with TRL's own ``generate``. The reward of a sample is the
share of its tokens with an even id. ``--engine-path`` is put before PYTHONPATH of the first, for an engine that is
unpacked in a folder.

For each: rewards, and the median of a step's seconds without the first two, in which engines record and compile. With
the engine: the largest difference and the largest mean of a step between its logprobs and TRL's, which TRL reports; and
the GPU memory that others have in use while TRL trains, which shows whether the engine sleeps. Exits with 1 unless
logprobs agree within 0.1 nats. A few steps at this rate do not raise the reward; ``trl_server.py`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from engine_fields import sglang_fields, vllm_fields
from models import SIZES, model_folder

GRAPHS: Final = [1, 2, 4, 8, 16, 32, 64, 128]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.3, cache_tokens=100_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=8_000_000_000, load_format="dummy"),
    "transformers": {},
}
PROMPTS: Final = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
OWN: Final = "trl"
SPREAD: Final = 0.01
"""Standard deviation of the weights; with a larger one, rounding alone moves the logprobs of so deep a model far."""
TOLERANCE: Final = 0.1
WARM_UP: Final = 2
"""Steps whose times do not count."""


def evenness(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the share of even ids of each completion."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def watch() -> Any:
    """Return a callback that keeps each step's seconds, its log and the memory in use on the GPU after its rollout."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Keeps what a step took and logged."""

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self._begun = 0.0
            self._in_use = 0

        def on_step_begin(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            self._begun = time.perf_counter()

        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            free, total = torch.cuda.mem_get_info()
            self._in_use = total - free - torch.cuda.memory_reserved()

        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            self._seconds = time.perf_counter() - self._begun

        def on_log(self, args: object, state: object, control: object, logs: Any = None, **_: object) -> None:
            if logs and "reward" in logs:
                kept = {name: value for name, value in logs.items() if name == "reward" or name.startswith("sampling/")}
                self.steps.append(kept | {"seconds": self._seconds, "others_gb": self._in_use / 1e9})
                print(json.dumps(self.steps[-1]), flush=True)

    return Watch()


def trained(way: str, args: argparse.Namespace) -> None:
    """Train in this process; print a line of JSON for each step."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from drivetrain_trainers.trl import generation

    torch.manual_seed(0)
    folder = model_folder(args.size)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = SPREAD
    with torch.device("cuda"):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    policy.name_or_path = str(folder)
    engine: dict[str, Any] = {"backend": way, "model": str(folder), "dtype": "bfloat16", "seed": 0}
    if way == "transformers":  # which loads weights, and makes none
        policy.save_pretrained(folder)
        engine["device"] = "cuda"
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        bf16=True,
        use_vllm=way != OWN,
        max_steps=args.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=args.batch,
        num_generations=args.batch // len(PROMPTS),
        max_completion_length=args.tokens,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    watching = watch()
    fields = {**engine, **ENGINES.get(way, {})}
    with nullcontext() if way == OWN else generation(fields, sleep=True):
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=evenness,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * args.steps]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[watching],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def in_a_process(way: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train in a process of its own; return its steps."""
    path = args.engine_path if way != OWN else ""
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")  # TRL refuses a process that sees several
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": one_gpu, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, __file__, args.backend, "--way", way, "--size", args.size, "--steps", str(args.steps)]
    command += ["--batch", str(args.batch), "--tokens", str(args.tokens)]
    made = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=args.limit, check=False)
    steps = [json.loads(line) for line in made.stdout.splitlines() if line.startswith('{"')]
    print(way, "ended with", made.returncode, "after", len(steps), "steps", file=sys.stderr, flush=True)
    return steps


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of one training."""
    differences = ("sampling/sampling_logp_difference/max", "sampling/sampling_logp_difference/mean")
    return {
        "rewards": [step["reward"] for step in steps],
        "step_s": median(step["seconds"] for step in steps[WARM_UP:]),
        "others_gb_while_training": max(step["others_gb"] for step in steps[WARM_UP:]),
        **{name: [step[name] for step in steps if name in step] for name in differences if name in steps[-1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--size", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="completions of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for each training")
    parser.add_argument("--engine-path", default="")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        trained(args.way, args)
        return
    found = {way: summary(in_a_process(way, args)) for way in (args.backend, OWN)}
    ours, theirs = found[args.backend], found[OWN]
    document = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        **{name: getattr(args, name) for name in ("size", "batch", "tokens", "steps")},
        **found,
        "step_of_own": ours["step_s"] / theirs["step_s"],
    }
    print(json.dumps(document, indent=1))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    gap = max(ours.get("sampling/sampling_logp_difference/max", [float("nan")]))
    if not gap <= TOLERANCE:
        raise SystemExit(f"logprobs differ by up to {gap}")


if __name__ == "__main__":
    main()
