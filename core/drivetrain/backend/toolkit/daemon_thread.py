"""A call in a thread that may be left: neither a deadline nor the end of the process waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def in_daemon_thread(call: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Run ``call`` in a new daemon thread, and return its outcome as a future of the running event loop.

    Cancelling the future leaves the thread to end by itself.

    Args:
        call: The call, without arguments.
        name: Name of the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def succeed(value: _T) -> None:
        if not future.done():
            future.set_result(value)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            try:
                value = call()
            except BaseException as error:
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(succeed, value)
        except RuntimeError:  # the loop was closed meanwhile
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
