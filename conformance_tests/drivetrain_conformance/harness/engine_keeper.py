"""At most one engine at a time, kept open while cases want the same, and looked at after each."""

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

_SETTLE = 2.0
"""Seconds in which requests that a case left aborted must be gone."""
_PROBE = SamplingParams(max_new_tokens=8, temperature=0)


@dataclass(frozen=True, slots=True)
class Vitals:
    """What must be the same after a case as before it."""

    status: str
    requests: tuple[int, int]
    """Running and waiting."""
    version: str
    answer: tuple[int, ...]
    """Greedy tokens of a fixed prompt."""

    def differences(self, before: Vitals) -> str:
        """What changed, in words; empty if nothing did."""
        pairs = (
            ("state", before.status, self.status),
            ("requests (running, waiting)", before.requests, self.requests),
            ("weight version", before.version, self.version),
            ("greedy answer to a fixed prompt", before.answer, self.answer),
        )
        return "; ".join(f"{what} was {was!r} and is {now!r}" for what, was, now in pairs if was != now)


async def take_vitals(engine: InferenceEngine) -> Vitals:
    """Look at an engine, and ask it a fixed question if it serves and generates."""
    status = engine.status.describe()
    with suppress(TimeoutError):
        await until_idle(engine, within=_SETTLE)  # what was aborted last may still be in its last step
    stats = await engine.stats()
    answer: tuple[int, ...] = ()
    if status == "ready" and engine.config.task is Task.GENERATE:
        prompt = ordinary_ids(engine)[:4]
        answer = tuple((await engine.generate(prompt, _PROBE, timeout=60)).completions[0].token_ids)
    return Vitals(status, (stats.running, stats.waiting), engine.get_weight_version(), answer)


async def _speed(engine: InferenceEngine) -> float:
    """Tokens per second of one greedy request; 0 for an engine that does not generate."""
    if engine.config.task is not Task.GENERATE:
        return 0.0
    began = time.monotonic()
    made = (await engine.generate(ordinary_ids(engine)[:4], _PROBE, timeout=60)).completions[0].token_ids
    return len(made) / (time.monotonic() - began)


class EngineKeeper:
    """Opens engines, keeps the last one, and mends or replaces it when a case left it changed."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._key: str | None = None
        self.fields: Mapping[str, object] = {}
        """Those that the open engine was asked for with."""
        self._engine: InferenceEngine | None = None
        self._before: Vitals | None = None
        self._model: Path | None = None
        self.tokens_per_second = 0.0
        """Of the open engine, for one request."""

    @property
    def engine(self) -> InferenceEngine | None:
        """The engine that is open, if one is."""
        return self._engine

    async def get(self, model: Path, fields: Mapping[str, object]) -> InferenceEngine:
        """A ready engine for this model with these fields."""
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
        """What the last case left changed, in words; the engine is mended, or given up for ``get`` to open another."""
        if self._engine is None or self._before is None:
            return ""
        try:
            found = (await take_vitals(self._engine)).differences(self._before)
        except (DrivetrainError, TimeoutError) as error:
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
        except (DrivetrainError, TimeoutError):
            return False

    async def close(self) -> None:
        """Tear the engine down, if there is one."""
        engine, self._engine, self._key, self._before = self._engine, None, None, None
        if engine is not None:
            await engine.teardown()
