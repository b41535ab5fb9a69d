"""Real vLLM servers that die, freeze, require a key, or get a thousand requests at once.

Run in the environment that holds vLLM: ``make test-vllm-server``.
"""

from __future__ import annotations

from typing import ClassVar

import psutil
from vllm_cpu_server import launch_of

from drivetrain import EngineConfig
from drivetrain_conformance.harness.server_suite import Server
from server_faults import ServerFaults


class TestVLLMServer(ServerFaults):
    backend: ClassVar[str] = "vllm-server"
    layers: ClassVar[int] = 24

    def launch(self, config: EngineConfig, key: str | None) -> Server:
        return Server(launch_of(config, **({} if key is None else {"api_key": key})))

    def engine_of(self, server: Server) -> psutil.Process:
        return next(one for one in server.process.children(recursive=True) if "EngineCore" in one.name())
