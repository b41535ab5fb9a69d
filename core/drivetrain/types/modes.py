"""Kinds of engine memory, what pausing does to requests in flight, and how turns of a session relate."""

from __future__ import annotations

from enum import Enum


class MemoryTag(Enum):
    """A kind of memory that ``sleep`` gives back and ``wake_up`` takes again."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class PauseMode(Enum):
    """What pausing does to the requests in flight. Requests that arrive while paused always wait."""

    ABORT = "abort"
    """They come back marked aborted, with the tokens so far."""
    IN_PLACE = "in_place"
    """They are frozen, and go on with the same cache."""
    RETRACT = "retract"
    """They are frozen and their cache is released; they go on with it recomputed by the current weights."""
    WAIT = "wait"
    """They run to their end before the pause returns."""


class TurnMode(Enum):
    """How a turn relates to an earlier one of its session."""

    CONTINUE = "continue"
    """It goes on from it."""
    BRANCH = "branch"
    """It goes on from it, beside others that do."""
    REPLACE = "replace"
    """It goes on from it, in place of all that followed it until now."""
