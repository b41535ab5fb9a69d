"""Servers for backends that connect to one: each configuration of a case is connected to a server launched with it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final
from urllib.error import URLError
from urllib.request import urlopen
from weakref import WeakSet

import psutil
from safetensors import SafetensorError, safe_open

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig, Task
from drivetrain_conformance.harness.suite import Suite

START_S: Final = 300.0
_AT_ONCE: Final = 3
"""Unless more are needed: a server takes up to 3.5 GB."""
_WITHOUT_A_SERVER: Final = frozenset({EngineState.CREATED, EngineState.FAILED, EngineState.CLOSED})


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is launched."""

    command: Sequence[str]
    """Without host and port, which follow it as ``--host`` and ``--port``."""
    arguments: Mapping[str, object]
    """By name, with underscores: True is a bare flag, False none, a list several values."""
    ready_path: str
    """What it answers with 200 once it serves."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""

    @property
    def key(self) -> str:
        """The same for launches that are the same."""
        return json.dumps([list(self.command), dict(self.arguments), dict(self.environment)], sort_keys=True)


class Server:
    """One server, no child of this process, so that nobody takes it for something that an engine left behind."""

    def __init__(self, launch: Launch) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-server-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self._ready = self.endpoint + launch.ready_path
        command = [*launch.command, "--host", "127.0.0.1", "--port", str(port)]
        for name, value in launch.arguments.items():
            flag = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            if value is not False:
                command += [flag] if value is True else [flag, *map(str, values)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(launch.environment)
        started = subprocess.run(
            ["sh", "-c", 'setsid "$@" >"$LOG" 2>&1 </dev/null & echo $!', "sh", *command],
            env=environment | {"LOG": str(self._log)},
            capture_output=True,
            text=True,
            check=True,
        )
        self.process = psutil.Process(int(started.stdout))
        self._engines: WeakSet[InferenceEngine] = WeakSet()
        self._wait()

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def _wait(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self.is_alive:
            try:
                with urlopen(self._ready, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.25)
        tail = self._log.read_text(errors="replace")[-4000:]
        self.stop()
        raise RuntimeError(f"the server did not start:\n{tail}")

    def connected(self, engine: InferenceEngine) -> None:
        """Note that an engine connects to it, or will."""
        self._engines.add(engine)

    @property
    def is_needed(self) -> bool:
        """Whether an engine that is connected to it was neither closed nor failed."""
        return any(engine.state not in _WITHOUT_A_SERVER for engine in self._engines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it started."""
        try:
            family = [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            if process.is_running():
                process.send_signal(number)

    def stop(self) -> None:
        """End it with all that it started."""
        try:
            family = [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        self.signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)


class Servers:
    """The servers of this process by their launches; of those that no engine needs, the oldest gives way."""

    def __init__(self) -> None:
        self._running: dict[str, Server] = {}
        atexit.register(self.close)

    def get(self, launch: Launch) -> Server:
        """A server that was launched so, and is alive."""
        server = self._running.pop(launch.key, None)
        if server is not None and not server.is_alive:
            server.stop()
            server = None
        if server is None:
            idle = [key for key, running in self._running.items() if not running.is_needed]
            for key in idle[: max(0, len(self._running) - _AT_ONCE + 1)]:
                self._running.pop(key).stop()
            server = Server(launch)
        self._running[launch.key] = server
        return server

    def close(self) -> None:
        """Stop all of them."""
        while self._running:
            self._running.popitem()[1].stop()


SERVERS: Final = Servers()


class ServerSuite(Suite):
    """The suite of a backend that connects to a server. A subclass says how one is launched."""

    launched: ClassVar[tuple[str, ...]]
    """Fields for which a server of their own is launched; the others are looked at by the backend alone."""
    tasks: ClassVar[frozenset[Task]]
    """What servers of this engine can be launched for."""

    @abstractmethod
    def launch(self, config: EngineConfig) -> Launch:
        """How a server of this configuration is launched."""

    def can_serve(self, model: Path) -> bool:
        """Whether one could be launched with this folder: a configuration, and files of weights that are whole."""
        try:
            for file in model.glob("*.safetensors"):
                with safe_open(file, framework="np"):
                    pass
        except SafetensorError:
            return False
        return (model / "config.json").is_file()

    def ready(self, server: Server) -> None:
        """Make a server serve that a case left otherwise, because its engine was killed."""
        return None

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Launch a server, unless there is one that was launched so, and connect to it."""
        own: dict[str, object] = {"backend": self.backend, **self.fields, **fields}
        asked = EngineConfig.from_mapping(own)
        launched = {name: getattr(asked, name) for name in self.launched}
        # What no server can be launched for is refused, whatever the server is.
        if asked.task not in self.tasks:
            launched |= {"task": Task.GENERATE, "model": str(tiny_model("qwen2"))}
        if not self.can_serve(Path(asked.model)):
            launched["model"] = str(tiny_model("qwen2"))
        config = EngineConfig.from_mapping({"backend": self.backend, **launched})
        server = SERVERS.get(self.launch(config))
        self.ready(server)
        own["endpoint"] = server.endpoint
        if self.isolation is not None:
            own["isolation"] = self.isolation
        engine = create_engine(own)
        server.connected(engine)
        return engine


def text_config(model: str) -> dict[str, object]:
    """What the ``config.json`` of a model's folder says of the language model."""
    whole = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    found: dict[str, object] = whole.get("text_config") or whole
    return found


def dtype_of(config: Mapping[str, object]) -> str:
    """The checkpoint's type."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


__all__ = ["SERVERS", "Launch", "Server", "ServerSuite", "Servers", "dtype_of", "text_config"]
