"""Numbers that tell what an engine has done: samples and tokens, and seconds in states that hold requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from drivetrain.backend.base import GenerateRequest, TokenDelta
from drivetrain.engine.states import EngineState, EngineStatus, WeightState
from drivetrain.types.outputs import FinishReason

FAILED: Final = "error"
"""Finish reason of a sample that ended with an exception; the other reasons are :class:`FinishReason`'s."""
_OVER: Final = (EngineState.FAILED, EngineState.CLOSED)


class SampleEnd:
    """The end of one sample; empty until then."""

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.cached_tokens = 0

    def set(self, reason: FinishReason, cached_tokens: int) -> None:
        """Record the finish reason, and the number of prompt tokens that the prefix cache had."""
        self.reason, self.cached_tokens = reason, cached_tokens


class SampleCounts:
    """Samples and tokens that this ``InferenceEngine`` has asked for. No number ever falls."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter(dict.fromkeys([*(reason.value for reason in FinishReason), FAILED], 0))
        """Samples that ended, by finish reason; ``error``: with an exception."""
        self.prompt_tokens = 0
        """Tokens of the prompts that the backend was given, once per sample and retry."""
        self.cached_tokens = 0
        """Tokens of these that the prefix cache had; known at the end of a sample."""
        self.generated_tokens = 0
        """Tokens that the backend has sampled, those behind a stop string included."""

    @contextmanager
    def sample(self) -> Iterator[SampleEnd]:
        """Count one sample when it ends; one whose caller left was aborted."""
        end, reason = SampleEnd(), FAILED
        try:
            yield end
        except (asyncio.CancelledError, GeneratorExit):
            reason = FinishReason.ABORT.value
            raise
        finally:
            self.ended[reason if end.reason is None else end.reason.value] += 1
            self.cached_tokens += end.cached_tokens

    def entered(self, request: GenerateRequest) -> None:
        """Count the prompt of a sample that the backend is given."""
        self.prompt_tokens += len(request.prompt_token_ids)

    def step(self, delta: TokenDelta, before: int = 0) -> int:
        """Count one step of a sample that had ``before`` tokens counted; return its new count."""
        now = before + len(delta.token_ids)
        if delta.result is not None:
            now = max(now, len(delta.result.token_ids))
        self.generated_tokens += now - before
        return now


class Stretch:
    """A condition's count and total seconds, such as those of pauses."""

    def __init__(self) -> None:
        self.times = 0
        """Number of times that the condition began."""
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Total seconds, up to now if the condition holds."""
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    def look(self, lasts: bool) -> bool:
        """Record whether the condition holds; return True if it has just ended."""
        if lasts and self._since is None:
            self.times += 1
            self._since = time.monotonic()
        elif not lasts and self._since is not None:
            self._seconds, self._since = self.seconds, None
            return True
        return False


class StateTimes:
    """Counts and times of the pauses, sleeps and weight updates that this ``InferenceEngine`` saw. They never fall."""

    def __init__(self) -> None:
        self.paused = Stretch()
        self.asleep = Stretch()
        self.updating = Stretch()
        self.failed_updates = 0
        """Updates that ended without a commit; :attr:`EngineStatus.updates` counts the others."""
        self._updates = 0

    def look(self, status: EngineStatus) -> None:
        """Count and time the states that a new status begins or ends."""
        lives = status.state not in _OVER
        self.paused.look(lives and status.paused is not None)
        self.asleep.look(lives and bool(status.asleep))
        updating = lives and status.weights is WeightState.UPDATING
        if self.updating.look(updating) and status.updates == self._updates:
            self.failed_updates += 1
        self._updates = status.updates
