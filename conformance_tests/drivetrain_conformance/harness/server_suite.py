"""Suites for backends that connect to a server: each configuration gets a server that was launched with it."""

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
from drivetrain.process.host_log import with_end_of_log
from drivetrain.process.process_tree import runs
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig, Task
from drivetrain_conformance.harness.suite import Suite

START_S: Final = 300.0
_AT_ONCE: Final = 3
"""Servers kept running, unless a case needs more at once: each takes up to 3.5 GB."""
_WITHOUT_A_SERVER: Final = frozenset({EngineState.CREATED, EngineState.FAILED, EngineState.CLOSED})


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and environment that launch a server."""

    command: Sequence[str]
    """Without host and port, which are appended as ``--host`` and ``--port``."""
    arguments: Mapping[str, object]
    """Options by name, with underscores: True is a bare flag, False is left out, a list is passed as several values."""
    ready_path: str
    """Path that answers with status 200 once the server is ready."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""

    @property
    def key(self) -> str:
        """Key that is equal for equal launches."""
        return json.dumps([list(self.command), dict(self.arguments), dict(self.environment)], sort_keys=True)


class Server:
    """One server, started outside this process's tree so that it is not mistaken for a process that an engine left."""

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
        """True while the server's process runs."""
        return runs(self.process)

    def _wait(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self.is_alive:
            try:
                with urlopen(self._ready, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.25)
        log = self._log.read_text(errors="replace").splitlines()
        self.stop()
        raise RuntimeError(with_end_of_log("the server did not start", log))

    def connected(self, engine: InferenceEngine) -> None:
        """Record an engine that connects to this server."""
        self._engines.add(engine)

    @property
    def is_needed(self) -> bool:
        """True while an engine connected to this server is neither closed nor failed."""
        return any(engine.state not in _WITHOUT_A_SERVER for engine in self._engines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and all its descendants."""
        for process in self._family():
            if process.is_running():
                process.send_signal(number)

    def _family(self) -> list[psutil.Process]:
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Kill the server and all its descendants."""
        family = self._family()
        self.signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)


class Servers:
    """Running servers by launch. To make room, servers that no engine needs are stopped, oldest first."""

    def __init__(self) -> None:
        self._running: dict[str, Server] = {}
        atexit.register(self.close)

    def get(self, launch: Launch) -> Server:
        """Return a live server with this launch, starting one if necessary."""
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
        """Stop all servers."""
        while self._running:
            self._running.popitem()[1].stop()


SERVERS: Final = Servers()


class ServerSuite(Suite):
    """The suite of a backend that connects to a server. A subclass defines how to launch one."""

    launched: ClassVar[tuple[str, ...]]
    """Configuration fields that need a server launched with them; only the backend sees the other fields."""
    tasks: ClassVar[frozenset[Task]]
    """Tasks that this engine's servers can be launched for."""

    @abstractmethod
    def launch(self, config: EngineConfig) -> Launch:
        """Return the launch of a server with this configuration."""

    def can_serve(self, model: Path) -> bool:
        """Return True if a server can load this folder: it has a ``config.json``, and its weight files are intact."""
        try:
            for file in model.glob("*.safetensors"):
                with safe_open(file, framework="np"):
                    pass
        except SafetensorError:
            return False
        return (model / "config.json").is_file()

    def ready(self, server: Server) -> None:
        """Bring back a server whose engine process a case killed."""
        return None

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Connect an engine to a server launched with these fields, starting the server if there is none."""
        own: dict[str, object] = {"backend": self.backend, **self.fields, **fields}
        asked = EngineConfig.from_mapping(own)
        launched = {name: getattr(asked, name) for name in self.launched}
        # The backend refuses the unservable task or model by itself, so any server does.
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
    """Return the language model's section of a model folder's ``config.json``."""
    whole = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    found: dict[str, object] = whole.get("text_config") or whole
    return found


def dtype_of(config: Mapping[str, object]) -> str:
    """Return the checkpoint's dtype."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
