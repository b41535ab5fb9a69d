"""One engine of each isolation for the whole run, and throwaway engines for tests that change one permanently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from drivetrain import InferenceEngine, create_engine
from engines import OpenEngine, require_ready_and_idle


@pytest.fixture(scope="module", autouse=True)
def hosts(forked_hosts: None) -> None:
    """Fork the hosts of all tests, but not that of an engine of the whole run."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["inline", "process"])
async def shared_engine(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine("transformers", model=str(model), isolation=request.param, max_num_seqs=16) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """The shared engine; a test must leave it ready and idle."""
    yield shared_engine
    await require_ready_and_idle(shared_engine)


@pytest.fixture
def open_engine(model: Path) -> OpenEngine:
    @asynccontextmanager
    async def opened(**fields: object) -> AsyncIterator[InferenceEngine]:
        config = {"backend": "transformers", "model": str(model), "isolation": "inline", **fields}
        async with create_engine(config) as engine:
            yield engine

    return opened
