"""SGLang servers on a CPU for the conformance suite."""

from __future__ import annotations

import sys
from typing import ClassVar, Final

from drivetrain.backend.toolkit.model_folder import config_levels, require_dense_for_adapters
from drivetrain.types.config import EngineConfig, Task
from drivetrain_conformance.harness.server_suite import Launch, ServerSuite, dtype_of, text_config
from drivetrain_sglang.translate import engine_arguments

_NOT_PLAIN: Final = ("skip_tokenizer_init", "incremental_streaming_output")
"""Arguments that the in-process backend sets but servers are mostly launched without."""


def launch_of(config: EngineConfig, **more: object) -> Launch:
    """Return the launch of a server with this configuration and further arguments."""
    require_dense_for_adapters(config, config_levels(config.model), "SGLang")
    text = text_config(config.model)
    arguments = engine_arguments(config, "cpu", dtype_of(text), int(str(text["max_position_embeddings"])))
    plain = {name: value for name, value in arguments.items() if name not in _NOT_PLAIN}
    return Launch(
        command=[sys.executable, "-m", "sglang.launch_server"],
        # The default publishes the number of running requests every fifteen steps, too rarely for the suite.
        arguments=plain | {"load_snapshot_publish_interval": 1} | more,
        ready_path="/ready",
        environment={"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )


class SGLangServerSuite(ServerSuite):
    """The suite of ``sglang-server``: ``drivetrain conformance sglang-server``."""

    backend: ClassVar[str] = "sglang-server"
    tasks: ClassVar[frozenset[Task]] = frozenset({Task.GENERATE, Task.EMBED})
    launched: ClassVar[tuple[str, ...]] = (
        *("model", "max_num_seqs", "enable_prefix_caching", "task", "weight_version"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    )

    def launch(self, config: EngineConfig) -> Launch:
        """Return the launch of a server with this configuration."""
        return launch_of(config)
