"""Programs and hosts in processes that are forked from one that has imported torch, transformers and drivetrain.

A new interpreter imports them for several seconds, and most tests of a program are not about its imports.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, ClassVar, Final, NoReturn

import pytest

from drivetrain.process.host_launcher import hosts_launched_by
from drivetrain_conformance.harness.fork_server import ForkedHost, ForkServer, serve_forks

_PRELOADED: Final = (
    "drivetrain.cli",
    "drivetrain_conformance.command",
    "drivetrain_conformance.cases",
    "drivetrain_demo.command",
    "drivetrain_serving.command",
    "drivetrain_transformers.scheduler_thread",
    "drivetrain_transformers.weights",
    "drivetrain_weight_sync",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)


_END: Final = "--"
"""Ends the list of a program's standard streams."""
_PYTHONPATH: Final = os.environ.get("PYTHONPATH", "")


class _Server(ForkServer):
    script: ClassVar[str] = __file__


@functools.cache
def server() -> ForkServer:
    """Start the server that all tests of this process share; at the next call, return it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _PYTHONPATH)  # a test may have changed it
        patch.setenv("OMP_NUM_THREADS", "1")  # threads of the imports would be lost at a fork
        started = _Server("transformers", program="python")
    atexit.register(started.close)
    return started.__enter__()


def start(
    arguments: Sequence[str],
    streams: Mapping[int, IO[bytes]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> ForkedHost:
    """Start a program.

    Args:
        arguments: Arguments as after ``python``: ``-c``, ``-m``, ``-`` or a file, and what follows it.
        streams: Its standard streams by number; output to others is the returned process's ``stdout``.
        env: Its environment; None: the present one.
        cwd: Its working folder; None: the present one.
    """
    given = [f"{number}={{{index}}}" for index, number in enumerate(streams)]
    literal = [one.replace("{", "{{").replace("}", "}}") for one in (str(cwd or Path.cwd()), *arguments)]
    fds = [stream.fileno() for stream in streams.values()]
    return server().start([*given, _END, *literal], os.environ if env is None else env, fds)


@contextmanager
def forked_hosts() -> Iterator[None]:
    """Fork the host processes of engines, instead of spawning them."""

    def launch(arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> ForkedHost:
        return server().start([_END, os.sep, "-m", "drivetrain.process", *arguments], environment, fds)

    with hosts_launched_by(launch):
        yield


def run(
    *arguments: str,
    text: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run([sys.executable, *arguments], text=True)`` does.

    Raises:
        subprocess.TimeoutExpired: It still ran after ``timeout`` seconds; it was killed.
    """
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write((text or "").encode())
        stdin.seek(0)
        process = start(arguments, {0: stdin, 1: stdout, 2: stderr}, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            process.stdout.close()
        out, err = (_whole(stream) for stream in (stdout, stderr))
    return subprocess.CompletedProcess([sys.executable, *arguments], code, out, err)


def _whole(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode()


class Program:
    """A running program, with what tests use of ``asyncio.subprocess.Process``."""

    def __init__(self, process: ForkedHost, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the program runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the program ends; return its exit code."""
        return await asyncio.to_thread(self._process.wait)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait until the program ends; return the rest of its output."""
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err


@asynccontextmanager
async def running(*arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Program]:
    """Run a program in the block; kill it at the end, if it still runs, even if it is stopped."""
    async with AsyncExitStack() as stack:
        (stdout, out), (stderr, err) = [await _pipe(stack) for _ in range(2)]
        process = start(arguments, {1: out, 2: err}, env=env)
        for ours in (process.stdout, out, err):
            ours.close()
        program = Program(process, stdout, stderr)
        try:
            yield program
        finally:
            if program.returncode is None:
                program.kill()
            await program.wait()


async def _pipe(stack: AsyncExitStack) -> tuple[asyncio.StreamReader, IO[bytes]]:
    """Make a pipe; return its two ends, of which the first is closed with ``stack``."""
    read, write = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
    )
    stack.callback(transport.close)
    return reader, os.fdopen(write, "wb")


# In the server -------------------------------------------------------------------------------------------------------


def _preload() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)


def _be_python(arguments: list[str]) -> NoReturn:
    """Run a program as an interpreter does, and exit without taking torch apart, which lasts a second."""
    code: object = 0
    try:
        _run_program(arguments)
    except SystemExit as exit_:
        code = exit_.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run_program(arguments: list[str]) -> None:
    end = arguments.index(_END)
    for number, _, fd in (given.partition("=") for given in arguments[:end]):
        os.dup2(int(fd), int(number))
        os.close(int(fd))
    folder, *program = arguments[end + 1 :]
    os.chdir(folder)
    added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in added if path not in sys.path]
    kind, *rest = program
    sys.path.insert(0, folder if kind in ("-c", "-m", "-") else str(Path(kind).parent))
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind in ("-c", "-"):
        code = rest.pop(0) if kind == "-c" else sys.stdin.read()
        sys.argv = [kind, *rest]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv = program
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.exit(serve_forks(int(sys.argv[1]), _preload, _be_python))
