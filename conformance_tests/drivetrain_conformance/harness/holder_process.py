"""A holder of an engine in a process of its own, which a case tells what to do, and kills.

Run as a module, this file is that process: it reads the engine's handle and then one order in each line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final, cast

from drivetrain.attached.backend import AttachedBackend
from drivetrain.attached.connection import fetch_facts
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, from_wire, to_wire
from drivetrain.types.handle import EngineHandle
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_conformance.harness.time_limits import LIMIT, within

LIFTED_S: Final = 20.0
"""Seconds within which nothing of a killed holder may be left. Its connection breaks at once."""
_LINE_LIMIT: Final = 1 << 26
"""Maximum bytes of an order: the plan of an update names every tensor."""


class HolderProcess:
    """A holder that pauses an engine, puts it to sleep and updates it. Made by :func:`holder_of`.

    Its calls raise the errors of the engine's owner.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_killed = False

    async def attach(self, handle: EngineHandle) -> None:
        """Connect to the engine."""
        await self._order(asdict(handle))

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine."""
        await self._order({"pause": mode.value})

    async def sleep(self, tags: Collection[MemoryTag]) -> None:
        """Put memory of the engine to sleep."""
        await self._order({"sleep": [tag.value for tag in tags]})

    async def begin_update(self, request: WeightUpdateRequest) -> None:
        """Begin an update, and load half of its buckets."""
        await self._order({"update": request.model_dump(mode="json")})

    def kill(self) -> None:
        """Kill the process, which says nothing more to the owner; idempotent."""
        if not self._is_killed:  # a second signal would reap the process before asyncio does
            self._is_killed = True
            self._process.kill()

    async def _order(self, order: Mapping[str, object]) -> None:
        to_holder, from_holder = self._process.stdin, self._process.stdout
        assert to_holder is not None
        assert from_holder is not None
        to_holder.write(json.dumps(order).encode() + b"\n")
        async with within("an order to a holder in a process of its own"):
            await to_holder.drain()
            answer = await from_holder.readline()
        assert answer, f"the holder's process ended with the code {await self._process.wait()}"
        if refused := json.loads(answer):
            raise from_wire(*refused)


@asynccontextmanager
async def holder_of(engine: InferenceEngine) -> AsyncGenerator[HolderProcess, None]:
    """Start a process that holds the engine, and kill it at the end of the block."""
    handle = await engine.handle()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "drivetrain_conformance.harness.holder_process"), stdin=PIPE, stdout=PIPE
    )
    holder = HolderProcess(process)
    try:
        await holder.attach(handle)
        yield holder
    finally:
        if process.returncode is None:
            holder.kill()
        await process.wait()


# In the holder's process --------------------------------------------------------------------------------------------


async def _hold() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(_LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    handle = EngineHandle(**json.loads(await orders.readline()))
    # The tokenizer would take longer to load than everything else, and these calls need none.
    backend = AttachedBackend(handle, await asyncio.to_thread(fetch_facts, handle, LIMIT), LIMIT)
    await backend.start(lambda _: None)
    _answer(None)
    while line := await orders.readline():
        try:
            await _obey(backend, json.loads(line))
        except DrivetrainError as error:
            _answer(error)
        else:
            _answer(None)


async def _obey(backend: AttachedBackend, order: Mapping[str, object]) -> None:
    if "pause" in order:
        await backend.call("pause_generation", PauseMode(order["pause"]), None)
    elif "sleep" in order:
        tags = frozenset(map(MemoryTag, cast("list[str]", order["sleep"])))
        await backend.call("sleep", tags, None, False, 0.0)
    else:
        request = WeightUpdateRequest.model_validate(order["update"])
        buckets = await backend.call("begin_update", request)
        assert isinstance(buckets, int)
        await backend.call("load_buckets", list(range(buckets // 2)))


def _answer(error: DrivetrainError | None) -> None:
    print(json.dumps(error and to_wire(error)), flush=True)


if __name__ == "__main__":
    asyncio.run(_hold())
