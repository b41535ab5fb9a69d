"""A server whose weight transfer receives from a gloo group, and the trainer of that group, for clients elsewhere.

A gloo group stands for vLLM's NCCL communicator, which needs GPUs. The first line of the output is JSON: the server's
``url``, and the ``checkpoints`` and ``adapters`` that the trainer can send, each with the ``metadata`` of its tensors
and the ``expected`` greedy sample of plain transformers. For each line of input, such as ``checkpoints 1``, the trainer
broadcasts that one in one packed chunk, and a line says ``done``. After ``join PORT`` the trainer forms the group anew,
at that port, with a server that is told by ``/init_weight_transfer_engine``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain_serving.vllm import weight_transfer
from drivetrain_serving.vllm.weight_transfer import GROUP
from drivetrain_weight_sync.trainer_groups.process_messages import Join
from tiny_adapters import save_adapters
from trainer_groups import BODY, a_client, a_group, a_trainer, tensors_of

SEEDS: Final = (1, 0)
_CHUNK_BYTES: Final = 1 << 30
_ASKED: Final[dict[str, Any]] = {**BODY}
_over_nccl: Final = weight_transfer.join_of


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@torch.no_grad()
def _sample(folder: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Return greedy token ids and their logprobs by whole forward passes of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    ids, logprobs = list(_ASKED["prompt"]), []
    for _ in range(_ASKED["max_tokens"]):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return {"token_ids": ids[len(_ASKED["prompt"]) :], "logprobs": logprobs}


def _more() -> dict[str, Any]:
    """Return the engine's configuration, with its Python if it runs in another environment."""
    python = os.environ.get("ENGINE_PYTHON")
    return {"enable_lora": True, **({"python": python} if python else {})}


def _over_gloo(info: Mapping[str, object], timeout: float) -> Join:
    """Read a request to join NCCL's communicator as one to join a gloo group at the same address."""
    asked = _over_nccl(info, timeout)
    return Join(
        group_name=asked.group_name,
        rank=asked.rank,
        world_size=asked.world_size,
        timeout=asked.timeout,
        master_address=asked.master_address,
        master_port=asked.master_port,
        backend="gloo",
    )


def _said(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    tensors = tensors_of(folder)
    metadata = {
        "names": [one["name"] for one in tensors],
        "dtype_names": [one["dtype"] for one in tensors],
        "shapes": [one["shape"] for one in tensors],
    }
    return {"metadata": metadata, "expected": expected}


async def serve(work: Path) -> None:
    """Serve until the input ends."""
    model = tiny_model("qwen2")
    checkpoints = [tiny_model("qwen2", seed=seed) for seed in SEEDS]
    saved = save_adapters(model, work)
    adapters = [saved / name for name in ("one", "two")]
    InferenceEngine.gpus = property(lambda engine: ("GPU-of-the-test",))  # type: ignore[assignment,method-assign]
    weight_transfer.join_of = _over_gloo  # type: ignore[assignment]
    async with (
        a_trainer() as trainer,
        create_engine(os.environ.get("BACKEND", "transformers"), model=str(model), **_more()) as engine,
        a_client(engine) as client,
        a_group(trainer, client, name=GROUP),
    ):
        said = {
            "url": str(client.base_url).rstrip("/"),
            "prompt": BODY["prompt"],
            "sampling_params": {name: BODY[name] for name in ("max_tokens", "temperature", "logprobs", "ignore_eos")},
            "checkpoints": [_said(folder, _sample(folder)) for folder in checkpoints],
            "adapters": [
                {**_said(folder, _sample(model, folder)), "config": json.loads(_config(folder))} for folder in adapters
            ],
        }
        _say(json.dumps(said))
        sources = {"checkpoints": checkpoints, "adapters": adapters}
        while line := await asyncio.to_thread(sys.stdin.readline):
            kind, number = line.split()
            if kind == "join":
                await trainer.do("destroy", group=GROUP)
                group = {"group": GROUP, "world_size": 2, "backend": "gloo"}
                error = await trainer.do("join", address="127.0.0.1", port=int(number), **group)
            else:
                folder = sources[kind][int(number)]
                packed = {"flattened": True, "chunk_bytes": _CHUNK_BYTES}
                error = await trainer.do("send", group=GROUP, folder=str(folder), tensors=tensors_of(folder), **packed)
            _say(error or "done")


def _config(folder: Path) -> str:
    return (folder / "adapter_config.json").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        asyncio.run(serve(Path(work)))
