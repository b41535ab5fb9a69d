"""What runs inside vLLM's own processes, by its public seams: a general plugin and a worker extension.

vLLM loads :func:`activate` in each process that it starts, through the entry-point group ``vllm.general_plugins``.
Engines that drivetrain did not start are left as they are.
"""

from __future__ import annotations

import os
from typing import Final

CHANNEL: Final = "DRIVETRAIN_VLLM"
"""Environment variable that the backend sets for the processes of its engine: the name of the channel to it."""
_ALLOWED: Final = "VLLM_PLUGINS"
"""Environment variable that names plugins: vLLM loads no others if it is set, and none if it is empty."""
_NAME: Final = "drivetrain"
"""Of the entry point."""


def invite(channel: str) -> None:
    """Have the processes of an engine, which take over this one's environment, load this plugin and connect."""
    os.environ[CHANNEL] = channel
    allowed = os.environ.get(_ALLOWED)
    if allowed is not None and _NAME not in allowed.split(","):
        os.environ[_ALLOWED] = ",".join(name for name in (allowed, _NAME) if name)


def activate() -> None:
    """Register the sampler, the ends of failed requests and the calls, in engines that drivetrain started."""
    if CHANNEL not in os.environ:
        return
    from drivetrain_vllm.in_engine import failed_requests, sampler, scheduler_calls, weight_layouts

    sampler.register()
    failed_requests.register()
    scheduler_calls.register()
    weight_layouts.register()
