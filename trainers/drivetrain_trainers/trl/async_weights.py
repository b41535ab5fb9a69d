"""Settings of TRL's ``AsyncGRPOTrainer`` that are read, and its transfer of weights by pushes to an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from drivetrain.engine.states import EngineState
from drivetrain.synchronous import SyncEngine
from drivetrain_weight_sync import WeightSync

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Settings(Protocol):
    """The part of ``AsyncGRPOConfig`` that is read."""

    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    max_inflight_tasks: int
    queue_maxsize: int
    chat_template_kwargs: dict[str, Any] | None
    max_tool_calling_iterations: int | None
    log_completions: bool
    num_completions_to_print: int | None
    fork_threshold_tokens: int
    token_budget: int | None


class EngineWeights:
    """TRL's ``WeightTransferProtocol``: each set of weights that the trainer sends is pushed to the engine.

    The engine pauses by itself, for the moment in which the weights change; requests in flight go on with the new ones.

    Args:
        engine: The engine.
        cast: Round the policy's weights to the engine's dtype.
    """

    def __init__(self, engine: SyncEngine, cast: bool) -> None:
        self._engine = engine
        self._coming: NamedTensors = iter(())
        self._sync: WeightSync | None = None
        self._cast = cast
        self.version = 0
        """TRL's number of the weights that were sent last; the engine's weight version is this number as text."""

    def init_weight_transfer(self) -> None:
        """Start the engine, if it was not started."""
        if self._engine.state is EngineState.CREATED:
            self._engine.start()

    def pause(self) -> None:
        """Do nothing: the push pauses the engine when every tensor is staged."""

    def send_weights(self, iterator: NamedTensors) -> None:
        """Push the weights as version ``str(version + 1)``.

        Raises:
            DrivetrainError: the errors of ``WeightSync.push``. All tensors are read all the same, because other ranks
                of the trainer may wait in the gather of each.
        """
        self._coming = iterator
        if self._sync is None:
            self._sync = WeightSync.connect(lambda: self._coming, self._engine.engine, cast=self._cast)
        try:
            self._engine.run(self._sync.push(version=str(self.version + 1)))
        finally:
            for _ in iterator:
                pass
        self.version += 1

    def resume(self) -> None:
        """Do nothing: the engine has gone on when the push returns."""

    def destroy(self) -> None:
        """Free the buffers and connections of pushes. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            self._engine.run(sync.close())
