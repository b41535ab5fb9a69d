"""Real SGLang servers that die, freeze, require a key, or get a thousand requests at once.

Run in the environment that holds SGLang: ``make test-sglang-server``.
"""

from __future__ import annotations

from typing import ClassVar

import psutil
from sglang_torch_cpu_server import launch_of

from drivetrain import EngineConfig
from drivetrain_conformance.harness.server_suite import Server
from server_faults import ServerFaults


class TestSGLangServer(ServerFaults):
    backend: ClassVar[str] = "sglang-server"

    def launch(self, config: EngineConfig, key: str | None) -> Server:
        # The server with a key streams increments; the suite's server streams everything so far.
        more = {} if key is None else {"api_key": key, "incremental_streaming_output": True}
        return Server(launch_of(config, **more))

    def engine_of(self, server: Server) -> psutil.Process:
        return next(one for one in server.process.children(recursive=True) if "scheduler" in one.name())
