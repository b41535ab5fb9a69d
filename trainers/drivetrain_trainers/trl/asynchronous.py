"""Rollouts and weights of TRL's ``AsyncGRPOTrainer`` by an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from drivetrain.checks.extras import from_extra
from drivetrain.engine.states import EngineState
from drivetrain.errors import InvalidRequest
from drivetrain.synchronous import SyncEngine, sync_engine
from drivetrain_trainers.trl.policy_engine import EngineLike
from drivetrain_trainers.trl.support import refuse_release
from drivetrain_weight_sync import WeightSync

if TYPE_CHECKING:
    from drivetrain_trainers.trl.async_worker import EngineRolloutWorker

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
        """Free what was made for pushing. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            self._engine.run(sync.close())


class AsyncRollouts:
    """An engine for an ``AsyncGRPOTrainer``. Made by :func:`async_rollouts`."""

    def __init__(self, engine: SyncEngine, owned: bool, cast: bool) -> None:
        self.engine = engine
        """The engine."""
        self.weights = EngineWeights(engine, cast)
        """For ``AsyncGRPOTrainer(weight_transfer=…)``."""
        self._owned = owned

    def worker(
        self,
        args: Settings,
        *,
        train_dataset: object,
        processing_class: Any,
        reward_funcs: Callable[..., list[float]] | Sequence[Callable[..., list[float]]] = (),
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: object = None,
    ) -> EngineRolloutWorker:
        """Return a value for ``AsyncGRPOTrainer(rollout_worker=…)``.

        It is TRL's own worker, whose turns the engine generates. It runs in a process of its own, so reward
        functions and tools must be picklable.

        Args:
            args: The trainer's ``AsyncGRPOConfig``, with a ``token_budget``.
            train_dataset: As for the trainer.
            processing_class: The policy's tokenizer.
            reward_funcs: As for the trainer, which does not call them itself.
            tools: As for the trainer.
            environment_factory: As for the trainer.

        Raises:
            InvalidRequest: ``token_budget`` is missing; or a generation setting cannot be honoured.
            UnsupportedCapability: TRL is a release whose worker is another.
        """
        if args.token_budget is None:
            raise InvalidRequest(
                "token_budget=None: TRL would ask a server of vLLM's for it; set it to the most tokens of a row, at "
                "least those of a prompt with its completion",
                field="token_budget",
            )
        with from_extra("trl", "drivetrain_trainers.trl"):
            from trl.experimental.async_grpo import async_rollout_worker  # pyright: ignore[reportMissingImports]
        for name in ("_AsyncRolloutLoop", "AsyncRolloutWorker"):
            if not hasattr(async_rollout_worker, name):
                refuse_release(f"its async_rollout_worker has no {name}")
        from drivetrain_trainers.trl.async_worker import EngineRolloutWorker

        return EngineRolloutWorker(
            self.engine,
            self.weights,
            args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            reward_funcs=[reward_funcs] if callable(reward_funcs) else list(reward_funcs),
            tools=None if tools is None else list(tools),
            environment_factory=environment_factory,
        )

    def close(self) -> None:
        """Stop the engine unless it is the caller's. Idempotent."""
        try:
            if self.engine.state is not EngineState.CLOSED:
                self.weights.destroy()
        finally:
            if self._owned:
                self.engine.teardown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def async_rollouts(engine: EngineLike, *, cast: bool = False, **fields: object) -> AsyncRollouts:
    """Make the two parts that TRL's ``AsyncGRPOTrainer`` takes: a rollout worker, and the transfer of weights to it.

    The engine is started when training begins, on the trainer's main process. TRL numbers the weights that it sends
    from 1 on; the number, as text, is the engine's weight version.

    Args:
        engine: As for :func:`rollout`.
        cast: As for :func:`rollout`.
        fields: Fields of the engine's configuration, such as ``model``.

    Raises:
        InvalidRequest: ``fields`` are given beside an engine or a handle.
        DrivetrainError: the errors of :func:`create_engine`.
    """
    if isinstance(engine, SyncEngine):
        if fields:
            field = next(iter(fields))
            raise InvalidRequest(f"{field}: the engine has its configuration already; leave {field} out", field=field)
        return AsyncRollouts(engine, owned=False, cast=cast)
    return AsyncRollouts(sync_engine(engine, **fields), owned=True, cast=cast)


__all__ = ["AsyncRollouts", "EngineWeights", "async_rollouts"]
