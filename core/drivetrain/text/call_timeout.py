"""Timeouts for untrusted Python code, such as chat templates.

A thread cannot be killed, but the interpreter can raise an exception in it at its next bytecode. This ends any loop,
but no single call into C.
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
"""Interval in seconds at which the running calls are checked."""
_here: Final = threading.local()
"""``abandonable``: the :class:`Abandonable` that is running in the current thread."""


class _Overdue(BaseException):
    """Raised inside a call that takes too long. A BaseException, so ``except Exception`` does not catch it."""


@dataclass(slots=True, eq=False)
class _Guarded:
    thread: int
    ends: float
    raised: bool = False


class Abandonable:
    """A function call whose :func:`bounded` calls another thread can end."""

    def __init__(self) -> None:
        self._abandoned = False
        self._guarded: _Guarded | None = None

    def run(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` in the current thread and return its result."""
        _here.abandonable = self
        try:
            return function()
        finally:
            _here.abandonable = None

    def abandon(self) -> None:
        """End the current bounded call, and later ones, each at the next check."""
        self._abandoned = True
        if self._guarded is not None:
            self._guarded.ends = 0.0

    def guard(self, guarded: _Guarded) -> None:
        """Register a bounded call that begins."""
        self._guarded = guarded
        if self._abandoned:
            guarded.ends = 0.0


def bounded(call: Callable[[], _T], seconds: float, waited_for: str) -> _T:
    """Run ``call`` in the current thread with a timeout, and return its result.

    Raises:
        DeadlineExceeded: The call was ended because it took longer than ``seconds``, or because it was abandoned.
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
        raise DeadlineExceeded(f"timed out after {seconds:g} s waiting for {waited_for}, which was ended") from None


def _remove_surely(guarded: _Guarded) -> None:
    while True:
        try:
            return _watch.remove(guarded)
        except _Overdue:  # the watch thread raised it again
            continue


class _Watch:
    """Watches all guarded calls in one thread, which runs only while there are any.

    The exception may hit a guarded thread anywhere, also in these methods. So only a plain lock is used: the
    interpreter does not interrupt its ``with``. Conditions and events are Python code and would stay locked.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the watch; after a fork the calls belong to the parent process."""
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
            # Not guarded yet, so no exception is raised here.
            threading.Thread(target=self._look, name="drivetrain-bounded", daemon=True).start()

    def remove(self, guarded: _Guarded) -> None:
        """Stop guarding a call, and withdraw an exception that is still pending in its thread."""
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
                        # Raised again at each check: a bare ``except`` may have caught it.
                        guarded.raised = True
                        _raise_in(guarded.thread, _Overdue)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise ``error`` in a thread; None withdraws one that is still pending."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


_watch: Final = _Watch()
os.register_at_fork(after_in_child=_watch.begin)
