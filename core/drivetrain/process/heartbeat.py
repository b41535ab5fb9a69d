"""The host's side of the watch: a thread that reports even while the engine blocks the event loop.

It sends heartbeats, detects processes of the engine that are gone or frozen, and kills the host and its descendants
when the trainer is gone.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import Final

import psutil

from drivetrain.process.frozen import is_frozen
from drivetrain.process.process_tree import end_own_family, ending, runs
from drivetrain.process.wire import Fatal, Heartbeat, frame

_TICK_S: Final = 0.25


class Watch(threading.Thread):
    """Sends a heartbeat every ``period`` seconds over the watch socket, until the process ends.

    A process of the engine that is stopped or frozen for longer than ``patience`` seconds counts as lost.
    """

    def __init__(self, watch_socket: socket.socket, period: float, patience: float) -> None:
        super().__init__(name="drivetrain-watch", daemon=True)
        self._socket = watch_socket
        self._socket.setblocking(False)
        self._period = period
        self._patience = patience
        self._trainer = os.getppid()
        self._unsent = b""
        self._ticks = 0
        self._needed: list[_Needed] | None = None
        self._fatal = ""

    def tick(self) -> None:
        """Count a turn of the event loop, which calls this a few times a second."""
        self._ticks += 1

    def engine_started(self, needed: Iterable[int] | None) -> None:
        """Start measuring the event loop's lag and watching these processes; None: all current children."""
        if needed is None:
            needed = [process.pid for process in psutil.Process().children(recursive=True)]
        self._needed = [_Needed(pid) for pid in needed]

    def engine_closing(self) -> None:
        """Stop watching processes; they may end from now on."""
        self._needed = None

    def engine_died(self, reason: str) -> None:
        """Report the death to the trainer, which kills this host; ``reason`` completes "the host process 123 …"."""
        self._fatal = self._fatal or reason

    def run(self) -> None:
        """Watch until the process ends."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        now = next_beat = time.monotonic()
        lag, seen, reported = 0.0, 0, False
        while True:
            # The trainer sends nothing here, so a readable socket means that it is gone.
            if poll.poll(1000 * min(_TICK_S, self._period)) or os.getppid() != self._trainer:
                _end_all()
            before, now = now, time.monotonic()
            needed = self._needed
            # Capped, so that a pause of the whole machine does not count as lag or as a frozen process.
            passed = min(now - before, 2 * _TICK_S)
            lag = lag + passed if needed is not None and seen == self._ticks else 0.0
            seen = self._ticks
            for process in needed or ():
                process.look(passed)
            lost = next((process for process in needed or () if process.ended or process.frozen > self._patience), None)
            # Checked again: it may have ended because the engine was just told to close.
            if lost is not None and self._needed is not None:
                limit = "" if lost.ended else f" (timeouts.heartbeat={self._patience:g})"
                self.engine_died(f"lost a process that its engine needs: {lost}{limit}")
            if self._fatal and not reported:
                self._send(Fatal(self._fatal))
                reported = True
            if now >= next_beat:
                next_beat = now + self._period
                self._send(Heartbeat(lag))

    def _send(self, message: Fatal | Heartbeat) -> None:
        if not self._unsent or isinstance(message, Fatal):
            self._unsent += b"".join(frame(message))
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return  # the trainer is stopped and does not read; the next beat tries again
        except OSError:
            _end_all()


class _Needed:
    """A process that the engine cannot live without."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.ended = False
        self.frozen = 0.0
        """Seconds for which the process has been stopped."""
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
            self._name = _title(self._process)
        except psutil.NoSuchProcess:
            self._process, self._name = None, "unknown"

    def look(self, passed: float) -> None:
        """Update the state after ``passed`` more seconds."""
        try:
            self.ended = self._process is None or not runs(self._process)
            frozen = self._process is not None and not self.ended and is_frozen(self._process)
        except psutil.NoSuchProcess:
            self.ended, frozen = True, False
        except (psutil.AccessDenied, OSError):  # for example, this process has no free file descriptor
            frozen = False
        self.frozen = self.frozen + passed if frozen else 0.0

    def __str__(self) -> str:
        how = _how(self._pid) if self.ended else f"has been stopped for {self.frozen:.1f} s"
        return f"process {self._pid} ({self._name}) {how}"


def _title(process: psutil.Process) -> str:
    """Return the process's title, which often contains its rank, or else the name of its program."""
    command = [part for part in process.cmdline() if part]
    return command[0] if len(command) == 1 else process.name()


def _how(pid: int) -> str:
    """Describe how it ended, if it is an unreaped child of this process."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "ended"
    if info is None:
        return "ended"
    return ending(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)


def _end_all() -> None:
    """Kill this host and its descendants: the trainer is gone and cannot ask for a clean end."""
    end_own_family()
    os._exit(1)
