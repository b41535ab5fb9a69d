"""Scores of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain_conformance.assertions.pooled_inputs import (
    SHORT_CONTEXT,
    after_other_calls,
    check_inputs_leave_nothing,
    check_one_version,
    check_takes_no_adapter,
    longest_input,
    many_lengths,
)
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench

_CONFIG: Final = {"task": "reward"}


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config=_CONFIG, changes_weights=True)
async def scores_are_the_models(bench: Bench) -> None:
    """Each score equals that of a forward pass of the classifier over input and output, also after an update.

    It is that of the last token, whatever its id: padding and EOS ids count as any other. A long sequence is not cut
    off. A call during an update has scores of one version of the weights.
    """
    inputs = [bench.prompt(length) for length in (1, 6, longest_input(bench) - 30, 20, 4, 4)]
    specials = {getattr(bench.engine.tokenizer.inner, f"{name}_token_id", None) for name in ("pad", "eos")}
    endings = [[*bench.prompt(3), token, token] for token in specials if token is not None]
    outputs = [*(bench.prompt(length) for length in (9, 1, 30, 30)), *endings]
    inputs = inputs[: len(outputs)]
    scores = await bench.engine.score(inputs, outputs)
    sequences = [[*one, *other] for one, other in zip(inputs, outputs, strict=True)]
    _assert_near(bench, scores, _forward(sequences, bench.model))
    if bench.claims(Capability.WEIGHTS_DISK):
        await bench.engine.load_weights_from_disk(str(bench.other_weights()), "other")
        _assert_near(bench, await bench.engine.score(inputs, outputs), _forward(sequences, bench.other_weights()))
        await bench.engine.load_weights_from_disk(str(bench.model), "back")
        checkpoints = [(folder, folder) for folder in (bench.model, bench.other_weights())]
        await check_one_version(bench, partial(_score_wholes, bench), _forward, partial(_far, bench), checkpoints)


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config=_CONFIG, slow=True)
async def a_batch_changes_no_score(bench: Bench) -> None:
    """A score is the same alone, among others of other lengths, and in another order, within rounding.

    This holds for batches that take several forward passes, and after pauses, sleeps and resets of the cache. Sequences
    that were scored leave nothing behind.
    """
    for lengths in ((32, 10, 23, 41), many_lengths(bench)):
        outputs = [bench.prompt(1 + place % 7) for place in range(len(lengths))]
        inputs = [bench.prompt(length - len(output)) for length, output in zip(lengths, outputs, strict=True)]
        alone = [(await bench.engine.score([one], [other]))[0] for one, other in zip(inputs, outputs, strict=True)]
        _assert_near(bench, await bench.engine.score(inputs, outputs), alone)
        _assert_near(bench, (await bench.engine.score(inputs[::-1], outputs[::-1]))[::-1], alone)
    async for _ in after_other_calls(bench.engine):
        _assert_near(bench, await bench.engine.score(inputs, outputs), alone)
    await check_inputs_leave_nothing(bench, partial(_score_wholes, bench))


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config=_CONFIG)
async def only_the_sequence_counts(bench: Bench) -> None:
    """The boundary between input and output does not affect a score; every token does, up to the last."""
    sequence = bench.prompt(12)
    early, late = await bench.engine.score([sequence[:3], sequence[:9]], [sequence[3:], sequence[9:]])
    _assert_near(bench, [early], [late])
    others = {token: await _score_of(bench, [*sequence[:-1], token]) for token in set(bench.prompt(6))}
    assert len({round(score, 6) for score in others.values()}) > 1, f"the last token changes nothing: {others}"


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config=_CONFIG)
async def as_many_outputs_as_inputs(bench: Bench) -> None:
    """Input and output lists of different lengths are refused, naming both counts; nothing is cut to fit."""
    for inputs, outputs in ((2, 1), (1, 2)):
        with refused(InvalidRequest, field="output_ids", naming=str(inputs)):
            await bench.engine.score(bench.prompts(inputs), bench.prompts(outputs))
    assert len(await bench.engine.score(bench.prompts(1), bench.prompts(1))) == 1


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config={**_CONFIG, "context_length": SHORT_CONTEXT})
async def sequences_that_cannot_be_are_refused(bench: Bench) -> None:
    """Sequences that are empty, too long or outside the vocabulary are refused before any work.

    Too long is what exceeds the configured ``context_length``.
    """
    info = bench.engine.model_info
    assert info.context_length == SHORT_CONTEXT, f"context_length={SHORT_CONTEXT} was asked for: {info.context_length}"
    too_long = bench.prompt(1) * info.context_length
    for one, other, field in (
        ([], [], "prompts"),
        (bench.prompt(), [info.vocab_size], "prompts"),
        (too_long, [1], "input_ids[0]"),
    ):
        with refused(InvalidRequest, field=field):
            await bench.engine.score([one], [other])
    assert len(await bench.engine.score(bench.prompts(1), bench.prompts(1))) == 1


@case(Capability.REWARD_SCORE, model=ModelKind.REWARD, config=_CONFIG)
async def a_reward_engine_does_not_generate(bench: Bench) -> None:
    """An engine made for scores refuses generate(), naming the task, and serves on.

    It refuses adapters too, which no call that scores takes, and its scores stay what they were.
    """
    with refused(InvalidRequest, field="task"):
        await bench.engine.generate(bench.prompt(), {"max_new_tokens": 2})
    sequences = bench.prompts(4, 9)
    await check_takes_no_adapter(bench, partial(_score_wholes, bench, sequences), partial(_far, bench))


@case(Capability.REWARD_SCORE)
async def a_generating_engine_does_not_score(bench: Bench) -> None:
    """An engine made for generation refuses score(), naming the task, and serves on."""
    with refused(InvalidRequest, field="task"):
        await bench.engine.score(bench.prompts(2), bench.prompts(2))
    assert (await bench.greedy([bench.prompt()]))[0].token_ids


async def _score_wholes(bench: Bench, sequences: list[list[int]]) -> list[float]:
    return await bench.engine.score([ids[:-1] for ids in sequences], [ids[-1:] for ids in sequences])


async def _score_of(bench: Bench, sequence: list[int]) -> float:
    (score,) = await bench.engine.score([sequence[:1]], [sequence[1:]])
    return score


def _forward(sequences: Sequence[list[int]], folder: Path) -> list[float]:
    """Return the classifier's outputs at the last tokens, computed one sequence at a time in float32 on the CPU."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with no_progress_bars():
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    model.config.pad_token_id = None  # otherwise transformers reads the score before ids of padding
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0]) for ids in sequences]


def _assert_near(bench: Bench, found: Sequence[float], expected: Sequence[float]) -> None:
    difference = _far(bench, found, expected)
    assert not difference, difference


def _far(bench: Bench, found: Sequence[float], expected: Sequence[float]) -> str:
    """Say how scores differ from the expected ones; "" if they do not."""
    assert len(found) == len(expected)
    worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    allowed = bench.tolerance() * max(1.0, *(abs(score) for score in expected))
    return "" if worst <= allowed else f"scores {found} are up to {worst:.3g} off {expected}"
