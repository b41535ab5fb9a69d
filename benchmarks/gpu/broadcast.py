"""Weights broadcast over NCCL from GPU 0, where the trainer is, to an engine on GPU 1. Prints one JSON object.

    python benchmarks/gpu/broadcast.py --backend sglang

Needs two GPUs of one host. Each push is checked: the engine compares digests before it commits, one tensor is read back
and compared, and four greedy tokens are compared with those of the trainer's model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import drivetrain
from drivetrain import SamplingParams
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightSync

PUSHES = 4
PROMPT = [1, 2, 3, 4]
TENSOR = "model.layers.1.mlp.up_proj.weight"


ON_GPU_1: dict[str, dict[str, Any]] = {
    "transformers": {"device": "cuda:1"},
    "sglang": {
        "gpu_memory_utilization": 0.3,
        "attention_backend": "triton",
        "engine_kwargs": {"base_gpu_id": 1, "sampling_backend": "pytorch", "disable_cuda_graph": True},
    },
}


async def main(backend: str) -> dict[str, object]:
    """Push four times, look at what arrived, and return the figures."""
    folder = tiny_model(
        "qwen2",
        dtype="bfloat16",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")
    pushes: list[dict[str, object]] = []
    async with drivetrain.create_engine(
        backend, model=str(folder), dtype="bfloat16", isolation="process", **ON_GPU_1[backend]
    ) as engine:
        async with WeightSync.connect(model, engine, "broadcast", group_backend="nccl") as sync:
            for step in range(PUSHES):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
                result = await sync.push(version=f"step-{step}")
                pushes.append(
                    {
                        "bytes": result.nbytes,
                        "buckets": result.buckets,
                        "check_s": result.check_seconds,
                        "update_s": result.update_seconds,
                        "total_s": result.total_seconds,
                    }
                )
        held = await engine.get_weights_by_name(TENSOR)
        values = torch.frombuffer(bytearray(held.data), dtype=torch.bfloat16).view(held.spec.shape)
        batch = await engine.generate([PROMPT], SamplingParams(max_new_tokens=4, temperature=0))
        versions = engine.versions
    ids = list(PROMPT)
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids], device="cuda:0")).logits[0, -1].argmax()))
    return {
        "device": f"2 x {torch.cuda.get_device_name(0)}",
        "versions": versions,
        "pushes": pushes,
        "tensor_equal": torch.equal(values, dict(model.named_parameters())[TENSOR].detach().cpu()),
        "tokens_equal": list(batch.completions[0].token_ids) == ids[len(PROMPT) :],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=ON_GPU_1, default="transformers")
    print(json.dumps(asyncio.run(main(parser.parse_args().backend)), indent=2))
