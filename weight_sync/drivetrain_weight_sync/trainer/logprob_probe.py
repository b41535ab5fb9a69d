"""Compare an engine's logprobs with the trainer's after new weights were committed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from drivetrain.checks.safe_repr import shown
from drivetrain.checks.simple_values import check_sequences, check_token_ids
from drivetrain.engine.states import EngineState
from drivetrain.errors import InvalidRequest, WeightProbeFailed
from drivetrain.types.outputs import GenerationOutput


@runtime_checkable
class ScoringEngine(Protocol):
    """The part of :class:`~drivetrain.engine.engine.InferenceEngine` that a probe uses."""

    @property
    def state(self) -> EngineState: ...

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> GenerationOutput: ...


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """Asks an engine for logprobs after each commit, and compares them with the trainer's.

    Digests prove that the engine holds the tensors that were sent. The probe finds a model that computes differently
    with the same tensors.
    """

    sequences: Sequence[Sequence[int]]
    """Token ids, at least two per sequence. Keep them few and short: they are scored at every push."""
    logprobs: Callable[[], Sequence[Sequence[float]]]
    """Returns the trainer's current logprobs in nats: for each sequence, one per token except the first. Called in
    another thread."""
    tolerance: float
    """Largest difference in nats that passes; 0.001 for float32 and 0.15 for bfloat16 are usual."""

    def __post_init__(self) -> None:
        check_sequences("probe.sequences", self.sequences)
        if not self.sequences or any(len(sequence) < 2 for sequence in self.sequences):
            raise InvalidRequest("a probe needs sequences of two tokens or more each", field="probe.sequences")
        for sequence in self.sequences:
            check_token_ids("probe.sequences", sequence)
        if not callable(self.logprobs):
            raise InvalidRequest(f"logprobs={shown(self.logprobs)}: expected a function", field="probe.logprobs")
        is_number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if not is_number or not 0 < self.tolerance < math.inf:
            raise InvalidRequest(
                f"tolerance={shown(self.tolerance)}: expected a positive number of nats", field="probe.tolerance"
            )

    async def gap(self, engine: ScoringEngine) -> float | None:
        """Return the largest difference in nats, or None if the engine is paused or asleep and cannot score.

        Raises:
            InvalidRequest: ``logprobs`` did not return one number for each token except the first.
            WeightProbeFailed: the difference exceeds the tolerance.
        """
        if engine.state is not EngineState.READY:
            return None
        output, expected = await asyncio.gather(
            engine.compute_logprobs(self.sequences), asyncio.to_thread(self.logprobs)
        )
        found = [list(completion.prompt_logprobs or ())[1:] for completion in output.completions]
        if [len(numbers) for numbers in expected] != [len(numbers) for numbers in found]:
            raise InvalidRequest(
                f"the probe's logprobs have lengths {[len(numbers) for numbers in expected]}; expected "
                f"{[len(numbers) for numbers in found]}, one number for each token but the first",
                field="probe.logprobs",
            )
        gap = max(
            _apart(own, engines)
            for numbers, of_engine in zip(expected, found, strict=True)
            for own, engines in zip(numbers, of_engine, strict=True)
        )
        if not gap <= self.tolerance:
            raise WeightProbeFailed(
                f"with the new weights, which are verified and served, the engine's logprobs differ from the trainer's "
                f"by up to {gap:.3g} nats; the tolerance is {self.tolerance:g}. Compare the configurations, dtypes and "
                "attention of the two models, or give a larger tolerance",
                gap=gap,
            )
        return gap


def _apart(one: float, other: float | None) -> float:
    if other is None or math.isnan(one) or math.isnan(other):
        return math.inf
    return 0.0 if one == other else abs(one - other)
