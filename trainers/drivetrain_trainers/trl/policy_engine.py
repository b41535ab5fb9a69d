"""An engine that serves a trainer's policy: weights are pushed when they have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Final, cast

from torch import nn

from drivetrain.attached.engine import AttachedEngine
from drivetrain.checks.safe_repr import shown
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.shared_state import this_machine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineStateError, InvalidRequest
from drivetrain.synchronous import SyncEngine, sync_engine
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain.types.modes import MemoryTag
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import SamplingParams
from drivetrain_trainers.trl.rank_agreement import Facts, TrainerRanks, rank_here
from drivetrain_trainers.trl.support import Accelerator, is_sharded
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
        share: One engine for all ranks of the trainer, made by rank 0, which pushes. Else each rank has its own.
        fields: Fields of the engine's configuration.
    """

    def __init__(
        self,
        engine: EngineLike,
        *,
        lora_name: str | None,
        cast: bool,
        sleep: bool,
        share: bool,
        fields: Mapping[str, object],
    ) -> None:
        if isinstance(engine, SyncEngine) and fields:
            field = next(iter(fields))
            raise InvalidRequest(f"{field}: the engine has its configuration already; leave {field} out", field=field)
        self._owned = not isinstance(engine, SyncEngine)
        self.share: Final = share
        self._ranks: TrainerRanks | None = None
        self._sharded = False
        """True if each rank of the trainer has a part of the policy."""
        self._met = False
        """True once the ranks of the trainer know each other's engines."""
        self._engine: SyncEngine | None = None
        """None on a rank that has not attached yet to the engine of rank 0."""
        config = self._made(engine, fields)
        self._lora_name = lora_name
        self._cast = cast
        self._sleep = sleep
        self._asleep = False
        self._model: nn.Module | None = None
        """The policy that is connected."""
        self._served: nn.Module | None = None
        """The policy whose weights the engine serves."""
        self._sync: WeightSync | LoraSync | None = None
        self._step: int | None = None
        """Training step whose weights the engine serves; None before the first push and after one that failed."""
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
        if share and sleep:
            self.close()
            raise InvalidRequest(
                "sleep=True: one engine for all ranks cannot sleep, since the ranks end their rollouts at different "
                "times; leave share out, for an engine on each rank, or sleep out",
                field="sleep",
            )

    def _made(self, given: EngineLike, fields: Mapping[str, object]) -> EngineConfig:
        """Make the engine, unless it is made on rank 0 only and this is another one; return its configuration."""
        if isinstance(given, SyncEngine):
            if self.share and rank_here() and not isinstance(given.engine, AttachedEngine):
                raise InvalidRequest(
                    "share=True: this rank has an engine of its own; give all ranks the engine's handle, or its "
                    "configuration",
                    field="engine",
                )
            self._engine = given
        elif isinstance(given, EngineHandle):
            self._engine = sync_engine(given, **fields)
        elif isinstance(given, InferenceEngine):
            if not self.share or not rank_here():
                self._engine = sync_engine(given, **fields)
            return given.config
        else:
            page = create_engine(given, **fields)
            if not self.share and rank_here() and page.config.seed is not None:
                page = create_engine(page.config, seed=(page.config.seed + rank_here()) % 2**63)
            if not self.share or not rank_here():
                self._engine = sync_engine(page)
            return page.config
        return self._engine.config

    @property
    def engine(self) -> SyncEngine:
        """The engine.

        Raises:
            EngineStateError: this rank has not attached yet to the engine of rank 0.
        """
        if self._engine is None:
            raise EngineStateError(
                "this rank attaches to the engine of rank 0 at its first rollout; use the engine after that",
                state=EngineState.CREATED.value,
            )
        return self._engine

    @contextmanager
    def together(self, accelerator: Accelerator) -> Iterator[None]:
        """Make a rollout with all ranks of the trainer: if one of them fails within, so do all.

        Raises:
            InvalidRequest: ranks push to one engine without ``share``, or cannot reach the engine of rank 0.
            DrivetrainError: the error of any rank.
        """
        if accelerator.num_processes == 1:
            yield
            return
        if self._ranks is None:
            self._ranks = TrainerRanks()
        self._sharded = is_sharded(accelerator)
        try:
            if not self._met:
                self._meet(self._ranks)
                self._met = True
            yield
        except BaseException as error:
            self._step = None
            self._ranks.tell(error)
            raise

    def _meet(self, ranks: TrainerRanks) -> None:
        attached = self._engine is not None and isinstance(self._engine.engine, AttachedEngine)
        if self.share and not attached and (self._engine is None) == (ranks.rank == 0):
            raise InvalidRequest(
                f"share=True: this is rank {ranks.rank} of the trainer, and the environment variable RANK says "
                f"{rank_here()}; start the ranks with accelerate launch or torchrun",
                field="share",
            )
        mine: Facts = {"machine": this_machine(), "attached": "", "handle": None}
        if attached:
            mine["attached"] = self.engine.handle().address
        elif self.share and ranks.rank == 0:
            if self.engine.state is EngineState.CREATED:
                self.engine.start()
            mine["handle"] = asdict(self.engine.handle())
        everyone = ranks.agree(mine)
        if not self.share:
            self._require_own_engines([facts["attached"] for facts in everyone])
        elif self._engine is None:
            if everyone[0]["machine"] != this_machine():
                raise InvalidRequest(
                    "share=True: rank 0 of the trainer is on another machine; give all ranks the handle of an engine "
                    'that listens on the network: engine.handle("0.0.0.0:7000", announce=HOST)',
                    field="share",
                )
            self._engine = sync_engine(EngineHandle(**everyone[0]["handle"]))
            self._owned = True
        ranks.agree()

    def _require_own_engines(self, attached: Sequence[str]) -> None:
        addresses = [address for address in attached if address]
        twice = next((one for one in addresses if addresses.count(one) > 1), None)
        if twice is not None:
            raise InvalidRequest(
                f"several ranks of the trainer would push to the engine at {twice}; pass share=True, so that one does",
                field="share",
            )

    @property
    def _pushes(self) -> bool:
        """True if this rank pushes the weights."""
        return self._ranks is None or not self.share or self._sharded or self._ranks.rank == 0

    def serve(self, model: nn.Module, step: int, *, again: bool = False) -> None:
        """Start and wake the engine, and push ``model`` as version ``str(step)``, unless it serves that already.

        With several ranks, all of them come back once every engine serves the weights.

        Raises:
            DrivetrainError: the errors of ``start``, ``WeightSync.push`` and ``LoraSync.push``.
        """
        due = again or step != self._step or model is not self._served
        if self._pushes:
            self._push(model, step, due=due)
        if due:
            self._step = None
            if self._ranks is not None:
                self._ranks.agree()
            self._step, self._served = step, model

    def _push(self, model: nn.Module, step: int, *, due: bool) -> None:
        engine = self.engine
        if engine.state is EngineState.CREATED:
            engine.start()
        woken, self._asleep = self._asleep, False
        lost = woken and not engine.config.sleep_keeps_weights
        if woken:
            engine.wake_up([MemoryTag.WEIGHTS] if lost else None)
        if due or woken:
            self._step = None
            sync = self._connected(model)
            if self._sharded and self._ranks is not None:
                self._ranks.agree()  # a rank that could not connect would leave the others waiting for its shards
            engine.run(sync.push(version=str(step)))
            self._step = step
        if lost:
            engine.wake_up()

    def _connected(self, model: nn.Module) -> WeightSync | LoraSync:
        if self._sync is None or model is not self._model:
            self._disconnect()
            # Ranks that share the shards of a policy push together: only the first one names the engine.
            joins = self._sharded and self._ranks is not None and self._ranks.rank > 0
            page = None if joins else self.engine.engine
            if self._lora_name is None:
                self._sync = WeightSync.connect(model, page, cast=self._cast)
            else:
                adapter = getattr(model, "active_adapter", "default")
                self._sync = LoraSync.connect(cast("PeftModel", model), page, self._lora_name, adapter=adapter)
            self._model = model
        return self._sync

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, *, agree: bool = True) -> list[Completion]:
        """Return one completion of each prompt, in order, all of the version that was pushed last.

        Equal prompts that follow one another become one request with as many samples.

        Args:
            prompts: Token ids.
            params: The sampling params of each.
            agree: Come back when every rank of the trainer has its completions. False: not every rank makes this call.

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
        if agree and self._ranks is not None:
            self._ranks.agree()
        if self._sleep:
            self.engine.sleep()
            self._asleep = True
        return completions

    def close(self) -> None:
        """Leave the other ranks and disconnect the policy; stop the engine unless it is the caller's. Idempotent."""
        try:
            if self._ranks is not None:
                self._ranks.close()
            self._disconnect()
        finally:
            if self._owned and self._engine is not None:
                self._engine.teardown()

    def _disconnect(self) -> None:
        sync, self._sync, self._model, self._served, self._step = self._sync, None, None, None, None
        if sync is not None:
            self.engine.run(sync.close())
