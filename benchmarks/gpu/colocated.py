"""Train a model that does not fit twice on a GPU, colocated with its engine, which sleeps while the trainer trains.

    python benchmarks/gpu/colocated.py {sglang,vllm} [--steps 3] [--share 0.52] [--samples 16] [--tokens 64]
        [--json FILE]

The policy is a Qwen2 whose bfloat16 weights take ``--share`` of the GPU. It lies in pinned host memory while the engine
generates; the engine sleeps while the policy is on the GPU. A step: generate, sleep, fetch the policy, train, store the
policy, wake the weights, push through shared memory, wake the cache. Training is a policy gradient of plain SGD that is
applied layer by layer during the backward pass, so there is never a whole set of gradients; the reward of a sample is
the share of its tokens with an even id.

For each step: seconds of every part, the mean reward, and the gap between the engine's logprobs of its samples and the
policy's, before the policy changes: the mean and the largest difference, in nats. A gap that stays small after pushes
says that the engine serves what was trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from engine_fields import sglang_fields, vllm_fields

from drivetrain import InferenceEngine, MemoryTag, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from drivetrain.types.outputs import Completion
from drivetrain_weight_sync import WeightSync

GRAPHS: Final = [1, 2, 4, 8, 16]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.8, cache_tokens=16_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=4_000_000_000, load_format="dummy"),
}
WIDTH: Final[dict[str, int]] = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
LAYER_BYTES: Final = 2 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648)
EMBEDDING_BYTES: Final = 2 * 2 * 152064 * 5120
SPREAD: Final = 0.01
"""Standard deviation of the weights. With a larger one, rounding to bfloat16 changes the logprobs of so deep a model as
much as a wrong weight would."""
RATE: Final = 2e-3


def model_folder(share: float) -> Path:
    """Make a folder with the configuration of a model that takes this share of the GPU."""
    total = torch.cuda.mem_get_info()[1]
    layers = round((share * total - EMBEDDING_BYTES) / LAYER_BYTES)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-")) / "large"
    tiny_model("qwen2", directory=folder, dtype="bfloat16", max_position_embeddings=4096)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    file = folder / "config.json"
    config = json.loads(file.read_text()) | WIDTH | {"num_hidden_layers": layers, "initializer_range": SPREAD}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][0]] * layers
    file.write_text(json.dumps(config))
    return folder


class Policy:
    """A model that is trained on the GPU and lies in pinned host memory between the steps."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.model.config.use_cache = False
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self._stored = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            for name, parameter in self.model.named_parameters()
        }
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(_descend)

    def store(self) -> None:
        """Copy the parameters to the host, and free their memory on the GPU."""
        for name, parameter in self.model.named_parameters():
            self._stored[name].copy_(parameter.data, non_blocking=True)
        torch.cuda.synchronize()
        for name, parameter in self.model.named_parameters():
            parameter.data = self._stored[name]
        torch.cuda.empty_cache()

    def fetch(self) -> None:
        """Copy the parameters to the GPU."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    def train(self, samples: list[Completion], prompt: list[int], rewards: list[float]) -> tuple[float, float]:
        """Take one step; return the mean and the largest gap between the engine's logprobs and the policy's."""
        mean = sum(rewards) / len(rewards)
        gaps = []
        for first in range(0, len(samples), 4):
            part = samples[first : first + 4]
            ids = torch.tensor([prompt + one.token_ids for one in part], device="cuda")
            logits = self.model(input_ids=ids).logits[:, len(prompt) - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
            if not first:  # the later parts are computed with weights that this step has changed
                gaps.append((logprobs.detach().cpu() - torch.tensor([one.logprobs for one in part])).abs())
            weights = torch.tensor([rewards[first + i] - mean for i in range(len(part))], device="cuda")
            (-(weights[:, None] * logprobs).mean()).backward()
        gap = torch.cat(gaps)
        return float(gap.mean()), float(gap.max())


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    norm = parameter.grad.norm().clamp_min(1e-6)
    parameter.data.add_(parameter.grad / norm * parameter.data.norm(), alpha=-RATE)
    parameter.grad = None


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begun
    print(f"{name:24} {seconds[name]:7.2f} s", file=sys.stderr, flush=True)


async def step(
    engine: InferenceEngine, policy: Policy, sync: WeightSync, number: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Take one training step; return its figures."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    params = SamplingParams(max_new_tokens=args.tokens, n=args.samples, temperature=1.0, ignore_eos=True, logprobs=0)
    seconds: dict[str, float] = {}

    async def part(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        with timed(name, seconds):
            return await call()

    output = await part("generate", lambda: engine.generate([prompt], params))
    samples = output.completions
    versions = {span.version for one in samples for span in one.weight_versions}
    rewards = [sum(token % 2 == 0 for token in one.token_ids) / len(one.token_ids) for one in samples]
    await part("sleep", lambda: engine.sleep(abort_first=True))
    free = torch.cuda.mem_get_info()[0]
    await part("fetch the policy", lambda: asyncio.to_thread(policy.fetch))
    mean, largest = await part("train", lambda: asyncio.to_thread(policy.train, samples, prompt, rewards))
    peak = torch.cuda.max_memory_allocated()
    await part("store the policy", lambda: asyncio.to_thread(policy.store))
    await part("wake of the weights", lambda: engine.wake_up([MemoryTag.WEIGHTS]))
    result = await part("push", lambda: sync.push(version=f"step-{number}"))
    await part("wake of the rest", lambda: engine.wake_up())
    return {
        "sampled_by": sorted(versions),
        "reward": sum(rewards) / len(rewards),
        "mean_gap": mean,
        "largest_gap": largest,
        "free_gb_asleep": free / 1e9,
        "trainer_peak_gb": peak / 1e9,
        "strategy": result.strategy.value,
        "update_s": result.update_seconds,
        "seconds": seconds,
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_folder(args.share)
    seconds: dict[str, float] = {}
    with timed("make the policy", seconds):
        policy = Policy(folder)
    with timed("store the policy", seconds):
        policy.store()
    fields = {"backend": args.backend, "model": str(folder), "dtype": "bfloat16", "enable_sleep": True}
    async with create_engine(fields | {"max_num_seqs": 16} | ENGINES[args.backend]) as engine:
        print("the engine is up", file=sys.stderr, flush=True)
        async with WeightSync.connect(policy.model, engine) as sync:
            with timed("first push", seconds):
                await sync.push(version="step-0")
            steps = [await step(engine, policy, sync, number + 1, args) for number in range(args.steps)]
        versions = engine.versions
    total = torch.cuda.mem_get_info()[1]
    return {
        "device": torch.cuda.get_device_name(0),
        "backend": args.backend,
        "versions": versions,
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "weights_gb": policy.nbytes / 1e9,
        "twice_of_the_gpu": 2 * policy.nbytes / total,
        "seconds": seconds,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.52, help="of the GPU's memory that the weights take")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sample")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    text = json.dumps(asyncio.run(measure(args)), indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
