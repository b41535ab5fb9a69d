"""What runs inside SGLang's own processes, by its public seams: general plugins, sampler backends, method hooks.

SGLang loads :func:`activate` in each process that it starts, through the entry-point group ``sglang.srt.plugins``.
Engines that drivetrain did not start are left as they are.
"""

from __future__ import annotations

import os
from typing import Final

CHANNEL: Final = "DRIVETRAIN_SGLANG"
"""Environment variable that the backend sets for the processes of its engine: the name of the channel to it."""
_ALLOWED: Final = "SGLANG_PLUGINS"
"""Environment variable that names plugins: SGLang loads no others if it names any."""
_NAME: Final = "drivetrain"
"""Of the entry point."""


def invite(channel: str) -> None:
    """Have the processes of an engine, which take over this one's environment, load this plugin and connect."""
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
