"""An engine that runs until its process is told to end, or until the engine fails."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from drivetrain.cli.output import progress
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineDied
from drivetrain.process.garbage_collection import steady_garbage_collection
from drivetrain.types.config import Isolation


@asynccontextmanager
async def started(engine: InferenceEngine) -> AsyncGenerator[Callable[[], Awaitable[None]] | None]:
    """Start an engine, showing its progress, and close it at the end of the block.

    Yields a function that waits until SIGTERM or SIGINT comes, and raises :class:`EngineDied` if the engine fails
    first; None if the signal came while the engine started.
    """
    loop = asyncio.get_running_loop()
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    try:
        with progress(f"starting {engine.config.backend}") as report:
            await _unless(told_to_end, engine.start(report))
        if told_to_end.is_set():
            yield None
            return
        with steady_garbage_collection(holds_model=engine.isolation is Isolation.INLINE):
            yield lambda: _unless(told_to_end, _failed(engine))
    finally:
        await engine.teardown()


async def _unless(told_to_end: asyncio.Event, work: Coroutine[object, object, None]) -> None:
    """Run ``work``, and cancel it when this process is told to end."""
    working = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(told_to_end.wait())
    await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
    for task in (working, ending):
        task.cancel()
    done = await asyncio.gather(working, ending, return_exceptions=True)
    if isinstance(done[0], Exception):
        raise done[0]


async def _failed(engine: InferenceEngine) -> None:
    """Wait until the engine has failed.

    Raises:
        EngineDied: it has.
    """
    changed = asyncio.Event()
    engine.parts.controller.subscribe(changed.set)
    while engine.state is not EngineState.FAILED:
        await changed.wait()
        changed.clear()
    raise EngineDied(engine.status.describe())
