"""Compare greedy answers, allowing for rounding that decides between equally likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.outputs import Completion
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.oracle import Logits, log_softmax


def check_same(
    bench: Bench,
    got: Sequence[Completion],
    expected: Sequence[Completion],
    engine: InferenceEngine | None = None,
    model: Path | None = None,
) -> None:
    """Raise unless these greedy completions have the same tokens, ended alike, and have the same text."""
    for one, other in zip(got, expected, strict=True):
        if check_same_tokens(bench, one, other, engine, model):
            assert one.matched_stop == other.matched_stop
            assert one.text == other.text


def check_same_tokens(
    bench: Bench,
    one: Completion,
    other: Completion,
    engine: InferenceEngine | None = None,
    model: Path | None = None,
) -> bool:
    """Raise unless two greedy completions have the same tokens and ended alike.

    Returns:
        False if rounding led to different tokens.
    """
    check_prefix(bench, one, other, engine, model)
    shared = min(len(one.token_ids), len(other.token_ids))
    if one.token_ids[:shared] != other.token_ids[:shared]:
        return False
    assert len(one.token_ids) == len(other.token_ids), (
        f"{len(one.token_ids)} tokens ({one.finish_reason.value}) instead of {len(other.token_ids)} "
        f"({other.finish_reason.value}); the first are the same"
    )
    assert one.finish_reason is other.finish_reason
    return True


def check_prefix(
    bench: Bench,
    part: Completion,
    whole: Completion,
    engine: InferenceEngine | None = None,
    model: Path | None = None,
) -> None:
    """Raise unless ``part``'s tokens begin ``whole``, with the same logprobs and alternatives where both have them.

    The same token is rounded differently in another batch, which may decide between two equally likely tokens. If the
    tokens differ, each token of ``part`` must therefore be the oracle's most likely one.
    """
    assert part.prompt_token_ids == whole.prompt_token_ids, "these are answers to two prompts"
    if part.token_ids != whole.token_ids[: len(part.token_ids)]:
        check_greedy(bench, part, engine, model)
    count, cached = len(part.prompt_token_ids), part.cached_tokens
    assert 0 <= cached < count, f"{cached} of {count} prompt tokens were cached"
    if part.logprobs is None or whole.logprobs is None or part.logprobs_mode is not whole.logprobs_mode:
        return
    assert len(part.logprobs) == len(part.token_ids), f"{len(part.logprobs)} logprobs of {len(part.token_ids)} tokens"
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(part.token_ids, whole.token_ids, strict=False))
    )
    tolerance = 2 * bench.tolerance(engine)
    for index, (one, other) in enumerate(zip(part.logprobs[:same], whole.logprobs, strict=False)):
        assert abs(one - other) <= tolerance, f"the logprob of token {index} is {abs(one - other):.3g} nats off"
    if part.top_logprobs is None or whole.top_logprobs is None:
        return
    for index, (top, others) in enumerate(zip(part.top_logprobs[:same], whole.top_logprobs, strict=False)):
        # Alternatives that are equally likely may change places, so compare their values.
        off = max((abs(one - other) for (_, one), (_, other) in zip(top, others, strict=False)), default=0.0)
        assert off <= tolerance, f"the alternatives of token {index} are {off:.3g} nats off"


def check_greedy(
    bench: Bench, completion: Completion, engine: InferenceEngine | None = None, model: Path | None = None
) -> None:
    """Raise unless each token is, within rounding, the most likely one by the oracle's logits for ``model``."""
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
    """Return each token's distance below the most likely token of ``model``, in nats."""
    return _gaps(bench.output_logits(completion, model), completion)


def _least_gaps(bench: Bench, completion: Completion, engine: InferenceEngine | None, model: Path | None) -> Logits:
    """Return the gaps, for each token under the rounding that makes its gap smallest.

    A router that finds two experts equally good takes either, and all later tokens depend on the choice.
    """
    rounded = bench.rounded_output_logits(completion, engine, model)
    return np.asarray(np.min([_gaps(rows, completion) for rows in rounded], axis=0))


def _gaps(rows: Logits, completion: Completion) -> Logits:
    return np.asarray(rows.max(axis=1) - rows[np.arange(len(rows)), completion.token_ids])


def check_prompt_logprobs(bench: Bench, completion: Completion, model: Path | None = None) -> None:
    """Raise unless the prompt's logprobs are those of ``model``, by default the bench's; the first token has none."""
    prompt, found = completion.prompt_token_ids, completion.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None, "the first token of a prompt follows nothing, so it has no logprob"
    rows = log_softmax(bench.oracle(model).logits(prompt))
    for at, (value, token, row) in enumerate(zip(found[1:], prompt[1:], rows[:-1], strict=True), start=1):
        assert value is not None, f"prompt token {at} has no logprob"
        assert abs(value - row[token]) <= bench.tolerance(), (
            f"the logprob of prompt token {at} is {value:.5f}; the reference says {row[token]:.5f}"
        )
