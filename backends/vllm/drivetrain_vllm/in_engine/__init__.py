"""Code that runs in vLLM's own processes, through a general plugin and a worker extension.

vLLM loads :func:`activate` in each process that it starts, through the entry-point group ``vllm.general_plugins``.
Engines that drivetrain did not start are left unchanged.
"""

from __future__ import annotations

import os
from typing import Final

SOCKET_VARIABLE: Final = "DRIVETRAIN_VLLM"
"""Environment variable that the backend sets for the engine's processes: the name of the socket to connect to."""
_ALLOWED: Final = "VLLM_PLUGINS"
"""Environment variable that restricts the plugins that vLLM loads; empty, it allows none."""
_NAME: Final = "drivetrain"
"""Name of the entry point."""


def invite(socket_name: str) -> None:
    """Set environment variables so that the engine's processes load this plugin and connect to ``socket_name``."""
    os.environ[SOCKET_VARIABLE] = socket_name
    allowed = os.environ.get(_ALLOWED)
    if allowed is not None and _NAME not in allowed.split(","):
        os.environ[_ALLOWED] = ",".join(name for name in (allowed, _NAME) if name)


def activate() -> None:
    """Register the sampler and the other hooks, in engines that drivetrain started."""
    if SOCKET_VARIABLE not in os.environ:
        return
    from drivetrain_vllm.in_engine import (
        expert_records,
        failed_requests,
        prompt_scores,
        sampler,
        sampling_masks,
        scheduler_calls,
        vision_names,
        weight_layouts,
    )

    sampler.register()
    failed_requests.register()
    prompt_scores.register()
    sampling_masks.register()
    expert_records.register()
    scheduler_calls.register()
    vision_names.register()
    weight_layouts.register()
