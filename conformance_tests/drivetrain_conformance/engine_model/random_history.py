"""Random histories: lists of actions, played on one engine and on the contract's model.

A history is drawn whole and then played in one coroutine; it is not a ``RuleBasedStateMachine``. Every action is valid
in every state, as the contract says if it must be refused. Hypothesis can therefore shrink a failure by leaving out
actions, and draw without an engine. The requests of a history make progress in one run of the event loop.

The engine is shared. Each history must end with the engine ready and idle, with its initial weights; this is checked. A
failure carries a script that reproduces it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypothesis import given, reject
from hypothesis.strategies import SearchStrategy

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import WeightState
from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.made_adapters import Adapter, merge
from drivetrain_conformance.engine_model.actions import LONG, Action, History, histories
from drivetrain_conformance.engine_model.contract import Contract
from drivetrain_conformance.engine_model.expected_answers import Answers, styles_of
from drivetrain_conformance.engine_model.history_player import SHORT, Player
from drivetrain_conformance.harness.random_property import random_property
from drivetrain_conformance.harness.testbench import Bench, NoOracle, Runs, until_idle
from drivetrain_conformance.harness.time_limits import Hangs
from drivetrain_conformance.references.oracle import Oracle

_PROMPT_LENGTH: Final = 20


async def prepare(
    bench: Bench, weight_sets: int = 1, prompts: int = 3, adapter: Adapter | None = None
) -> tuple[Answers, list[list[int]]]:
    """Record the engine's answers with each set of weights, and choose prompts whose answers differ between them.

    ``adapter`` must be loaded already.
    """
    engine = bench.engine
    beginning = bench.prompt(_PROMPT_LENGTH - 4)
    # Half of the prompts share a beginning, for the prefix cache.
    candidates = [beginning + bench.prompt(4) for _ in range(4)] + bench.prompts(4, _PROMPT_LENGTH)
    folders = [bench.model, *(bench.other_weights(number) for number in range(1, weight_sets))]

    def oracle(folder: Path) -> Oracle | None:
        try:
            return bench.oracle(folder)
        except NoOracle:
            return None

    adapted = [merge(folder, adapter, bench.folder("merged")) for folder in folders] if adapter else []
    answers = await Answers.note(
        engine,
        folders,
        candidates,
        LONG,
        oracle=oracle,
        tolerance=bench.tolerance(),
        styles=styles_of(engine),
        adapted=adapted,
    )

    def tells_apart(prompt: list[int]) -> tuple[bool, int]:
        found = [answers.of(weights, prompt) for weights in range(weight_sets)]
        return len({tuple(answer[:SHORT]) for answer in found}) == weight_sets, min(map(len, found))

    chosen = sorted(candidates, key=tells_apart, reverse=True)[:prompts]
    for prompt in chosen:
        assert len({tuple(answers.of(weights, prompt)) for weights in range(weight_sets)}) == weight_sets, (
            f"different weights give the same answer to {prompt}"
        )
    return answers, chosen


async def restore(engine: InferenceEngine, answers: Answers) -> None:
    """Return an engine to its initial condition after a history failed on it."""
    if engine.status.asleep:
        await engine.wake_up(engine.status.asleep)
    if engine.status.weights is not WeightState.CLEAN or engine.get_weight_version() != answers.original:
        await engine.load_weights_from_disk(str(answers.folders[0]), answers.original)
    if engine.is_paused:
        await engine.continue_generation()
    await until_idle(engine)


@dataclass(slots=True)
class Checker:
    """Plays histories on one engine, restoring it after a failure so that hypothesis can shrink the history."""

    run: Runs
    """Runs a coroutine in the engine's event loop."""
    engine: InferenceEngine
    """The engine, ready and idle."""
    answers: Answers
    prompts: Sequence[Sequence[int]]
    contract: Contract | None = None
    """The contract to check; None: the design's."""
    shrink_seconds: float = 60.0
    """Time limit for shrinking a failed history."""
    _failures: list[tuple[int, Exception]] = field(default_factory=list, init=False)
    _shrinks_until: float = field(default=math.inf, init=False)
    _raced: list[bool] = field(default_factory=list, init=False)

    def check(self, history: History) -> None:
        """Play one history."""
        player = Player(self.engine, self.answers, self.prompts, self.contract)
        try:
            self.run(player.play(history))
        except Exception as error:
            self._failures.append((len(history.actions), error))
            self._restore(error)
            raise
        self._raced += player.raced

    def check_random(
        self, step: SearchStrategy[tuple[Action, ...]], *, examples: int, steps: int, seeded_by: int
    ) -> None:
        """Play ``examples`` random histories of up to ``steps`` steps; raise the failure of the shortest that fails."""
        can_abort = Capability.ABORT in self.engine.capabilities

        @random_property(examples, seeded_by)
        @given(histories(step, steps, can_abort=can_abort))
        def holds(history: History) -> None:
            if time.monotonic() > self._shrinks_until:
                reject()
            self.check(history)

        try:
            holds()
        except Exception:
            if not self._failures:
                raise
        if self._failures:
            # Raise it even if hypothesis reports flakiness: the failure was observed.
            fewest = min(actions for actions, _ in self._failures)
            raise [error for actions, error in self._failures if actions == fewest][-1]
        whole = sum(self._raced)
        assert whole <= 3 + len(self._raced) / 2, (
            f"of {len(self._raced)} requests of {LONG} tokens that were aborted as they ran, {whole} came back whole"
        )

    def _restore(self, error: Exception) -> None:
        self._shrinks_until = min(self._shrinks_until, time.monotonic() + self.shrink_seconds)
        if isinstance(error, Hangs):
            self._shrinks_until = 0  # each further hang would take as long
        try:
            self.run(restore(self.engine, self.answers))
        except Exception as failed:
            self._shrinks_until = 0
            error.add_note(f"The engine could not be restored: {type(failed).__name__}: {failed}")
