"""A server for TRL's AsyncGRPOTrainer on a CPU: its weight transfer joins a gloo group in the place of NCCL's.

The output is the server's address; each line of input asks for the version of the weights that are served.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.vllm import weight_transfer
from drivetrain_weight_sync.trainer_groups.process_messages import Join


def join_gloo(*, unique_id: bytes = b"", **given: Any) -> Join:
    """Return what joins a gloo group with the address that TRL gives for NCCL's."""
    return Join(backend="gloo", **given)


async def serve(*options: str) -> None:
    """Serve until the input ends."""
    config: dict[str, Any] = {"model": str(tiny_model("qwen2")), "dtype": "float32", "seed": 0}
    if "lora" in options:
        config |= {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
    if "nccl" in options:
        InferenceEngine.gpus = property(lambda engine: ("GPU-of-the-test",))  # type: ignore[assignment,method-assign]
        weight_transfer.JoinNccl = join_gloo  # type: ignore[attr-defined,assignment]
    async with (
        create_engine("transformers", **config) as engine,
        Server(engine, ServerConfig(port=0)) as server,
    ):
        sys.stdout.write(str(server.url) + "\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(engine.get_weight_version() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
