"""Fork server: a process that has imported an engine and forks hosts, because imports take most of a start.

For runs that start many engines, such as the conformance suite. CUDA does not survive a fork, so on a GPU the imports
must leave it alone; those of vLLM do.
"""

from __future__ import annotations

import array
import gc
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final, Self

from drivetrain.errors import EngineStartError
from drivetrain.process.host_launcher import hosts_launched_by
from drivetrain.process.host_python import cannot_run

_MESSAGE: Final = 1 << 17
_STATUS: Final = "i"
_READY: Final = "ready"
CUDA_FILE: Final = "/dev/nvidia-uvm"
"""The file that CUDA opens when it starts; asking NVML does not open it."""


class Forks:
    """The client's side of a fork server's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def wait_until_ready(self) -> str:
        """Wait for the imports; return "", or why the server has ended."""
        said = self._socket.recv(_MESSAGE).decode()
        return "" if said == _READY else said or "it has ended"

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> ForkedHost:
        """Fork a host.

        Args:
            arguments: Arguments as after ``python -m drivetrain.process``; ``{0}`` stands for the first of ``fds``, and
                so on.
            environment: The host's complete environment.
            fds: File descriptors to pass to the host.

        Raises:
            OSError: The server has ended.
        """
        ours, stdout = os.pipe()
        status, ended = os.pipe()
        message = json.dumps([list(arguments), dict(environment)]).encode()
        try:
            with self._lock:
                socket.send_fds(self._socket, [message], [stdout, ended, *fds])
                answer = self._socket.recv(_MESSAGE)
            if not answer:
                raise BrokenPipeError("the fork server has ended")
        except OSError:
            os.close(ours)
            os.close(status)
            raise
        finally:
            os.close(stdout)
            os.close(ended)
        return ForkedHost(int(answer), ours, status)

    def close(self) -> None:
        """End the server; its running hosts end as well."""
        self._socket.close()


class ForkServer:
    """Context manager: while it is open, hosts on ``python`` are forked instead of spawned.

    Args:
        backend: Name of the backend that the hosts will serve; its ``preload`` runs once.
        python: Python executable of the environment; None: this one.
        program: Program of a forked process: ``host``, a host process, or ``command``, the ``drivetrain`` command line,
            whose hosts are forked as well.

    Raises:
        EngineStartError: The server does not start, or its imports start threads or CUDA, which a fork would lose.
    """

    script: ClassVar[str] = __file__
    """File that the server runs; it calls :func:`serve_forks`."""

    def __init__(self, backend: str, python: str | None = None, program: str = "host") -> None:
        self._python = python or sys.executable
        self._program = program
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As a script: the suite need not be importable where the engine is, and costs no import there.
        arguments = [self._python, "-u", "-P", "-X", "faulthandler", self.script]
        arguments += [str(theirs.fileno()), backend, program]
        try:
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        except OSError as error:
            ours.close()
            raise cannot_run(python, error) from error
        finally:
            theirs.close()
        self.pid: int = self._process.pid
        self._forks = Forks(ours)
        self._replacing = ExitStack()

    def __enter__(self) -> Self:
        if said := self._forks.wait_until_ready():
            self.close()
            raise EngineStartError(f"no fork server: {said} (exit code {self._process.returncode})")
        if self._program == "host":
            self._replacing.enter_context(hosts_launched_by(self.start, self._python))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; its running hosts end as well."""
        self._replacing.close()
        self._forks.close()
        self._process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> ForkedHost:
        """Fork a host, as :meth:`Forks.start` does."""
        return self._forks.start(arguments, environment, fds)


class ForkedHost:
    """Handle of a forked host, with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.stdout = io.FileIO(stdout, "rb")
        self._status = status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code in ``subprocess``'s convention; None while the host runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the host ends and return its exit code.

        Raises:
            subprocess.TimeoutExpired: The host still runs after ``timeout`` seconds.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("drivetrain.process", timeout or 0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = array.array(_STATUS, os.read(self._status, array.array(_STATUS).itemsize))
            # Empty if the server was killed; its hosts then end themselves.
            self.returncode = said[0] if said else -signal.SIGKILL
            os.close(self._status)
        return self.returncode


# In the server -------------------------------------------------------------------------------------------------------


def serve_forks(fd: int, preload: Callable[[], object], main: Callable[[list[str]], int]) -> int:
    """Run ``preload``, then fork a process that runs ``main`` for each message on ``fd``, until it closes."""
    connection = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    try:
        preload()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".encode()[:_MESSAGE])
        return 1
    if _uses_cuda():
        connection.send(b"the imports started CUDA, which does not survive a fork")
        return 1
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        running = f"the imports left {threads - 1} threads running"
        connection.send(f"{running}; with OMP_NUM_THREADS=1 there may be none".encode())
        return 1
    gc.collect()
    gc.freeze()
    connection.send(_READY.encode())
    ends: dict[int, tuple[int, int]] = {}
    """Children by pidfd: the pid, and the file descriptor to which the exit code is written."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in ends:
                    selector.unregister(key.fd)
                    _reap(key.fd, *ends.pop(key.fd))
                    continue
                message, fds, _, _ = socket.recv_fds(connection, _MESSAGE, 16)
                if not message:
                    gc.unfreeze()  # libraries report uncollected objects as leaks
                    return 0
                stdout, ended, *given = fds
                pid = os.fork()
                if pid == 0:
                    for other in (ended, *ends, *(end for _, end in ends.values())):
                        os.close(other)
                    selector.close()
                    connection.close()
                    return _be_host(message, stdout, given, main)
                for each in (stdout, *given):
                    os.close(each)
                pidfd = os.pidfd_open(pid)
                ends[pidfd] = pid, ended
                selector.register(pidfd, selectors.EVENT_READ)
                connection.send(str(pid).encode())


def _uses_cuda() -> bool:
    return any(os.path.realpath(descriptor) == CUDA_FILE for descriptor in Path("/proc/self/fd").iterdir())


def _reap(pidfd: int, pid: int, ended: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.write(ended, array.array(_STATUS, [os.waitstatus_to_exitcode(status)]).tobytes())
    os.close(ended)
    os.close(pidfd)


def _be_host(message: bytes, stdout: int, fds: list[int], main: Callable[[list[str]], int]) -> int:
    arguments, environment = json.loads(message)
    os.setsid()
    for fd in (1, 2):
        os.dup2(stdout, fd)
    os.close(stdout)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the host has its own temporary folder
    return main([argument.format(*fds) for argument in arguments])


def main() -> int:
    """Run the fork server. Arguments: a socket's file descriptor, a backend's name, and a program."""
    from drivetrain.backend.registry import load_backend
    from drivetrain.process.__main__ import main as host

    fd, backend, program = sys.argv[1:]
    programs: dict[str, Callable[[list[str]], int]] = {"host": host, "command": _command}
    return serve_forks(int(fd), lambda: load_backend(backend).preload(), programs[program])


def _command(arguments: list[str]) -> int:
    """Run the command line. A process below it, forked before it has threads, forks the hosts that it starts."""
    from drivetrain.cli import main as command
    from drivetrain.process.__main__ import main as host

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        return serve_forks(theirs.detach(), lambda: None, host)
    theirs.close()
    forks = Forks(ours)
    try:
        if said := forks.wait_until_ready():
            raise EngineStartError(f"no fork server below the command: {said}")
        with hosts_launched_by(forks.start):
            return command(arguments)
    finally:
        forks.close()
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
