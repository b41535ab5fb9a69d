"""An engine that serves a trainer's policy: weights are pushed when they have changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, cast

from torch import nn

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineStateError, InvalidRequest
from drivetrain.synchronous import SyncEngine, sync_engine
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain.types.modes import MemoryTag
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import SamplingParams
from drivetrain_weight_sync import LoraSync, WeightSync

if TYPE_CHECKING:
    from peft import PeftModel

EngineLike = str | os.PathLike[str] | Mapping[str, object] | EngineConfig | InferenceEngine | EngineHandle | SyncEngine
"""A backend's name, mapping, file or configuration, an engine that was not started, a handle, or a sync engine."""


class PolicyEngine:
    """An engine and the connection of a policy to it.

    Args:
        engine: The engine. A :class:`SyncEngine` stays the caller's; every other is stopped by :meth:`close`.
        lora_name: Push the policy's adapter alone, under this name; None: push all weights, with adapters merged.
        cast: Round the policy's weights to the engine's dtype.
        sleep: Let the engine's memory go between generations.
        fields: Fields of the engine's configuration.
    """

    def __init__(
        self, engine: EngineLike, *, lora_name: str | None, cast: bool, sleep: bool, fields: Mapping[str, object]
    ) -> None:
        if isinstance(engine, SyncEngine) and fields:
            field = next(iter(fields))
            raise InvalidRequest(f"{field}: the engine has its configuration already; leave {field} out", field=field)
        self._owned = not isinstance(engine, SyncEngine)
        self.engine = engine if isinstance(engine, SyncEngine) else sync_engine(engine, **fields)
        self._lora_name = lora_name
        self._cast = cast
        self._sleep = sleep
        self._asleep = False
        self._model: nn.Module | None = None
        self._sync: WeightSync | LoraSync | None = None
        self._step: int | None = None
        """Training step whose weights the engine serves; None before the first push and after one that failed."""
        config = self.engine.config
        if lora_name is not None and not config.enable_lora:
            self.close()
            raise InvalidRequest(
                f"lora_name={shown(lora_name)}: the engine was made without adapters; make it with enable_lora=True, "
                "or leave lora_name out to push merged weights",
                field="lora_name",
            )
        if lora_name is not None and sleep:
            self.close()
            raise InvalidRequest(
                "sleep=True: the engine would lose its base weights, and only the adapter is pushed; leave lora_name "
                "out to push merged weights",
                field="sleep",
            )

    def serve(self, model: nn.Module, step: int, *, again: bool = False) -> None:
        """Start and wake the engine, and push ``model`` as version ``str(step)``, unless it serves that already.

        Raises:
            DrivetrainError: the errors of ``start``, ``WeightSync.push`` and ``LoraSync.push``.
        """
        engine = self.engine
        if engine.state is EngineState.CREATED:
            engine.start()
        woken, self._asleep = self._asleep, False
        lost = woken and not engine.config.sleep_keeps_weights
        if woken:
            engine.wake_up([MemoryTag.WEIGHTS] if lost else None)
        if again or woken or step != self._step or model is not self._model:
            self._step = None
            engine.run(self._connected(model).push(version=str(step)))
            self._step = step
        if lost:
            engine.wake_up()

    def _connected(self, model: nn.Module) -> WeightSync | LoraSync:
        if self._sync is None or model is not self._model:
            self._disconnect()
            page = self.engine.engine
            if self._lora_name is None:
                self._sync = WeightSync.connect(model, page, cast=self._cast)
            else:
                adapter = getattr(model, "active_adapter", "default")
                self._sync = LoraSync.connect(cast("PeftModel", model), page, self._lora_name, adapter=adapter)
            self._model = model
        return self._sync

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Completion]:
        """Return one completion of each prompt, in order, all of the version that was pushed last.

        Equal prompts that follow one another become one request with as many samples.

        Raises:
            EngineStateError: a request was aborted.
            DrivetrainError: the errors of ``generate``.
        """
        runs = [(ids, len(list(equal))) for ids, equal in groupby(prompts)]
        output = self.engine.generate(
            [ids for ids, _ in runs],
            [params.model_copy(update={"n": count}) for _, count in runs],
            lora=self._lora_name,
            weight_version=str(self._step),
        )
        completions = [completion for group in output.by_prompt() for completion in group]
        if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
            raise EngineStateError("a rollout's request was aborted; do not abort or sleep the engine while it trains")
        if self._sleep:
            self.engine.sleep()
            self._asleep = True
        return completions

    def close(self) -> None:
        """Disconnect the policy; stop the engine unless it is the caller's. Idempotent."""
        try:
            self._disconnect()
        finally:
            if self._owned:
                self.engine.teardown()

    def _disconnect(self) -> None:
        sync, self._sync, self._model, self._step = self._sync, None, None, None
        if sync is not None:
            self.engine.run(sync.close())
