"""One server over the transformers backend for the whole run, and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from drivetrain import InferenceEngine, create_engine
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.vllm.weight_transfer import GROUP
from engines import HANGING, require_ready_and_idle
from tiny_adapters import save_adapters
from trainer_groups import Group, Trainer, a_group, a_trainer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters ``one`` and ``two``."""
    return save_adapters(model, tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(model: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine("transformers", model=str(model), enable_lora=True, max_num_seqs=16) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(served: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """The engine behind the server; a test must leave it ready and idle."""
    yield served
    await require_ready_and_idle(served)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(served: InferenceEngine, adapters: Path) -> AsyncIterator[Server]:
    config = ServerConfig(port=0, served_model_name=("policy",), lora_folder=str(adapters), max_body_bytes=1 << 20)
    async with Server(served, config) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trainer() -> AsyncIterator[Trainer]:
    async with a_trainer() as trainer:
        yield trainer


@pytest_asyncio.fixture(loop_scope="session")
async def with_gpu(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A server that takes its engine for one with a GPU."""
    monkeypatch.setattr(type(engine), "gpus", property(lambda self: ("GPU-of-the-test",)))
    async with (
        Server(engine, ServerConfig(port=0, served_model_name=("policy",))) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client,
    ):
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def transfer(
    trainer: Trainer, engine: InferenceEngine, model: Path, with_gpu: httpx.AsyncClient
) -> AsyncIterator[Group]:
    """Such a server, and a gloo group in the place of the NCCL communicator."""
    async with a_group(trainer, with_gpu, name=GROUP) as group:
        yield group
    await engine.load_weights_from_disk(str(model), "initial")
    await engine.continue_generation()
