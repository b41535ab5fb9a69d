"""The suite of any backend through ``create_engine("remote")``: each engine runs in a ``drivetrain host``."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

import psutil
import yaml

from drivetrain.attached.engine import AttachedEngine
from drivetrain.attached.remote import remote_engine
from drivetrain.backend.base import Backend, EngineStats, ModelInfo
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.shared_state import shared_capabilities
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, EngineStartError, from_wire
from drivetrain.process.host_launcher import LaunchedHost
from drivetrain.process.host_log import with_end_of_log
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain_conformance.harness.fork_server import ForkServer
from drivetrain_conformance.harness.suite import Suite
from drivetrain_conformance.harness.verdict import KnownFailure
from drivetrain_conformance.references.oracle import Oracle

_READY: Final = "endpoint: "
_END_S: Final = 20.0
_MOST_WAITING: Final = 2
"""Hosts that wait for their engine to be started, or for an equal one."""
_ENDED: Final = frozenset({EngineState.FAILED, EngineState.CLOSED})


class EngineHost(Protocol):
    """A process with one engine, started and ready."""

    endpoint: str
    key: str

    @property
    def pid(self) -> int:
        """The process's id."""
        ...

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        ...

    def stop(self) -> None:
        """End the engine; idempotent."""


class Host:
    """One ``drivetrain host``, started and ready.

    Raises:
        DrivetrainError: The error that it printed before it ended.
    """

    def __init__(self, fields: Mapping[str, object], server: ForkServer | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-host-")
        self.key = secrets.token_hex(16)
        file = Path(self._folder.name, "engine.yaml")
        file.write_text(yaml.safe_dump(dict(fields)), encoding="utf-8")
        arguments = ["host", "--config", str(file), "--listen", "127.0.0.1:0"]
        environment = os.environ | {"DRIVETRAIN_KEY": self.key, "COLUMNS": "10000", "PYTHONUNBUFFERED": "1"}
        self._process = _launch(arguments, environment, server)
        self._stopping = threading.Lock()
        self._log: deque[str] = deque(maxlen=200)
        self.endpoint = self._read_endpoint()
        threading.Thread(target=self._drain, name="drivetrain-host-log", daemon=True).start()

    def _read_endpoint(self) -> str:
        output = self._process.stdout
        assert output is not None
        while line := output.readline().decode(errors="replace"):
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
            self._log.append(line.rstrip("\n"))
        self._process.wait(_END_S)
        self._folder.cleanup()
        for at, line in enumerate(self._log):
            kind, colon, message = line.partition(": ")
            if colon and kind.isidentifier() and kind[0].isupper():
                raise from_wire(kind, "\n".join([message, *list(self._log)[at + 1 :]]), {})
        raise EngineStartError(with_end_of_log("the host did not start", list(self._log)))

    def _drain(self) -> None:
        output = self._process.stdout
        assert output is not None
        while output.read(1 << 16):
            pass
        output.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process, and its engine with it; idempotent."""
        with self._stopping:
            if self.is_alive:
                for number in (signal.SIGCONT, signal.SIGTERM):  # a case may have frozen it
                    os.kill(self._process.pid, number)
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    os.kill(self._process.pid, signal.SIGKILL)
                    self._process.wait(_END_S)
            self._folder.cleanup()


class HostedPage(AttachedEngine):
    """The page of a host's engine; ``teardown`` ends the host, too."""

    host: EngineHost

    async def teardown(self) -> None:
        await super().teardown()
        await asyncio.to_thread(self.host.stop)


class _NotStarted(Backend):
    """A backend whose host did not start."""

    engine_distribution = "drivetrain"

    def __init__(self, config: EngineConfig, error: DrivetrainError) -> None:
        super().__init__(config)
        self._error = error

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        raise self._error

    async def close(self) -> None:
        """Close nothing."""

    async def stats(self) -> EngineStats:
        raise self._error


def _launch(arguments: Sequence[str], environment: Mapping[str, str], server: ForkServer | None) -> LaunchedHost:
    if server is not None:
        return server.start(arguments, environment, ())
    return subprocess.Popen(
        [sys.executable, "-m", "drivetrain", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
    )


_STARTS_BEFORE: Final = KnownFailure(
    "faults/a_host_killed_while_it_starts",
    reason="a remote engine was started before its page is made",
    issue="",  # intended: docs/how-to/handles.md
    error="AssertionError",
    message="it started, though its host was killed",
)


def _family(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


class RemoteSuite(Suite):
    """Another suite's backend, used from this process through a host.

    Args:
        inner: The suite of the backend.
        server: Forks hosts; None: each is started anew.
    """

    def __init__(self, inner: Suite, server: ForkServer | None) -> None:
        self._inner = inner
        self._server = server
        self._opened: list[tuple[dict[str, object], EngineHost, InferenceEngine]] = []
        """Hosts with their engines. One whose engine was never started serves the next engine with its fields."""
        vars(self).update(
            backend=inner.backend,
            profile=inner.profile,
            seed=inner.seed,
            layers=inner.layers,
            known_failures=(*inner.known_failures, _STARTS_BEFORE),
            elsewhere=inner.elsewhere,
        )

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Start a host with these fields, and make an engine that uses it; the host ends with that engine."""
        checked = self._checked(fields)
        own: dict[str, object] = {"backend": self.backend, **self._inner.fields, **fields}
        if self._inner.isolation is not None:
            own.setdefault("isolation", self._inner.isolation.value)
        plain = EngineConfig.from_mapping(own).model_dump(mode="json", exclude_unset=True)
        try:
            host = self._reusable(plain) or self._start_host(plain)
        except DrivetrainError as error:  # refused by the start, which is the host's
            return InferenceEngine(
                checked.config,
                _NotStarted(checked.config, error),
                capabilities=self.claims(fields),
                isolation=checked.isolation,
                versions=checked.versions,
            )
        engine = remote_engine({"endpoint": host.endpoint, "key": host.key}, HostedPage)
        engine.host = host
        self._opened.append((plain, host, engine))
        return engine

    def _start_host(self, fields: Mapping[str, object]) -> EngineHost:
        return Host(fields, self._server)

    def _checked(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Make the engine here without starting it: a wrong field is refused without a host."""
        return self._inner.open_engine(fields)

    def _reusable(self, plain: Mapping[str, object]) -> EngineHost | None:
        self._opened = [opened for opened in self._opened if opened[2].state not in _ENDED]
        waiting = [opened for opened in self._opened if opened[2].state is EngineState.CREATED]
        for opened in waiting:
            if opened[0] == plain and opened[1].is_alive:
                self._opened.remove(opened)
                return opened[1]
        for opened in waiting[: max(0, len(waiting) - _MOST_WAITING)]:
            self._opened.remove(opened)
            opened[1].stop()
        return None

    def claims(self, fields: Mapping[str, object]) -> frozenset[Capability]:
        """Return the engine's claims, for other processes."""
        engine = self._checked(fields)
        return shared_capabilities(type(engine.parts.backend), engine.config, engine.capabilities, engine.isolation)

    def isolation_of(self, fields: Mapping[str, object]) -> str:
        """Return "remote"."""
        return "remote"

    def own_processes(self) -> frozenset[int]:
        """Return the pids of hosts whose engines were never started, and of their children."""
        waiting = (host.pid for _, host, engine in self._opened if engine.state is EngineState.CREATED)
        return frozenset(chain.from_iterable(_family(pid) for pid in waiting))

    def oracle(self, model: Path) -> Oracle | None:
        """Return the backend's oracle."""
        return self._inner.oracle(model)

    def close(self) -> None:
        """End every host that still runs."""
        while self._opened:
            self._opened.pop()[1].stop()
