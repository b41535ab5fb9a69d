"""The owner of an engine: lets a sender in another process push to it, and gives up a sender that is lost or silent."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final, Self, TypeVar, cast

import psutil
from tests.faults.line import Line, LineLost
from tests.faults.sender import Job, Report, main

from drivetrain import InferenceEngine
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DrivetrainError, to_wire
from drivetrain.types.weights import WeightUpdateRequest

_T = TypeVar("_T")
_processes: Final = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.faults.sender"])


class Desk:
    """The owner's side of one sender's, or trainer's, process: answers its calls."""

    def __init__(self, process: Any, line: Line, engine: InferenceEngine | None, patience: float) -> None:
        self.process = psutil.Process(process.pid)
        self._child = process
        self._line = line
        self._engine = engine
        self.patience = patience
        """Seconds for which the process may be silent."""
        self._prepared: WeightUpdateRequest | None = None
        self.host_pid: int | None = None
        """Host of the trainer's own engine, if it has one."""
        self.exitcode: int | None = None
        self.groups: list[str] = []
        """Groups that the sender has formed with the engine."""

    @classmethod
    async def open(cls, job: Job, engine: InferenceEngine | None, *, patience: float, start: float = 180) -> Self:
        """Start the process; return once it can be asked for a push."""
        ours, theirs = socket.socketpair()
        process = _processes.Process(target=main, args=(theirs, job), daemon=True)
        process.start()
        theirs.close()
        desk = cls(process, await Line.over(ours), engine, start)
        await desk._serve()
        desk.patience = patience
        return desk

    async def push(self, version: str) -> Report:
        """Let the process push a version; return its report.

        Raises:
            LineLost: the process is gone.
            DeadlineExceeded: the process was silent for longer than the owner's patience.
        """
        await self._line.say((0, "push", version))
        report = await self._serve()
        assert report is not None
        return report

    async def close(self, within: float) -> None:
        """Let the process close its resources and end."""
        await self._line.say((0, "push", None))
        async with deadline(within, "the sender's process to end"):
            try:
                while True:
                    await self._serve()
            except LineLost:
                pass
            await self.hang_up()
            await self.ended()
        assert self.exitcode == 0, f"it ended with {self.exitcode}"

    async def hang_up(self) -> None:
        """Close the line."""
        await self._line.close()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        while self.exitcode is None and self._child.exitcode is None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        if self.exitcode is None:
            self.exitcode = self._child.exitcode
            self._child.close()

    def kill(self) -> None:
        """Kill the process, frozen or not."""
        if self.exitcode is None:
            self._child.kill()

    async def _serve(self) -> Report | None:
        """Answer calls until the process asks what to do next."""
        while True:
            name, number, argument = await self._hear("the sender's next call")
            match name:
                case "next":
                    report, self.host_pid = argument
                    return cast("Report | None", report)
                case "update":
                    await self._update(number, *argument)
                case "break":
                    pass  # the update that it breaks off has already failed
                case _:
                    await self._answer(name, number, argument)

    async def _answer(self, name: str, number: int, argument: Any) -> None:
        engine = self._engine
        assert engine is not None
        value: object = None
        try:
            match name:
                case "hello":
                    value = engine.isolation, engine.capabilities, engine.config
                case "manifest":
                    value = await engine.weight_manifest()
                case "prepare":
                    self._prepared = argument
                    await self._unless_lost(engine.prepare_weight_update(argument))
                case "release":
                    await engine.release_weight_sources()
                case "join":
                    self.groups.append(argument.group_name)
                    await self._unless_lost(engine.init_weight_update_communicator(argument))
                case "leave":
                    await engine.destroy_weight_update_communicator(argument)
                    self.groups.remove(argument)
                case _:
                    raise AssertionError(name)
        except DrivetrainError as error:
            await self._line.say((number, "error", to_wire(error)))
        else:
            await self._line.say((number, "ok", value))

    async def _update(self, number: int, request: WeightUpdateRequest, at_once: bool) -> None:
        assert self._engine is not None
        if self._prepared is not None and request == self._prepared:
            request = self._prepared  # the engine recognises the request by its identity
        try:
            async with AsyncExitStack() as stack:
                entering = stack.enter_async_context(self._engine.weight_update(request, at_once=at_once))
                update = await self._unless_lost(entering)
                await self._line.say((number, "ok", update.buckets))
                while True:
                    name, number, argument = await self._hear("the sender's next bucket")
                    if name == "finish":
                        break
                    if name == "break":
                        raise ConnectionError(f"the sender gave up: {argument}")
                    await self._unless_lost(update.load(argument))
                    await self._line.say((number, "ok", None))
        except DrivetrainError as error:
            await self._line.say((number, "error", to_wire(error)))
            if isinstance(error.__cause__, LineLost):
                raise error.__cause__ from error
        else:
            await self._line.say((number, "ok", None))

    async def _hear(self, waited_for: str) -> tuple[str, int, Any]:
        async with deadline(self.patience, waited_for):
            return cast("tuple[str, int, Any]", await self._line.hear())

    async def _unless_lost(self, work: Coroutine[object, object, _T]) -> _T:
        """Do the engine's part, unless the sender disappears or gives up meanwhile."""
        doing = asyncio.ensure_future(work)
        hearing = asyncio.ensure_future(self._line.hear())
        try:
            await asyncio.wait({doing, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                raise ConnectionError(f"the sender gave up: {hearing.result()}")
            return doing.result()
        finally:
            for task in (doing, hearing):
                task.cancel()
            await asyncio.gather(doing, hearing, return_exceptions=True)
