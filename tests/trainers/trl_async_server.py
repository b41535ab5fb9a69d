# pyright: reportMissingImports=false
"""TRL's AsyncGRPOTrainer with its own worker and transfers against our server: ``make test-trl-teacher``.

On a CPU, torch computes its attention, and gloo stands in the place of NCCL. vLLM is asked for, and not used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

import pytest
import torch
from peft import LoraConfig
from trl.experimental.async_grpo import async_rollout_worker, weight_transfer

import tiny_async_grpo as tiny
from tiny_grpo import logged
from trainer_process import broadcast, chunks, join

SERVER: Final = Path(__file__).parents[1] / "helpers" / "serving_for_async_grpo.py"
STEPS: Final = 6
CHUNK_BYTES: Final = 1 << 30
"""Size of vLLM's chunks."""
GROUP: Final = "weight transfer engine"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


InTheProject = Callable[..., AbstractContextManager["Popen[str]"]]


class Served:
    """A server in the project's environment."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process
        self.url = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def version(self) -> str:
        """Return the version of the weights that are served."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        return self._line()


@contextmanager
def served(in_the_project: InTheProject, *options: str) -> Iterator[Served]:
    with in_the_project(str(SERVER), *options) as process:
        yield Served(process)


@pytest.fixture(autouse=True)
def vllm_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (async_rollout_worker, weight_transfer):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put gloo in the place of vLLM's NCCL communicator; return the bytes of every chunk that is sent."""
    sent: list[int] = []

    def endpoint(info: dict[str, Any]) -> Any:
        return join(info["master_address"], info["master_port"], info["world_size"], GROUP, "gloo")

    def produce(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], torch.Tensor]) -> None:
        for chunk in chunks([post_iter_func(item).detach() for item in iterator], CHUNK_BYTES):
            sent.append(len(chunk))
            broadcast(group, [chunk])

    stand_ins = {"get_ip": lambda: "127.0.0.1", "get_open_port": free_port, "_HAS_STATEFUL_TRAINER_ENGINE": True}
    stand_ins |= {"open_trainer_endpoint": endpoint, "packed_nccl_broadcast_producer": produce}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(weight_transfer, name, stand_in, raising=False)
    monkeypatch.setattr(weight_transfer.WeightTransferClient, "destroy", lambda client: None)
    return sent


def test_all_weights_arrive_by_the_servers_transfer_routes(in_the_project: InTheProject, gloo: list[int]) -> None:
    with served(in_the_project, "nccl") as server:
        args = tiny.config(max_steps=STEPS, vllm_server_base_url=server.url)
        training = tiny.trainer(args, tiny.tokenizer(), reward_funcs=tiny.letters)
        recorded = tiny.Recorded(training)
        training.train()
        assert server.version() == str(training.model_version) == str(STEPS + 1)
    nbytes = sum(parameter.numel() * 4 for parameter in training.model.parameters())
    assert gloo == [nbytes] * (STEPS + 1)
    assert len(logged(training, "reward")) == STEPS
    assert len(recorded.versions) > 2
    assert recorded.largest_gap() < 1e-4


def test_adapters_arrive_in_folders(in_the_project: InTheProject, tmp_path: Path) -> None:
    """Nothing stands in for anything of the transfer here: TRL sends paths."""
    with served(in_the_project, "lora") as server:
        args = tiny.config(
            max_steps=STEPS, vllm_server_base_url=server.url, output_dir=str(tmp_path), learning_rate=1e-2
        )
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
        training = tiny.trainer(args, tiny.tokenizer(), reward_funcs=tiny.letters, peft_config=lora)
        recorded = tiny.Recorded(training)
        training.train()
    assert training.weight_transfer is None
    assert training.model_version == STEPS + 1
    assert len(logged(training, "reward")) == STEPS
    assert len(recorded.versions) > 2
    assert recorded.largest_gap() < 1e-4
