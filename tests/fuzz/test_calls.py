"""A small part of the fuzz, the same in every run; `make fuzz` draws more."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tests.fuzz.calls import Draw, calls, differences, fuzz

from drivetrain import InferenceEngine, create_engine
from drivetrain.testing import tiny_model
from drivetrain.types import arguments


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in an empty folder and offline: the engine saves models, and some junk is a relative path or a hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@asynccontextmanager
async def opened(isolation: str = "inline") -> AsyncIterator[InferenceEngine]:
    torch.set_num_threads(1)
    async with create_engine(
        "transformers", model=str(tiny_model("qwen2")), device="cpu", isolation=isolation
    ) as engine:
        yield engine


async def test_calls_with_junk_are_typed_or_right() -> None:
    async with opened() as engine:
        faults = await fuzz(engine, count=300, seed=0, known_every=50)
    assert faults == {}


@pytest.mark.slow
async def test_hosted_calls_end_as_inline_calls_do() -> None:
    endings: dict[str, list[str]] = {"inline": [], "process": []}
    for isolation, ended in endings.items():
        async with opened(isolation) as engine:
            await fuzz(engine, count=200, seed=1, endings=ended)
    assert differences(*endings.values()) == []


def test_calls_that_end_in_two_ways_are_found_until_a_deadline_ends_one() -> None:
    inline = ["abort: an answer", "sleep: InvalidRequest tags", "decode: DeadlineExceeded ", "abort: an answer"]
    hosted = ["abort: an answer", "sleep: WireError ", "decode: an answer", "abort: EngineDied "]
    assert differences(inline, hosted) == ["call 2 ended as sleep: InvalidRequest tags, and as sleep: WireError "]


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
