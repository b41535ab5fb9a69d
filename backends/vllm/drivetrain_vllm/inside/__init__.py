"""What runs inside vLLM's own processes, by its public seams: a general plugin and a worker extension.

vLLM loads :func:`activate` in each process that it starts, through the entry-point group ``vllm.general_plugins``.
Engines that drivetrain did not start are left as they are.
"""

from __future__ import annotations

import os
from typing import Final

CHANNEL: Final = "DRIVETRAIN_VLLM"
"""Environment variable that the backend sets for the processes of its engine: the name of the channel to it."""


def activate() -> None:
    """Register the sampler and the calls, in engines that drivetrain started."""
    if CHANNEL not in os.environ:
        return
    from drivetrain_vllm.inside import control, layouts, sampling

    sampling.register()
    control.register()
    layouts.register()
