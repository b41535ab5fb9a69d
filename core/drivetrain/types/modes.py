"""Enums for memory tags, pause modes and session turns."""

from __future__ import annotations

from enum import Enum


class MemoryTag(Enum):
    """A kind of memory that ``sleep`` frees and ``wake_up`` allocates again."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class PauseMode(Enum):
    """Effect of a pause on requests in flight. Requests that arrive during the pause always wait."""

    ABORT = "abort"
    """Requests return at once, marked aborted, with the tokens so far."""
    IN_PLACE = "in_place"
    """Requests are frozen and later continue with the same KV cache."""
    RETRACT = "retract"
    """Requests are frozen and their KV cache is released; it is recomputed with the current weights when they
    continue."""
    WAIT = "wait"
    """Requests run to their end before the pause returns."""


class TurnMode(Enum):
    """How a turn of a session relates to the earlier turn that it continues."""

    CONTINUE = "continue"
    """Continue from that turn, or begin the session if none is named."""
    BRANCH = "branch"
    """Continue from that turn and keep its other later turns; an earlier turn must be named."""
    REPLACE = "replace"
    """Continue from that turn and discard its later turns."""
