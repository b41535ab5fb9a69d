"""What runs inside SGLang's own processes, by its public seams: general plugins, sampler backends, method hooks.

SGLang loads :func:`activate` in each process that it starts, through the entry-point group ``sglang.srt.plugins``.
Engines that drivetrain did not start are left as they are.
"""

from __future__ import annotations

import os
from typing import Final

CHANNEL: Final = "DRIVETRAIN_SGLANG"
"""Environment variable that the backend sets for the processes of its engine: the name of the channel to it."""


def activate() -> None:
    """Register the sampler and the hooks, in engines that drivetrain started."""
    if CHANNEL not in os.environ:
        return
    from drivetrain_sglang.inside import control, images, sampling

    sampling.register()
    control.register()
    images.register()
