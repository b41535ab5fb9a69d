"""Reading prompts beside the event loop: rendering chat templates, tokenising long texts, checking many token ids.

The threads are the process's, shared by its engines, and few: each that runs Python code slows the event loop down.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from drivetrain.checks.limits import PROMPT_THREADS
from drivetrain.text.call_timeout import Abandonable

_T = TypeVar("_T")


async def in_prompt_thread(function: Callable[[], _T]) -> _T:
    """Return what ``function`` returns, run in a thread.

    Cancelling gives the thread back early: a bounded call within is ended.
    """
    work = Abandonable()
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, work.run, function)
    except asyncio.CancelledError:
        work.abandon()
        raise


def _begin() -> None:
    """Start no thread yet. After a fork the threads are another process's."""
    global _threads
    _threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="drivetrain-prompts")


_threads: ThreadPoolExecutor
_begin()
os.register_at_fork(after_in_child=_begin)
