"""Code that runs in SGLang's own processes, through its plugins, sampler backends and method hooks.

SGLang loads :func:`activate` in each process that it starts, through the entry-point group ``sglang.srt.plugins``.
Engines that drivetrain did not start are left unchanged.
"""

from __future__ import annotations

import os
from typing import Final

SOCKET_VARIABLE: Final = "DRIVETRAIN_SGLANG"
"""Environment variable that the backend sets for the engine's processes: the name of the socket to connect to."""
_ALLOWED: Final = "SGLANG_PLUGINS"
"""Environment variable that restricts the plugins that SGLang loads."""
_NAME: Final = "drivetrain"
"""Name of the entry point."""


def invite(socket_name: str) -> None:
    """Set environment variables so that the engine's processes load this plugin and connect to ``socket_name``."""
    os.environ[SOCKET_VARIABLE] = socket_name
    allowed = os.environ.get(_ALLOWED)
    if allowed and _NAME not in allowed.split(","):
        os.environ[_ALLOWED] = f"{allowed},{_NAME}"


def activate() -> None:
    """Register the sampler and the hooks, in engines that drivetrain started."""
    if SOCKET_VARIABLE not in os.environ:
        return
    from drivetrain_sglang.in_engine import (
        adapter_uses,
        expert_records,
        failed_requests,
        multimodal_hooks,
        prompt_scores,
        quantised_layers,
        sampler,
        scheduler_calls,
    )

    sampler.register()
    failed_requests.register()
    prompt_scores.register()
    expert_records.register()
    quantised_layers.register()
    scheduler_calls.register()
    multimodal_hooks.register()
    adapter_uses.register()
