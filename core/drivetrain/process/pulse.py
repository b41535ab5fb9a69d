"""Signs of life between the holders of an engine and its owner, from threads: event loops may be blocked for minutes.

A holder sends a byte on a socket of its own in each period, and the owner sends it back. Whichever end hears nothing
for its patience counts the other as gone.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_BEAT: Final = b"\x01"
_TICK_S: Final = 0.25
_MOST: Final = 4096


class PulseSocket(Protocol):
    """A non-blocking socket."""

    def fileno(self) -> int: ...

    def recv(self, most: int, /) -> bytes: ...

    def send(self, data: bytes, /) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Watched:
    socket: PulseSocket
    patience: float
    on_lost: Callable[[str], None]
    silent: float = 0.0
    """Seconds since the last byte."""
    is_new: bool = True
    """No byte was read yet: the first bytes may wait where a poll does not see them."""


class PulseWatch(threading.Thread):
    """The owner's side: answers the pulses of all holders, and reports those that stop."""

    def __init__(self) -> None:
        super().__init__(name="drivetrain-pulses", daemon=True)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._ended = threading.Event()

    def add(
        self, pulse: PulseSocket, patience: float, on_lost: Callable[[str], None], *, has_beaten: bool = False
    ) -> None:
        """Watch a non-blocking socket.

        Args:
            pulse: The socket.
            patience: Seconds of silence after which the holder counts as gone.
            on_lost: Called in this thread with the reason, once.
            has_beaten: A beat was read already, together with ``Attach``; answer it.
        """
        if has_beaten:
            with contextlib.suppress(OSError):  # the thread will find the socket closed
                pulse.send(_BEAT)
        with self._lock:
            self._watched[pulse.fileno()] = _Watched(pulse, patience, on_lost)

    def stop(self) -> None:
        """End the thread and close all sockets."""
        self._ended.set()
        self.join()
        for watched in self._watched.values():
            watched.socket.close()
        self._watched.clear()

    def run(self) -> None:
        """Answer until :meth:`stop`."""
        now = time.monotonic()
        while not self._ended.is_set():
            with self._lock:
                watched = dict(self._watched)
            poll = select.poll()
            for fd in watched:
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(1000 * _TICK_S)}
            before, now = now, time.monotonic()
            passed = min(now - before, 2 * _TICK_S)  # capped: this machine may have been paused
            for fd, one in watched.items():
                reason = self._heard(one) if fd in ready or one.is_new else self._silent(one, passed)
                if reason:
                    with self._lock:
                        del self._watched[fd]
                    one.socket.close()
                    one.on_lost(reason)

    def _heard(self, one: _Watched) -> str:
        one.is_new = False
        try:
            data = one.socket.recv(_MOST)
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"lost its pulse: {error}"
        if not data:
            return "closed its pulse"
        one.silent = 0.0
        try:
            one.socket.send(_BEAT)
        except BlockingIOError:
            return ""  # it does not read, and its own patience will end
        except OSError as error:
            return f"lost its pulse: {error}"
        return ""

    def _silent(self, one: _Watched, passed: float) -> str:
        one.silent += passed
        if one.silent <= one.patience:
            return ""
        return f"gave no sign of life for {one.patience:g} s (timeouts.heartbeat of the engine)"


class Pulse(threading.Thread):
    """A holder's side: beats, and reports an owner that does not answer.

    Args:
        pulse: A connected socket, which this thread closes.
        period: Seconds between beats.
        patience: Seconds without an answer after which the owner counts as gone.
        on_lost: Called in this thread with the reason, at most once, and not after :meth:`stop`.
    """

    def __init__(self, pulse: socket.socket, period: float, patience: float, on_lost: Callable[[str], None]) -> None:
        super().__init__(name="drivetrain-pulse", daemon=True)
        self._socket = pulse
        self._period = period
        self._patience = patience
        self._on_lost = on_lost
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        with contextlib.suppress(OSError):
            # Not the shutdown of a TLS socket, which takes its state away from the thread that reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self.join()

    def run(self) -> None:
        """Beat until :meth:`stop`, or until the owner is gone."""
        reason = ""
        self._socket.settimeout(self._patience)
        try:
            while not reason and not self._ended.is_set():
                self._socket.sendall(_BEAT)
                if not self._socket.recv(_MOST):
                    reason = "closed the connection"
                self._ended.wait(self._period)
        except TimeoutError:
            reason = f"gave no sign of life for {self._patience:g} s (timeouts.heartbeat)"
        except OSError as error:
            reason = f"lost the connection: {error}"
        finally:
            self._socket.close()
        if reason and not self._ended.is_set():
            self._on_lost(reason)
