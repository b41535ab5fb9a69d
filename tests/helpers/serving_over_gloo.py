"""A server whose weight transfer receives from a gloo group, and the trainer of that group, for clients elsewhere.

A gloo group stands for vLLM's NCCL communicator, which needs GPUs. The first line of the output is JSON: the server's
``url``, the ``metadata`` of the tensors, and the greedy samples of each checkpoint that the trainer broadcasts in turn.
For each line of input the trainer broadcasts the next one, in one packed chunk, and a line says that it was ``sent``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain_serving.vllm.weight_transfer import GROUP
from trainer_groups import BODY, a_client, a_group, a_trainer, fresh, tensors_of

SEEDS: Final = (1, 0)
_CHUNK_BYTES: Final = 1 << 30


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def serve() -> None:
    """Serve until the input ends."""
    folders = [tiny_model("qwen2", seed=seed) for seed in SEEDS]
    tensors = tensors_of(folders[0])
    expected = [dict(zip(("token_ids", "logprobs"), await fresh(folder), strict=True)) for folder in folders]
    InferenceEngine.gpus = property(lambda engine: ("GPU-of-the-test",))  # type: ignore[assignment,method-assign]
    async with (
        a_trainer() as trainer,
        create_engine("transformers", model=str(tiny_model("qwen2"))) as engine,
        a_client(engine) as client,
        a_group(trainer, client, name=GROUP),
    ):
        metadata = {
            "names": [one["name"] for one in tensors],
            "dtype_names": [one["dtype"] for one in tensors],
            "shapes": [one["shape"] for one in tensors],
        }
        params = {name: BODY[name] for name in ("max_tokens", "temperature", "logprobs", "ignore_eos")}
        said = {"url": str(client.base_url).rstrip("/"), "prompt": BODY["prompt"], "sampling_params": params}
        _say(json.dumps({**said, "metadata": metadata, "expected": expected}))
        for folder in folders:
            await asyncio.to_thread(sys.stdin.readline)
            packed = {"flattened": True, "chunk_bytes": _CHUNK_BYTES}
            error = await trainer.do("send", group=GROUP, folder=str(folder), tensors=tensors, **packed)
            _say(error or "sent")
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(serve())
