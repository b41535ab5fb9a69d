"""Code that runs in SGLang's own processes, through its plugins, sampler backends and method hooks.

SGLang loads :func:`activate` in each process that it starts, through the entry-point group ``sglang.srt.plugins``.
Engines that drivetrain did not start are left unchanged.
"""

from __future__ import annotations

import os
from typing import Final

CHANNEL: Final = "DRIVETRAIN_SGLANG"
"""Environment variable, set by the backend for its engine's processes, with the name of the channel to it."""
_ALLOWED: Final = "SGLANG_PLUGINS"
"""Environment variable that restricts the plugins that SGLang loads."""
_NAME: Final = "drivetrain"
"""Name of the entry point."""


def invite(channel: str) -> None:
    """Set environment variables so that the engine's processes load this plugin and connect to ``channel``."""
    os.environ[CHANNEL] = channel
    allowed = os.environ.get(_ALLOWED)
    if allowed and _NAME not in allowed.split(","):
        os.environ[_ALLOWED] = f"{allowed},{_NAME}"


def activate() -> None:
    """Register the sampler and the hooks, in engines that drivetrain started."""
    if CHANNEL not in os.environ:
        return
    from drivetrain_sglang.in_engine import failed_requests, multimodal_hooks, sampler, scheduler_calls

    sampler.register()
    failed_requests.register()
    scheduler_calls.register()
    multimodal_hooks.register()
