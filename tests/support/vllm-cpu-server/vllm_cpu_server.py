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
"""Arguments that the in-process backend wants of its engine, or that a command line spells otherwise."""


def launch_of(config: EngineConfig, **more: object) -> Launch:
    """How a server of this configuration is launched, with further arguments."""
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
        # The command vllm wants the distribution vllm, which the build for CPUs is not called.
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        arguments=plain | own | more,
        ready_path="/health",
        environment={
            "TORCHDYNAMO_DISABLE": "1",
            # Without it the worker is a process of its own, and each of the two spins while the other works: on two
            # cores nobody else then runs for as long as a request does.
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
        """Whether one could be launched with this folder; those of models with images were not looked at."""
        return super().can_serve(model) and "vision_config" not in json.loads((model / "config.json").read_text())

    def ready(self, server: Server) -> None:
        """Let a server go on whose engine was killed while it was paused."""
        with urlopen(Request(f"{server.endpoint}/resume", method="POST"), timeout=60):
            pass

    def launch(self, config: EngineConfig) -> Launch:
        """How a server of this configuration is launched."""
        return launch_of(config)
