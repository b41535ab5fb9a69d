"""Keep one engine open across cases that want the same configuration, and check its state after each case."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.harness.testbench import Opener, ordinary_ids, until_idle
from drivetrain_conformance.harness.time_limits import Hangs, within

_PROBE = SamplingParams(max_new_tokens=8, temperature=0)


@dataclass(frozen=True, slots=True)
class Vitals:
    """Observable state of an engine that a case must leave unchanged."""

    status: str
    requests: tuple[int, int]
    """Counts of running and waiting requests."""
    version: str
    answer: tuple[int, ...]
    """Greedy tokens of a fixed prompt."""

    def differences(self, before: Vitals) -> str:
        """Describe what changed; empty if nothing did."""
        pairs = (
            ("state", before.status, self.status),
            ("requests (running, waiting)", before.requests, self.requests),
            ("weight version", before.version, self.version),
            ("greedy answer to a fixed prompt", before.answer, self.answer),
        )
        return "; ".join(f"{what} was {was!r} and is {now!r}" for what, was, now in pairs if was != now)


async def take_vitals(engine: InferenceEngine) -> Vitals:
    """Read an engine's state; if it is ready and generates, also its greedy answer to a fixed prompt."""
    status = engine.status.describe()
    with suppress(Hangs):
        await until_idle(engine)  # a request that was just aborted may still be in its last step
    stats = await engine.stats()
    answer: tuple[int, ...] = ()
    if status == "ready" and engine.config.task is Task.GENERATE:
        prompt = ordinary_ids(engine)[:4]
        async with within("a greedy answer"):
            answer = tuple((await engine.generate(prompt, _PROBE)).completions[0].token_ids)
    return Vitals(status, (stats.running, stats.waiting), engine.get_weight_version(), answer)


async def _speed(engine: InferenceEngine) -> float:
    """Measure the tokens per second of one greedy request; 0 for an engine that does not generate."""
    if engine.config.task is not Task.GENERATE:
        return 0.0
    # Long enough that the time until the first token hardly counts.
    params = _PROBE.model_copy(update={"max_new_tokens": 64, "ignore_eos": engine.supports(Capability.IGNORE_EOS)})
    began = time.monotonic()
    async with within("a greedy answer"):
        made = (await engine.generate(ordinary_ids(engine)[:4], params)).completions[0].token_ids
    return len(made) / (time.monotonic() - began)


class EngineKeeper:
    """Open engines, keep the last one open, and restore or close it when a case changed it."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._key: str | None = None
        self.fields: Mapping[str, object] = {}
        """The configuration fields that the open engine was requested with."""
        self._engine: InferenceEngine | None = None
        self._before: Vitals | None = None
        self._model: Path | None = None
        self.tokens_per_second = 0.0
        """Measured on the open engine with a single request."""

    @property
    def engine(self) -> InferenceEngine | None:
        """The open engine; None if there is none."""
        return self._engine

    async def get(self, model: Path, fields: Mapping[str, object]) -> InferenceEngine:
        """Return a ready engine for this model and these fields."""
        key = json.dumps([str(model), fields], sort_keys=True, default=str)
        if self._engine is None or key != self._key:
            await self.close()
            engine = self._opener({"model": str(model), **fields})
            await engine.start()
            self._engine, self._key, self._model, self.fields = engine, key, model, fields
            self._before = await take_vitals(engine)
            self.tokens_per_second = await _speed(engine)
        return self._engine

    async def changes(self, *, weights_may_differ: bool) -> str:
        """Describe what the last case changed; restore the weights, or close the engine so that ``get`` opens anew."""
        if self._engine is None or self._before is None:
            return ""
        try:
            found = (await take_vitals(self._engine)).differences(self._before)
        except (DrivetrainError, Hangs) as error:
            found = f"it no longer answers: {type(error).__name__}: {error}"
        if found and not (weights_may_differ and await self._restore_weights()):
            await self.close()
        return "" if weights_may_differ else found

    async def _restore_weights(self) -> bool:
        engine = self._engine
        if engine is None or self._before is None or not engine.supports(Capability.WEIGHTS_DISK):
            return False
        try:
            await engine.load_weights_from_disk(str(self._model), self._before.version)
            return not (await take_vitals(engine)).differences(self._before)
        except (DrivetrainError, Hangs):
            return False

    async def close(self) -> None:
        """Tear down the open engine, if any."""
        engine, self._engine, self._key, self._before = self._engine, None, None, None
        if engine is not None:
            await engine.teardown()
