"""Whether greedy answers are the same, where rounding may decide between tokens that are as likely as each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.outputs import Completion
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.oracle import Logits


def check_same(
    bench: Bench,
    got: Sequence[Completion],
    expected: Sequence[Completion],
    engine: InferenceEngine | None = None,
    model: Path | None = None,
) -> None:
    """Raise unless these greedy completions hold the same tokens and ended alike."""
    for one, other in zip(got, expected, strict=True):
        check_prefix(bench, one, other, engine, model)
        if one.token_ids == other.token_ids[: len(one.token_ids)]:
            assert len(one.token_ids) == len(other.token_ids), (
                f"{len(one.token_ids)} tokens ({one.finish_reason.value}) instead of {len(other.token_ids)} "
                f"({other.finish_reason.value}); the first are the same"
            )
            assert one.finish_reason is other.finish_reason


def check_prefix(
    bench: Bench,
    part: Completion,
    whole: Completion,
    engine: InferenceEngine | None = None,
    model: Path | None = None,
) -> None:
    """Raise unless the tokens of ``part`` are the first of ``whole``, with the same logprobs where both have some.

    The same token computed in another batch is rounded otherwise, which may decide between two that are as likely.
    So where they part, ``part`` must still take the most likely token at each step, as the oracle computes it.
    """
    assert part.prompt_token_ids == whole.prompt_token_ids, "these are answers to two prompts"
    if part.token_ids != whole.token_ids[: len(part.token_ids)]:
        check_greedy(bench, part, engine, model)
    if part.logprobs is None or whole.logprobs is None or part.logprobs_mode is not whole.logprobs_mode:
        return
    assert len(part.logprobs) == len(part.token_ids), f"{len(part.logprobs)} logprobs of {len(part.token_ids)} tokens"
    for index, (token, other) in enumerate(zip(part.token_ids, whole.token_ids, strict=False)):
        if token != other:
            return
        gap = abs(part.logprobs[index] - whole.logprobs[index])
        assert gap <= 2 * bench.tolerance(engine), f"the logprob of token {index} is {gap:.3g} nats off"


def check_greedy(
    bench: Bench, completion: Completion, engine: InferenceEngine | None = None, model: Path | None = None
) -> None:
    """Raise unless each token is the most likely one, within rounding, as the oracle computes it for ``model``."""
    tolerance = bench.tolerance(engine)
    found = gaps(bench, completion, model)
    if (found > tolerance).any():
        found = np.minimum(found, _least_gaps(bench, completion, engine, model))
    for index, gap in enumerate(found):
        assert gap <= tolerance, (
            f"token {index} of {len(completion.token_ids)} is {completion.token_ids[index]}, {gap:.3g} nats below the "
            "most likely one"
        )


def gaps(bench: Bench, completion: Completion, model: Path | None = None) -> Logits:
    """How far each token is below the most likely one of ``model``, in nats."""
    return _gaps(bench.output_logits(completion, model), completion)


def _least_gaps(bench: Bench, completion: Completion, engine: InferenceEngine | None, model: Path | None) -> Logits:
    """The same, for each token with the rounding that suits it best.

    A router that finds two experts as good as each other takes either, and all that follows depends on it.
    """
    rounded = bench.rounded_output_logits(completion, engine, model)
    return np.asarray(np.min([_gaps(rows, completion) for rows in rounded], axis=0))


def _gaps(rows: Logits, completion: Completion) -> Logits:
    return np.asarray(rows.max(axis=1) - rows[np.arange(len(rows)), completion.token_ids])
