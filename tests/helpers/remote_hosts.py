"""Processes with ``drivetrain host``, and a wire to them that can be cut."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from drivetrain import EngineHandle, InferenceEngine
from warm_python import Program, running

KEY = "a key of enough characters"


class Wire:
    """A TCP port in front of an engine's, whose connections can be cut, and whose answers can be held back."""

    def __init__(self) -> None:
        self.target = 0
        self.cut_for_good = False
        self.drop_handshakes = 0
        """Number of connections that are dropped after the owner's first message."""
        self.dropped = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._answers = asyncio.Event()
        self._answers.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy between a connection and a new one to the target."""
        if self.cut_for_good:
            writer.transport.abort()
            return
        there_reader, there = await asyncio.open_connection("127.0.0.1", self.target)
        if self.dropped < self.drop_handshakes:
            self.dropped += 1
            writer.write(await there_reader.read(1 << 16))
            await reader.read(1 << 16)  # the holder's answer
            writer.close()
            there.close()
            return
        self._open |= {writer, there}
        await asyncio.gather(self._copy(reader, there), self._copy(there_reader, writer, self._answers))

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event | None = None
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if may_pass is not None:
                    await may_pass.wait()
                writer.write(data)
        except OSError:
            pass
        writer.close()

    def hold_answers(self) -> None:
        """Keep back what the engine sends, until :meth:`let_answers_pass`."""
        self._answers.clear()

    def let_answers_pass(self) -> None:
        """Deliver what was kept back, in order."""
        self._answers.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


@asynccontextmanager
async def wired(engine: InferenceEngine) -> AsyncIterator[tuple[Wire, EngineHandle]]:
    """Put a wire in front of an engine."""
    wire = Wire()
    wire.target = (await engine.handle("127.0.0.1:0", key=KEY)).tcp[1]
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    try:
        yield wire, EngineHandle(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY)
    finally:
        server.close()
        wire.cut()


@asynccontextmanager
async def host(*arguments: str, key: str | None = None) -> AsyncIterator[Program]:
    """Run ``drivetrain host`` in the block."""
    environment = {name: value for name, value in os.environ.items() if name != "DRIVETRAIN_KEY"}
    environment |= {} if key is None else {"DRIVETRAIN_KEY": key}
    async with running("-m", "drivetrain", "host", *arguments, env=environment) as program:
        yield program


async def printed(process: Program, name: str) -> str:
    """Read the next line of a host's output, and return what it says of ``name``."""
    line = (await process.stdout.readline()).decode()
    assert line.startswith(f"{name}: "), line
    return line.removeprefix(f"{name}: ").strip()
