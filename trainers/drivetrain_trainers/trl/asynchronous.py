"""Rollouts and weights of TRL's ``AsyncGRPOTrainer`` by an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from drivetrain.checks.extras import from_extra
from drivetrain.engine.states import EngineState
from drivetrain.errors import InvalidRequest
from drivetrain.synchronous import SyncEngine, sync_engine
from drivetrain_trainers.trl.async_weights import EngineWeights, Settings
from drivetrain_trainers.trl.policy_engine import EngineLike
from drivetrain_trainers.trl.support import refuse_release

if TYPE_CHECKING:
    from drivetrain_trainers.trl.async_worker import EngineRolloutWorker


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
