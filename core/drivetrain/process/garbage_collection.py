"""The garbage collector of a process that answers many requests, and is drivetrain's alone."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_RARE: Final = (2_000, 500, 5)
"""Thresholds of ``gc.set_threshold``: objects that outlived one pass are looked at after a million new ones, net.

With Python's own, a pass over everything that was made since the start comes every few hundred requests.
"""


@contextmanager
def steady_garbage_collection(*, holds_model: bool) -> Generator[None, None, None]:
    """Until the end of the block, exempt the objects made so far, and collect old generations rarely.

    Args:
        holds_model: Keep Python's own thresholds: in this process, reference cycles may hold a model's tensors.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    if not holds_model:
        gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # otherwise the objects are not released at exit, and C++ modules report leaks
