"""SGLang servers on a CPU for the conformance suite: each configuration is connected to a server launched with it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from safetensors import SafetensorError, safe_open

from drivetrain.config import EngineConfig, Task
from drivetrain.create import create_engine
from drivetrain.engine import InferenceEngine
from drivetrain.testing import tiny_model
from drivetrain_conformance.suite import Suite
from drivetrain_sglang.translate import engine_arguments

START_S: Final = 180.0
_AT_ONCE: Final = 3
"""A server takes up to 3.5 GB; the engine that the suite keeps must not lose its own."""
_NOT_PLAIN: Final = ("skip_tokenizer_init", "incremental_streaming_output")
"""Arguments that the in-process backend wants of its engine, and that a server is mostly launched without."""


class Server:
    """One server, no child of this process, so that nobody takes it for something that an engine left behind."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-server-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        for name, value in arguments.items():
            flag = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            if value is not False:
                command += [flag] if value is True else [flag, *map(str, values)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        started = subprocess.run(
            ["sh", "-c", 'setsid "$@" >"$LOG" 2>&1 </dev/null & echo $!', "sh", *command],
            env=environment | {"LOG": str(self._log)},
            capture_output=True,
            text=True,
            check=True,
        )
        self.process = psutil.Process(int(started.stdout))
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
                with urlopen(f"{self.endpoint}/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.25)
        tail = self._log.read_text(errors="replace")[-4000:]
        self.stop()
        raise RuntimeError(f"the server did not start:\n{tail}")

    def stop(self) -> None:
        """End it with all that it started."""
        try:
            family = [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)


class Servers:
    """The servers of this process by their arguments; the one that was used longest ago gives way."""

    def __init__(self) -> None:
        self._running: dict[str, Server] = {}
        atexit.register(self.close)

    def get(self, arguments: Mapping[str, object]) -> Server:
        """A server that was launched with these arguments, and is alive."""
        key = json.dumps(dict(arguments), sort_keys=True)
        server = self._running.pop(key, None)
        if server is not None and not server.is_alive:
            server.stop()
            server = None
        if server is None:
            while len(self._running) >= _AT_ONCE:
                self._running.pop(next(iter(self._running))).stop()
            server = Server(arguments)
        self._running[key] = server
        return server

    def close(self) -> None:
        """Stop all of them."""
        while self._running:
            self._running.popitem()[1].stop()


SERVERS: Final = Servers()


def arguments_of(config: EngineConfig) -> dict[str, object]:
    """What a server of this configuration is launched with."""
    whole = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
    text = whole.get("text_config") or whole
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    arguments = engine_arguments(config, "cpu", dtype, int(text["max_position_embeddings"]))
    plain = {name: value for name, value in arguments.items() if name not in _NOT_PLAIN}
    # Without it the number of running requests is up to fifteen steps old, and the suite looks more closely.
    return plain | {"load_snapshot_publish_interval": 1}


class ServerSuite(Suite):
    """The suite of ``sglang-server``: ``drivetrain conformance sglang-server``."""

    backend: ClassVar[str] = "sglang-server"
    launched: ClassVar[tuple[str, ...]] = (
        *("model", "max_num_seqs", "enable_prefix_caching", "task", "weight_version"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    )
    """Fields for which a server of their own is launched; the others are looked at by the backend alone."""

    def open_engine(self, fields: Mapping[str, object]) -> InferenceEngine:
        """Launch a server, unless there is one that was launched so, and connect to it."""
        asked = EngineConfig.from_mapping({"backend": self.backend, **self.fields, **fields})
        launch = {name: getattr(asked, name) for name in self.launched}
        if asked.task is Task.REWARD:  # refused, whatever the server is
            launch |= {"task": Task.GENERATE, "model": str(tiny_model("qwen2"))}
        own: dict[str, object] = {"backend": self.backend, **self.fields, **fields}
        if not _can_be_served(Path(asked.model)):  # refused likewise
            launch["model"] = str(tiny_model("qwen2"))
        config = EngineConfig.from_mapping({"backend": self.backend, **launch})
        own["endpoint"] = SERVERS.get(arguments_of(config)).endpoint
        if self.isolation is not None:
            own["isolation"] = self.isolation
        return create_engine(own)


def _can_be_served(model: Path) -> bool:
    """Whether a server could be launched with it: a configuration, and files of weights that are whole."""
    try:
        for file in model.glob("*.safetensors"):
            with safe_open(file, framework="np"):
                pass
    except SafetensorError:
        return False
    return (model / "config.json").is_file()
