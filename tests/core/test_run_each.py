"""A call several of whose samples fail at once."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from drivetrain import GenerateRequest, LogprobsMode, SamplingParams
from drivetrain.engine.requests_in_flight import run_each
from drivetrain.engine.samples import Sample, Samples


async def test_errors_of_samples_that_fail_together_are_all_taken() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    request = GenerateRequest("r", [1], SamplingParams(n=3), 1, (), LogprobsMode.RAW)

    async def fail(_: Sample) -> None:
        raise ValueError("diverged")

    started: list[asyncio.Task[None]] = []
    with pytest.raises(ValueError, match="diverged"):
        await run_each([Samples(request, 0, lambda _: None, vocab_size=8)], fail, started)
    assert len(started) == 3
    await asyncio.sleep(0)
    started.clear()
    gc.collect()
    assert logged == []
