"""A small part of the fuzz, the same in every run; `make fuzz` draws more."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from tests.fuzz.calls import Draw, calls, fuzz

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain.types import arguments


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Change the working directory: the engine saves models, and some junk is a relative path."""
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def opened() -> AsyncIterator[InferenceEngine]:
    torch.set_num_threads(1)
    async with create_engine(
        "transformers", model=str(tiny_model("qwen2")), device="cpu", isolation="inline"
    ) as engine:
        yield engine


async def test_calls_with_junk_are_typed_or_right() -> None:
    async with opened() as engine:
        faults = await fuzz(engine, count=300, seed=0, known_every=50)
    assert faults == {}


async def test_every_public_method_with_arguments_is_drawn() -> None:
    async with opened() as engine:
        drawn = calls(engine, Draw(0), [])
    page = inspect.getmembers(InferenceEngine, inspect.isroutine)
    taking = {
        name for name, method in page if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    }
    assert taking <= drawn.keys()


async def test_the_fuzz_finds_what_a_page_without_checks_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in inspect.getmembers(InferenceEngine, inspect.isfunction):
        if method.__code__.co_filename == arguments.__file__:
            monkeypatch.setattr(InferenceEngine, name, inspect.unwrap(method))
    async with opened() as engine:
        faults = await fuzz(engine, count=150, seed=0)
    kinds = {fault.split(":")[1].strip() for fault in faults}
    assert {"TypeError", "AttributeError"} <= kinds, faults
