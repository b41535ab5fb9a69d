# pyright: reportMissingImports=false
"""TRL's worker of asynchronous rollouts, whose turns an engine generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.errors import EngineDied, EngineStateError
from drivetrain.synchronous import SyncEngine
from drivetrain.types.handle import EngineHandle
from drivetrain.types.outputs import FinishReason
from drivetrain.types.sampling import SamplingParams
from drivetrain_trainers.trl.async_weights import EngineWeights, Settings
from drivetrain_trainers.trl.sampling import GenerationSettings, sampling_params

_TELL_S: Final = 10.0
"""Seconds for the worker's process to notice that it is to stop."""
_patching: Final = threading.Lock()


class EngineRolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # TRL has no types
    """TRL's loop over prompts, tools and rewards, in the worker's process.

    Args:
        handle: The engine.
        params: The sampling params of each turn.
        arguments: TRL's own.
    """

    def __init__(self, *, handle: EngineHandle, params: SamplingParams, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._handle = handle
        self._params = params
        self._engine: AttachedEngine | None = None

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        self._engine = await attach(self._handle)
        try:
            await super()._run_loops(stop_event=stop_event)
        finally:
            await self._engine.teardown()

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        assert self._engine is not None
        (completion,) = (await self._engine.generate([list(prompt_ids)], self._params)).completions
        if completion.finish_reason is FinishReason.ABORT:
            raise EngineStateError("a rollout's request was aborted; do not abort or sleep the engine while it trains")
        return completion.token_ids, completion.logprobs or []


class EngineRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """TRL's ``RolloutWorkerProtocol``. Made by :meth:`AsyncRollouts.worker`."""

    _loop_cls = EngineRolloutLoop

    def __init__(
        self, engine: SyncEngine, weights: EngineWeights, args: Settings, *, processing_class: Any, **more: Any
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._args = args
        self._params(())  # refuse settings that cannot be honoured now, not when training begins
        with _vllm_not_needed():
            super().__init__(
                queue_maxsize=args.queue_maxsize,
                model_name=engine.config.model,
                dataset=more.pop("train_dataset"),
                processing_class=processing_class,
                num_generations=args.num_generations,
                max_tokens=args.max_completion_length,
                chat_template_kwargs=args.chat_template_kwargs,
                max_tool_calling_iterations=args.max_tool_calling_iterations,
                log_completions=args.log_completions,
                num_completions_to_print=args.num_completions_to_print,
                fork_threshold_tokens=args.fork_threshold_tokens,
                **more,
            )

    def _params(self, eos_token_ids: Sequence[int]) -> SamplingParams:
        args = self._args
        return sampling_params(
            GenerationSettings(
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k,
                min_p=args.min_p,
                repetition_penalty=args.repetition_penalty,
                max_completion_length=args.max_completion_length,
                eos_token_ids=eos_token_ids,
            )
        )

    def start(self) -> None:
        """Start the worker's process, which attaches to the engine."""
        own = self._loop_kwargs["processing_class"].eos_token_id
        eos_token_ids = [*dict.fromkeys([own, *self._engine.model_info.eos_token_ids])]
        self._loop_kwargs |= {
            "handle": self._engine.handle(),
            "params": self._params(eos_token_ids),
            "eos_token_ids": eos_token_ids,
            "max_inflight_tasks": self._args.max_inflight_tasks,  # computed by the trainer, if it was left out
        }
        super().start()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the worker's process has failed, or stands still for ``stale_after_s`` seconds.

        Raises:
            EngineDied: the engine died.
            RuntimeError: TRL's own error, for any other reason.
        """
        try:
            super().check_health(stale_after_s)
        except RuntimeError as error:
            status, said = self._engine.engine.status, str(error.__cause__)
            if status.died:
                raise EngineDied(f"TRL's worker has no engine: {status.why}") from error
            if said.startswith(f"{EngineDied.__name__}: "):  # an engine of another process, which told the worker first
                raise EngineDied(f"TRL's worker has no engine: {said}") from error
            raise

    def stop(self) -> None:
        """Stop the worker's process, also if it has ended by itself.

        TRL sets an event and waits until a thread of that process has noticed, without a deadline; if the process ended
        while its thread waited for the event, that never comes.
        """
        process: Any = self._process  # type: ignore[has-type]
        if process is not None:
            telling = threading.Thread(target=self._stop_event_mp.set, daemon=True)
            telling.start()
            telling.join(_TELL_S)
            if telling.is_alive():
                process.kill()
                process.join()
                self._process = None
        super().stop()

    def update_model_version(self, model_version: int) -> None:
        """Take TRL's number of the weights: after each push, and when a training is resumed."""
        super().update_model_version(model_version)
        self._weights.version = model_version


@contextmanager
def _vllm_not_needed() -> Iterator[None]:
    """Let TRL make its worker without vLLM, which the worker does not use."""
    with _patching:
        asked = async_rollout_worker.is_vllm_available
        async_rollout_worker.is_vllm_available = lambda *_, **__: True
        try:
            yield
        finally:
            async_rollout_worker.is_vllm_available = asked
