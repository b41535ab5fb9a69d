"""vLLM servers on a CPU for the conformance suite."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final
from urllib.request import Request, urlopen

from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.sampling import LogprobsMode
from drivetrain_conformance.harness.server_suite import Launch, Server, ServerSuite, dtype_of, text_config
from drivetrain_vllm.translate import engine_arguments

_NOT_PLAIN: Final = ("worker_extension_cls", "disable_log_stats", "enable_prefix_caching", "enforce_eager")
"""Arguments that the in-process backend sets for itself, or that the command line spells differently."""


def launch_of(config: EngineConfig, **more: object) -> Launch:
    """Return the launch of a server with this configuration and further arguments."""
    text = text_config(config.model)
    arguments = engine_arguments(config, "cpu", dtype_of(text), int(str(text["max_position_embeddings"])))
    plain = {name: value for name, value in arguments.items() if name not in _NOT_PLAIN}
    mode = "raw" if config.logprobs_mode is LogprobsMode.RAW else "processed"
    own = {
        "enforce_eager": True,
        "enable_prefix_caching" if config.enable_prefix_caching else "no_enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "enable_scale_out": True,
        "logprobs_mode": f"{mode}_logprobs",
    }
    return Launch(
        # The command `vllm` needs the distribution `vllm`; the CPU build has another name.
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        arguments=plain | own | more,
        ready_path="/health",
        environment={
            "TORCHDYNAMO_DISABLE": "1",
            # 0: a separate worker process would busy-wait in turn with the server, and on two cores block everything
            # else during a request.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        },
    )


class VLLMServerSuite(ServerSuite):
    """The suite of ``vllm-server``: ``drivetrain conformance vllm-server``."""

    backend: ClassVar[str] = "vllm-server"
    elsewhere: ClassVar[tuple[Mapping[str, object], ...]] = ({"logprobs_mode": "processed"}, {"logprobs_mode": "raw"})
    layers: ClassVar[int | None] = 24
    tasks: ClassVar[frozenset[Task]] = frozenset(Task)
    launched: ClassVar[tuple[str, ...]] = (
        *("model", "max_num_seqs", "enable_prefix_caching", "task", "logprobs_mode"),
    )

    def can_serve(self, model: Path) -> bool:
        """Return True if a server can be launched with this folder; vision models are excluded as untested."""
        return super().can_serve(model) and "vision_config" not in json.loads((model / "config.json").read_text())

    def ready(self, server: Server) -> None:
        """Resume a server whose engine was killed while it was paused."""
        with urlopen(Request(f"{server.endpoint}/resume", method="POST"), timeout=60):
            pass

    def launch(self, config: EngineConfig) -> Launch:
        """Return the launch of a server with this configuration."""
        return launch_of(config)
