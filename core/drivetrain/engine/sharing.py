"""The part of an engine that lets other processes use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from drivetrain.engine.controller import Controller
from drivetrain.process.proof import new_key
from drivetrain.types.handle import EngineHandle


class Listener(Protocol):
    """Lets holders in: :class:`~drivetrain.engine.listener.EngineListener`."""

    async def listen(
        self, address: str | None, key: str, announced: str | None, certfile: str | None, keyfile: str | None
    ) -> EngineHandle: ...

    async def close(self) -> None: ...


class Sharing:
    """Makes the listener when the first handle is asked for, and closes it with the engine."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.make_listener: Callable[[], Listener] | None = None
        """Set by the engine."""
        self._listener: Listener | None = None
        self._plain: EngineHandle | None = None
        """The handle that was made without arguments."""
        self._making_plain = asyncio.Lock()

    async def handle(
        self,
        listen: str | None,
        key: str | None,
        announce: str | None,
        certfile: str | None,
        keyfile: str | None,
    ) -> EngineHandle:
        """Listen, and return the handle; see ``InferenceEngine.handle``."""
        self.controller.status.require_open("handle()")
        if self._listener is None:
            assert self.make_listener is not None
            self._listener = self.make_listener()
        if all(given is None for given in (listen, key, announce, certfile, keyfile)):
            async with self._making_plain:
                if self._plain is None:
                    self._plain = await self._listener.listen(None, new_key(), None, None, None)
                return self._plain
        key = new_key() if key is None else key
        return await self._listener.listen(listen, key, announce, certfile, keyfile)

    async def close(self) -> None:
        """Disconnect every holder and stop listening."""
        listener, self._listener, self._plain = self._listener, None, None
        if listener is not None:
            await listener.close()
