"""A trainer's process, the groups that it forms with servers, and what those serve."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed
from safetensors.torch import load_file

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
BODY = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
Tensor = dict[str, Any]
GONE = "the trainer is gone"
_names = itertools.count()


class Trainer:
    """A trainer's process: rank 0 of the groups that it forms."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._turn = asyncio.Lock()

    async def do(self, what: str, **more: object) -> str:
        """Have the process carry out a command; return its error, or nothing. A dead process has an error too."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
            try:
                await self.process.stdin.drain()
            except ConnectionError:  # its end of the pipe can be seen before its exit
                return GONE
            line = await self.process.stdout.readline()
        return str(json.loads(line)["error"]) if line else GONE


@asynccontextmanager
async def a_trainer(**environment: str) -> AsyncIterator[Trainer]:
    """Start a trainer's process, with these variables in its environment; kill it at the end."""
    script = Path(__file__).with_name("trainer_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdin=PIPE, stdout=PIPE, env={**os.environ, **environment}
    )
    try:
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def must_join(joining: Coroutine[Any, Any, str], *posts: Coroutine[Any, Any, httpx.Response]) -> None:
    """Form a group from both sides; a trainer that cannot join fails with its own words, not at a deadline."""

    async def trainer_joins() -> None:
        assert await joining == ""

    async with asyncio.timeout(HANGING), asyncio.TaskGroup() as group:
        group.create_task(trainer_joins())
        answers = [group.create_task(post) for post in posts]
    for answer in answers:
        assert answer.result().status_code == 200, answer.result().text


@dataclass
class Group:
    """A group of a trainer and servers."""

    name: str
    trainer: Trainer
    clients: Sequence[httpx.AsyncClient]

    async def send(
        self, folder: Path, tensors: list[Tensor], *, sent: list[Tensor] | None = None, **more: Any
    ) -> tuple[httpx.Response, str]:
        """Announce a bucket to every server and broadcast it; return the last answer, and the trainer's error."""
        flattened = more.get("load_format") == "flattened_bucket"
        body = {
            "names": [one["name"] for one in tensors],
            "dtypes": [one["dtype"] for one in tensors],
            "shapes": [one["shape"] for one in tensors],
            "group_name": self.name,
            **more,
        }
        posts = [client.post("/update_weights_from_distributed", json=body) for client in self.clients]
        sending = self.trainer.do(
            "send", group=self.name, folder=str(folder), tensors=tensors if sent is None else sent, flattened=flattened
        )
        async with asyncio.timeout(HANGING):
            error, answers = await asyncio.gather(sending, asyncio.gather(*posts))
        return answers[-1], error

    async def send_all(self, folder: Path, tensors: list[Tensor], size: int = 7, **more: Any) -> None:
        """Send every bucket, as slime and AReaL do: nothing marks the end."""
        for bucket in [tensors[first : first + size] for first in range(0, len(tensors), size)]:
            answer, error = await self.send(folder, bucket, **more)
            assert (answer.status_code, error) == (200, ""), answer.text
            assert answer.json()["success"] is True


@asynccontextmanager
async def a_group(
    trainer: Trainer, *clients: httpx.AsyncClient, name: str | None = None, backend: str = "gloo"
) -> AsyncIterator[Group]:
    """Form a group; the trainer leaves it at the end."""
    name = name or f"slime-pp_{next(_names)}"
    port = free_port()
    world_size = len(clients) + 1
    posts = [
        client.post(
            "/init_weights_update_group",
            json={
                "master_address": "127.0.0.1",
                "master_port": str(port),  # as AReaL writes it
                "rank_offset": rank,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            },
        )
        for rank, client in enumerate(clients, 1)
    ]
    joining = trainer.do("join", address="127.0.0.1", port=port, world_size=world_size, group=name, backend=backend)
    await must_join(joining, *posts)
    try:
        yield Group(name, trainer, clients)
    finally:
        for client in clients:
            await client.post("/destroy_weights_update_group", json={"group_name": name})
        await trainer.do("destroy", group=name)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def tensors_of(folder: Path, dtype: str | None = None) -> list[Tensor]:
    """Return the tensors of a checkpoint or an adapter as a trainer announces them."""
    (file,) = folder.glob("*model.safetensors")
    return [
        {"name": name, "dtype": dtype or str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in load_file(file).items()
    ]


async def answers_of(client: httpx.AsyncClient, model: str = "policy") -> tuple[list[int], list[float]]:
    """Return the greedy tokens of the served model or an adapter, and their logprobs."""
    response = await client.post("/v1/completions", json={**BODY, "model": model, "return_token_ids": True})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def version_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/weight_info")).json()["weight_version"])


async def fresh(folder: Path, **config: Any) -> tuple[list[int], list[float]]:
    """Return the same of a fresh engine."""
    async with create_engine("transformers", model=str(folder), **config) as engine:
        (output,) = (await engine.generate([[5, 6, 7]], GREEDY)).completions
        return output.token_ids, output.logprobs or []


def same(found: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]) -> bool:
    return found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-5)


@asynccontextmanager
async def a_client(engine: InferenceEngine, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Server(engine, ServerConfig(port=0, served_model_name=("policy",), **config)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        yield client


async def send_as_trl(group: Group, folder: Path, tensors: list[Tensor], **info: object) -> tuple[httpx.Response, str]:
    """Send tensors as TRL does: all names in one request."""
    (client,) = group.clients
    return await _send(group, folder, tensors, client.post("/update_weights", json=_update_info(tensors, info)), info)


async def rpc(client: httpx.AsyncClient, method: str, **kwargs: object) -> httpx.Response:
    """Call a worker's method as SkyRL does."""
    return await client.post("/collective_rpc", json={"method": method, "kwargs": kwargs})


async def send_as_skyrl(group: Group, folder: Path, tensors: list[Tensor]) -> tuple[httpx.Response, str]:
    """Send tensors as SkyRL's sender does: all names in one call of a worker's method, in chunks of vLLM's own size."""
    (client,) = group.clients
    info: dict[str, object] = {"packed": True}
    return await _send(group, folder, tensors, rpc(client, "update_weights_nccl", **_update_info(tensors, info)), info)


def _update_info(tensors: list[Tensor], info: dict[str, object]) -> dict[str, object]:
    return {
        "update_info": {
            "names": [one["name"] for one in tensors],
            "dtype_names": [one["dtype"] for one in tensors],
            "shapes": [one["shape"] for one in tensors],
            **info,
        }
    }


async def _send(
    group: Group,
    folder: Path,
    tensors: list[Tensor],
    announcing: Coroutine[Any, Any, httpx.Response],
    info: dict[str, object],
) -> tuple[httpx.Response, str]:
    packed: dict[str, object] = {"flattened": info.get("packed") is True}
    if packed["flattened"]:
        packed["chunk_bytes"] = info.get("packed_buffer_size_bytes", 1 << 30)
    async with asyncio.timeout(HANGING):
        answer, error = await asyncio.gather(
            announcing, group.trainer.do("send", group=group.name, folder=str(folder), tensors=tensors, **packed)
        )
    return answer, error


@asynccontextmanager
async def a_rank_0(port: int, *, use_libuv: bool = False) -> AsyncIterator[asyncio.Task[Any]]:
    """Host a store as rank 0 of two does: its constructor waits, in a thread, until both have joined."""
    dist: Any = torch.distributed
    timeout = timedelta(seconds=HANGING)
    hosting = asyncio.to_thread(dist.TCPStore, "127.0.0.1", port, 2, True, timeout, use_libuv=use_libuv)
    yield asyncio.create_task(hosting)


async def require_released(rank_0: asyncio.Task[Any]) -> None:
    """Require the wait to end by torch's error for a count that is no ``int``, and not by a timeout."""
    async with asyncio.timeout(HANGING / 2):
        with pytest.raises(IndexError, match="stoi"):
            await rank_0
