"""Ending Python code that others wrote, such as a chat template, when it takes too long.

A thread cannot be killed. The interpreter can raise an exception in one, at its next bytecode: this ends any loop, but
no single call into C.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from drivetrain.errors import DeadlineExceeded

_T = TypeVar("_T")
_LOOK_S: Final = 0.25
"""Seconds between two looks at the calls under way."""
_here: Final = threading.local()
"""The :class:`Abandonable` that runs in this thread."""


class _Overdue(BaseException):
    """Raised within a call that takes too long; no ``except Exception`` catches it."""


@dataclass(slots=True, eq=False)
class _Guarded:
    thread: int
    ends: float
    raised: bool = False


class Abandonable:
    """Runs a function in the calling thread; another thread may end the :func:`bounded` calls within."""

    def __init__(self) -> None:
        self._abandoned = False
        self._guarded: _Guarded | None = None

    def run(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns."""
        _here.abandonable = self
        try:
            return function()
        finally:
            _here.abandonable = None

    def abandon(self) -> None:
        """End the bounded call under way and those that begin later, each at the next look."""
        self._abandoned = True
        if self._guarded is not None:
            self._guarded.ends = 0.0

    def guard(self, guarded: _Guarded) -> None:
        """Take note of a bounded call that begins."""
        self._guarded = guarded
        if self._abandoned:
            guarded.ends = 0.0


def bounded(call: Callable[[], _T], seconds: float, waited_for: str) -> _T:
    """Return what ``call`` returns, in this thread.

    Raises:
        DeadlineExceeded: it took longer than ``seconds``, or nobody waits for it any more, and was ended.
    """
    guarded = _Guarded(threading.get_ident(), time.monotonic() + seconds)
    abandonable: Abandonable | None = getattr(_here, "abandonable", None)
    if abandonable is not None:
        abandonable.guard(guarded)
    try:
        _watch.add(guarded)
        try:
            return call()
        finally:
            _watch.remove(guarded)
    except _Overdue:
        _remove_surely(guarded)
        raise DeadlineExceeded(f"waited {seconds:g} s for {waited_for}; it was ended") from None


def _remove_surely(guarded: _Guarded) -> None:
    while True:
        try:
            return _watch.remove(guarded)
        except _Overdue:  # raised once more meanwhile
            continue


class _Watch:
    """One thread that looks at all guarded calls, as long as there are any.

    A guarded thread may be raised in wherever it is, also in here. So it takes a plain lock alone, whose ``with`` the
    interpreter does not interrupt: conditions and events are Python code, and would be left locked.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all calls: after a fork they are another process's."""
        self._lock = threading.Lock()
        self._guarded: set[_Guarded] = set()
        self._is_looking = False

    def add(self, guarded: _Guarded) -> None:
        while True:
            with self._lock:
                if self._is_looking:
                    self._guarded.add(guarded)
                    return
                self._is_looking = True
            # Nothing is raised in this thread yet.
            threading.Thread(target=self._look, name="drivetrain-bounded", daemon=True).start()

    def remove(self, guarded: _Guarded) -> None:
        """Afterwards nothing is raised in its thread, also if that was on its way."""
        with self._lock:
            self._guarded.discard(guarded)
            if guarded.raised:
                _raise_in(guarded.thread, None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if not self._guarded:
                    self._is_looking = False
                    return
                now = time.monotonic()
                for guarded in self._guarded:
                    if guarded.ends <= now:
                        # Again at the next look: a bare ``except`` may have caught it.
                        guarded.raised = True
                        _raise_in(guarded.thread, _Overdue)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise ``error`` in a thread; None takes back what has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


_watch: Final = _Watch()
os.register_at_fork(after_in_child=_watch.begin)
