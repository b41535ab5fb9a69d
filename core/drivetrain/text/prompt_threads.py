"""Threads for prompt preparation off the event loop: chat templates, long texts, many token ids.

The process's engines share the threads. They are few, because each thread that runs Python code slows the event loop
down.
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
    """Run ``function`` in a prompt thread and return its result.

    Cancelling frees the thread early by ending the function's bounded call.
    """
    work = Abandonable()
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, work.run, function)
    except asyncio.CancelledError:
        work.abandon()
        raise


def _begin() -> None:
    """Create the pool without starting threads; after a fork, the old threads are the parent's."""
    global _threads
    _threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="drivetrain-prompts")


_threads: ThreadPoolExecutor
_begin()
os.register_at_fork(after_in_child=_begin)
