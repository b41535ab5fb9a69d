"""Requests whose next token depends on more than earlier tokens, to find state that a pause or an update loses."""

from __future__ import annotations

from typing import Any, Final

from drivetrain.engine.validation import MODE_CAPABILITY
from drivetrain.types.capability import Capability
from drivetrain.types.sampling import ActionMask, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.harness.testbench import Bench

_HELD_BACK: Final = (
    Capability.LOGIT_BIAS,
    Capability.MIN_NEW_TOKENS,
    Capability.REPETITION_PENALTY,
    Capability.STOP_TOKEN_IDS,
)
_ALLOWED: Final = 1500
"""Ids of an action mask: engines may have room for 128 or 1024."""


def every_logprob(bench: Bench, mode: LogprobsMode) -> dict[str, Any]:
    """Return fields that ask for logprobs in this mode, alternatives and prompt logprobs, where they are claimed."""
    found: dict[str, Any] = {}
    if bench.claims(MODE_CAPABILITY[mode]):
        found |= {"logprobs": 2 if bench.claims(Capability.TOP_LOGPROBS) else 0, "logprobs_mode": mode}
    if bench.claims(Capability.PROMPT_LOGPROBS):
        found["prompt_logprobs"] = 0
    return found


def with_a_state(bench: Bench, tokens: int) -> list[SamplingParams]:
    """Return params under which each token also depends on other state: seeds, schedules, masks, counts, text.

    Args:
        bench: The workplace, whose engine repeats a request with these params.
        tokens: Number of tokens, as of :meth:`Bench.long`.

    Returns:
        One for each kind of state that the engine claims; none for an engine that rounds coarsely.
    """
    engine = bench.engine
    # With coarser rounding a repeated sample may legitimately differ at any token.
    if engine.model_info.dtype != "float32":
        return []
    most = bench.long(tokens).max_new_tokens
    assert most is not None
    found = []
    if engine.supports(Capability.SEED):
        schedule: dict[str, Any] = {}
        if engine.supports(Capability.LOGIT_PROCESSORS):
            schedule["logit_processors"] = (TemperatureSchedule(start=0.5, end=1.5, steps=most),)
        logprobs = every_logprob(bench, LogprobsMode.TEMPERATURE)
        found.append(bench.long(tokens, seed=3, temperature=1.0, **schedule, **logprobs))
        if engine.supports(Capability.LOGIT_PROCESSORS):
            found.append(bench.long(tokens, seed=5, temperature=1.0, logit_processors=(_mask_of_many(bench),)))
    if engine.supports(Capability.FREQUENCY_PENALTY):
        found.append(bench.long(tokens, frequency_penalty=1.5, **every_logprob(bench, LogprobsMode.PROCESSED)))
    if engine.supports(Capability.PRESENCE_PENALTY):
        found.append(bench.long(tokens, presence_penalty=1.5))
    if engine.supports(Capability.STOP_REGEX):
        # The match begins before any pause, and ends after it.
        found.append(bench.long(tokens, stop_regex=(f"(?s)^.{{{most // 2}}}",), include_stop_str_in_output=True))
    if engine.supports(Capability.STOP_STRINGS) and engine.supports(Capability.LOGIT_BIAS):
        # The stop string is half of the forced text: it too begins before any pause, and ends after it.
        (same,) = bench.prompt(1)
        half = engine.decode([same] * (most // 2))
        found.append(bench.long(tokens, logit_bias={same: 100.0}, stop=(half,), include_stop_str_in_output=True))
    if all(map(engine.supports, _HELD_BACK)):
        (last,) = bench.prompt(1)
        # The last token is forced but also a stop, so it is held back until min_new_tokens, and then ends the sample.
        ends: dict[str, Any] = {"logit_bias": {last: 100.0}, "min_new_tokens": most - 1, "stop_token_ids": (last,)}
        found.append(bench.long(tokens, repetition_penalty=1.3, **ends))
    return found


def _mask_of_many(bench: Bench) -> ActionMask:
    """Return a mask that allows many ids, at most seven eighths of the vocabulary, in no order."""
    vocabulary = bench.engine.model_info.vocab_size
    return ActionMask(allowed_token_ids=tuple(bench.rng.sample(range(vocabulary), min(_ALLOWED, vocabulary * 7 // 8))))
