"""Start of the operating-system process of a host; a test run may replace how hosts of one Python are started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Final, Protocol

from drivetrain.process.host_python import command


class LaunchedHost(Protocol):
    """The parts of ``subprocess.Popen`` that are used of a host's process."""

    pid: int

    @property
    def stdout(self) -> IO[bytes] | None:
        """Unbuffered output of the process, standard error included."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""

    # Raises subprocess.TimeoutExpired after `timeout` seconds.
    def wait(self, timeout: float | None = None) -> int: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], LaunchedHost]
"""Starts a host: arguments of ``python -m drivetrain.process`` with ``{0}``, ``{1}`` … for the file descriptors; the
whole environment; the file descriptors. Raises OSError if it cannot."""

_replaced: Final[dict[str, Launch]] = {}


def launch(
    python: str | None, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> LaunchedHost:
    """Start a host on ``python``; None: this one."""
    replaced = _replaced.get(python or sys.executable)
    if replaced is not None:
        return replaced(arguments, environment, fds)
    return subprocess.Popen(
        command(python, *(argument.format(*fds) for argument in arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=environment,
        pass_fds=fds,
        start_new_session=True,
    )


@contextmanager
def hosts_launched_by(launch: Launch, python: str | None = None) -> Iterator[None]:
    """Start hosts on ``python`` by ``launch`` while the context is open."""
    key = python or sys.executable
    _replaced[key] = launch
    try:
        yield
    finally:
        del _replaced[key]
