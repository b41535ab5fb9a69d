"""The trainer's side of a host process: starting it, forwarding its log, watching it, killing it.

One thread per host does all of this. So a trainer whose event loop is busy with a training step neither misses a death
nor takes a healthy host for dead.
"""

from __future__ import annotations

import atexit
import getpass
import logging
import os
import selectors
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from drivetrain.backend.toolkit.launcher_variables import without_launcher_variables
from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.errors import WireError
from drivetrain.process.frozen import is_frozen
from drivetrain.process.host_launcher import launch
from drivetrain.process.host_log import HostLog
from drivetrain.process.host_python import cannot_run
from drivetrain.process.process_tree import (
    MARK,
    SCRATCH,
    ending,
    family,
    kill_family,
)
from drivetrain.process.shared_memory_files import SharedMemoryList, unlink_listed
from drivetrain.process.wire import Fatal, FrameReader, from_watch, read
from drivetrain.types.config import Timeouts

_logger = logging.getLogger("drivetrain.host")
_TICK_S: Final = 0.25
_LINE_LIMIT: Final = 16 * 1024
_GRACE_S: Final = 5.0
_SCRATCH: Final = "drivetrain-host-"


@dataclass(frozen=True, slots=True)
class Ending:
    """Reason and last output of a host process that ended."""

    reason: str
    """Completes "the host process 123 …", such as "was killed by SIGKILL"."""
    log: HostLog
    """The newest lines of its output."""


class HostProcess:
    """A running host process.

    ``on_end`` is called once, from the watching thread, when the host and all its descendants are gone, or were killed
    and the kernel keeps them: in a driver, or in a frozen control group of version 1.

    Raises:
        EngineStartError: The interpreter ``python`` cannot be run.
    """

    def __init__(self, python: str | None, timeouts: Timeouts, on_end: Callable[[Ending], None]) -> None:
        self._timeouts = timeouts
        self._on_end = on_end
        self._mark = uuid.uuid4().hex
        self._started = threading.Event()
        self._verdict = ""
        self._lock = threading.Lock()
        self._over = False
        self.log: Final = HostLog()
        """The newest lines that the host and its children printed."""
        self._partial_line = b""
        self.socket, theirs = socket.socketpair()
        self._watch_socket, watch_theirs = socket.socketpair()
        period = min(1.0, timeouts.heartbeat / 4)
        # A separate temporary folder, because engines leave files behind when they are killed. The host owns it too:
        # it may outlive this process for the time that its end takes.
        temporary = Path(tempfile.gettempdir())
        self._scratch = OwnedFolder(temporary, _SCRATCH)
        # In a thread, because the files of a killed engine may be many, and our caller may be an event loop.
        threading.Thread(
            target=remove_orphans, args=(temporary, _SCRATCH, unlink_listed), name="drivetrain-orphans", daemon=True
        ).start()
        arguments = ["--fd", "{0}", "--watch-fd", "{1}", "--period", str(period), "--patience", str(timeouts.heartbeat)]
        fds = [theirs.fileno(), watch_theirs.fileno()]
        self._since = time.time()
        self._shared_memory = SharedMemoryList(self._scratch.path, self._since)
        if self._scratch.lock is not None:
            fds.append(self._scratch.lock)  # the host keeps it open until it ends
        try:
            self._process = launch(python, arguments, _environment(self._mark, str(self._scratch.path)), fds)
        except OSError as error:
            self.socket.close()
            self._watch_socket.close()
            self._remove_scratch()
            raise cannot_run(python, error) from error
        finally:
            theirs.close()
            watch_theirs.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self.pid: int = self._process.pid
        _running.add(self)
        self._thread = threading.Thread(target=self._run, name=f"drivetrain-host-{self.pid}", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Record that ``start`` returned: from now on a silent host counts as dead.

        Before that, loading a library can hold the interpreter longer than any heartbeat interval. So until then only a
        stopped or frozen process counts as dead; the start's deadline covers the rest.
        """
        self._started.set()

    def condemn(self, reason: str) -> None:
        """Kill the host; ``reason`` completes "the host process 123 …". Thread-safe, and safe at any time."""
        with self._lock:
            if not self._over:
                self._verdict = self._verdict or reason
                # Wakes the watching thread, which kills the family while the host's children can still be found.
                self._watch_socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the watching thread to end, which happens right after ``on_end``."""
        self._thread.join()

    # The watching thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            kill_family(self.pid, self._mark, self._shared_memory.files(), self._since)
            try:
                how = ending(self._process.wait(_GRACE_S))
            except subprocess.TimeoutExpired:
                how = "was killed, and the kernel does not end it"
                self._verdict = self._verdict and f"{self._verdict}; it {how}"
            self._remove_scratch()
            self._read_log()
            with self._lock:
                self._over = True
                self._watch_socket.close()
                self._output.close()
            _running.discard(self)
            self._on_end(Ending(self._verdict or how, self.log))

    def _remove_scratch(self) -> None:
        self._scratch.remove_or_leave("the temporary folder of an engine's host")

    def _watch(self) -> None:
        """Return when the host ended or must be killed; in the latter case ``_verdict`` holds the reason."""
        frames = FrameReader()
        silent = 0.0
        now = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._watch_socket, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(_TICK_S)}
                if self._output in ready and not self._read_log():
                    selector.unregister(self._output)
                before, now = now, time.monotonic()
                # A late tick counts as two ticks at most: time in which our own process was stopped or starved is not
                # the host's silence.
                silent += min(now - before, 2 * _TICK_S)
                if self._watch_socket in ready:
                    data = self._watch_socket.recv(65536)
                    if not data:
                        self._ended_by_itself()
                        return
                    silent = 0.0
                    self._hear(frames, data)
                if silent > self._timeouts.heartbeat and (self._started.is_set() or self._is_stopped()):
                    self._verdict = self._verdict or (
                        f"was silent for {silent:.1f} s (timeouts.heartbeat={self._timeouts.heartbeat:g})"
                    )
                if self._verdict or self._process.poll() is not None:
                    return
                self._list_shared_memory()

    def _list_shared_memory(self) -> None:
        """List the files for the next engine on this machine, which finds them if this process is killed too."""
        try:
            self._shared_memory.look(lambda: family(self.pid, self._mark))
        except FileNotFoundError:
            pass  # the host has ended, and removed its folder
        except OSError as error:
            _logger.warning("shared memory of the host process %d would stay if all were killed: %s", self.pid, error)

    def _hear(self, frames: FrameReader, data: bytes) -> None:
        try:
            messages = [read(from_watch, payload) for payload in frames.feed(data)]
        except WireError as error:
            self._verdict = self._verdict or f"sent something else than heartbeats: {error}"
            return
        for message in messages:
            if isinstance(message, Fatal):
                self._verdict = self._verdict or message.message
            elif message.loop_lag > self._timeouts.event_loop:
                self._verdict = self._verdict or (
                    f"did not run its event loop for {message.loop_lag:.1f} s "
                    f"(timeouts.event_loop={self._timeouts.event_loop:g}); something in the engine blocks it"
                )

    def _ended_by_itself(self) -> None:
        """Wait until a host that closed its watch socket can be reaped; it usually closes by ending."""
        if self._verdict:
            return
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._verdict = self._verdict or "closed its watch socket"

    def _is_stopped(self) -> bool:
        try:
            return is_frozen(psutil.Process(self.pid))
        except (psutil.NoSuchProcess, OSError):
            return False

    def _read_log(self) -> bool:
        """Forward the available output; return False at its end."""
        for _ in range(16):  # bounded: endless printing must not delay heartbeats
            data = self._output.read(65536)
            if data is None:
                return True
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            if len(self._partial_line) > _LINE_LIMIT or not data:
                lines.append(self._partial_line)
                self._partial_line = b""
            for line in lines:
                text = line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1]
                if text:
                    self.log.add(text[:_LINE_LIMIT])
                    _logger.info("[%d] %s", self.pid, text)
            if not data:
                return False
        return True


def _environment(mark: str, scratch: str) -> dict[str, str]:
    """Return the host's environment: ours without a launcher's variables, the mark and a separate temporary folder."""
    # Compiled kernels stay cached across engines.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    ours = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **without_launcher_variables(os.environ)}
    return {**ours, MARK: mark, SCRATCH: scratch, "TMPDIR": scratch}


_running: Final[set[HostProcess]] = set()


def _kill_all() -> None:
    """Kill the hosts that were not closed when the interpreter exits."""
    hosts = list(_running)
    for host in hosts:
        host.condemn("was left behind by the trainer, which ended without closing the engine")
    for host in hosts:
        host.join()


atexit.register(_kill_all)
# A forked child, such as a data loader's worker, is not the parent of these processes and must not kill them.
os.register_at_fork(after_in_child=_running.clear)
