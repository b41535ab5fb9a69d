"""Whether greedy answers are the same, where rounding may decide between tokens that are as likely as each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.engine import InferenceEngine
from drivetrain.outputs import Completion
from drivetrain_conformance.bench import Bench


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
    """Raise unless the tokens of ``part`` are the first of ``whole``.

    The same token computed in another batch is rounded otherwise, which may decide between two that are as likely.
    So where they part, ``part`` must still take the most likely token at each step, as the oracle computes it.
    """
    assert part.prompt_token_ids == whole.prompt_token_ids, "these are answers to two prompts"
    if part.token_ids != whole.token_ids[: len(part.token_ids)]:
        check_greedy(bench, part, engine, model)


def check_greedy(
    bench: Bench, completion: Completion, engine: InferenceEngine | None = None, model: Path | None = None
) -> None:
    """Raise unless each token is the most likely one, within rounding, as the oracle computes it for ``model``."""
    tolerance = bench.tolerance(engine)
    rows = bench.output_logits(completion, model)
    for index, (row, token) in enumerate(zip(rows, completion.token_ids, strict=True)):
        assert row.max() - row[token] <= tolerance, (
            f"token {index} of {len(completion.token_ids)} is {token}, {row.max() - row[token]:.3g} nats below the "
            f"most likely one, {row.argmax()}"
        )
