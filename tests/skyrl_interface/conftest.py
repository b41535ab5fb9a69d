"""One engine behind SkyRL's interface for the whole run."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from drivetrain import InferenceEngine, create_engine
from drivetrain_trainers.skyrl import SkyRLInferenceEngine
from engines import require_ready_and_idle
from tiny_adapters import save_adapters
from trainer_groups import Trainer, a_trainer

CONFIG = json.loads(os.environ.get("SKYRL_ENGINE", '{"backend": "transformers", "isolation": "inline"}'))
"""The engine; another one is given as JSON, to run the same tests on it by hand."""


@pytest.fixture(scope="module", autouse=True)
def hosts(forked_hosts: None) -> None:
    """Fork the hosts of all tests, but not that of an engine of the whole run."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters ``one`` and ``two``."""
    return save_adapters(model, tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(model: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine({"model": str(model), "enable_lora": True, "max_num_seqs": 16, **CONFIG}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """The engine behind the interface; a test must leave it ready and idle."""
    yield shared_engine
    await require_ready_and_idle(shared_engine)


@pytest_asyncio.fixture(loop_scope="session")
async def skyrl(engine: InferenceEngine) -> AsyncIterator[SkyRLInferenceEngine]:
    made = SkyRLInferenceEngine(engine)
    yield made
    await made.transfers.close()


@pytest_asyncio.fixture(loop_scope="session")
async def restored(engine: InferenceEngine, model: Path) -> AsyncIterator[None]:
    """The engine serves ``model`` as ``initial`` again afterwards."""
    yield
    await engine.load_weights_from_disk(str(model), "initial")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trainer() -> AsyncIterator[Trainer]:
    async with a_trainer() as trainer:
        yield trainer
