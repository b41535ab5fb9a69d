"""The trainer's end of the call socket: the handshake and the progress of the start, on top of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from drivetrain.errors import DrivetrainError, EngineDied
from drivetrain.process.rpc_client import RpcClient
from drivetrain.process.wire import FRAME_LIMIT, HANDSHAKE_LIMIT, Failure, FromHost, Hello, Open, Progress, Welcome

_logger = logging.getLogger("drivetrain.host")
_LAST_WORDS_S: Final = 0.2


class HostConnection(RpcClient):
    """A connection to a host process.

    Args:
        report: Called with each progress message of the engine's start.
        on_lost: As for :class:`RpcClient`.
        with_log: Adds the end of the host's log to the message of an ``EngineDied``.
    """

    def __init__(
        self, report: Callable[[str], None], on_lost: Callable[[str], None], with_log: Callable[[str], str]
    ) -> None:
        super().__init__(on_lost, HANDSHAKE_LIMIT)
        self._report = report
        self._with_log = with_log
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.welcome: asyncio.Future[Welcome] = self._loop.create_future()

    def open(self, message: Open) -> None:
        """Answer the host's hello."""
        self._send(message)

    def fail(self, error: Callable[[], DrivetrainError]) -> None:
        super().fail(error)
        for handshake in (self.hello, self.welcome):
            if not handshake.done():
                handshake.set_exception(error())
                handshake.exception()  # marks it as seen: only one of the two has somebody waiting for it

    def _take(self, message: FromHost) -> None:
        if isinstance(message, Progress):
            self._progress(message.text)
        elif isinstance(message, Hello):
            if not self.hello.done():
                self.hello.set_result(message)
        elif isinstance(message, Welcome):
            if not self.welcome.done():
                self._frames.limit = FRAME_LIMIT
                self.welcome.set_result(message)
        elif isinstance(message, Failure) and message.error == EngineDied.__name__:
            # The engine's last lines of output come another way, and may still be on it.
            self._loop.call_later(_LAST_WORDS_S, self._failed, message)
        else:
            super()._take(message)

    def _progress(self, text: str) -> None:
        try:
            self._report(text)
        except Exception:  # the caller's code, whose exception would break the connection
            _logger.exception("the callback for the progress of the engine's start failed on %r", text)

    def _exception(self, message: Failure) -> Exception:
        error = super()._exception(message)
        return EngineDied(self._with_log(str(error))) if type(error) is EngineDied else error
