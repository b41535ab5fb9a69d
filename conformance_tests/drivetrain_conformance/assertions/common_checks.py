"""Assertions and prompts that several groups of cases need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import DisallowedTokens, SamplingParams, TemperatureSchedule
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.harness.testbench import Bench, NoOracle, ordinary_ids
from drivetrain_conformance.references.reference_sampling import FLAT, steps
from drivetrain_conformance.references.reference_stops import Ending, expected_ending

_FEW = 3.5
"""Share of a nucleus, in multiples of a likely token's: it keeps four of them."""
_SEARCHED = 16
"""Random texts that are searched for a prompt after which the model ends at once."""


@dataclass(frozen=True, slots=True)
class EndingPrompt:
    """A prompt after which the most likely token is an EOS."""

    token_ids: list[int]
    eos: int


def ending_prompt(bench: Bench) -> EndingPrompt:
    """Find a prompt after which the oracle's model ends at once, by a margin larger than rounding."""
    eos = list(bench.engine.model_info.eos_token_ids)
    assert eos, "the model has no EOS id, so nothing but its length ends a completion"
    # The random texts contain EOS ids too: some models, such as one that copies its prompt, never end by themselves.
    ids = [*ordinary_ids(bench.engine), *eos]
    length = min(512, bench.engine.model_info.context_length // 2)
    for _ in range(_SEARCHED):
        text = [bench.rng.choice(ids) for _ in range(length)]
        logits = bench.oracle().logits(text)
        best = logits[:, eos].max(axis=-1)
        logits[:, eos] = float("-inf")
        lead = best - logits.max(axis=-1)
        at = int(lead.argmax())
        if lead[at] > 2 * bench.tolerance():
            prompt = text[: at + 1]
            row = bench.oracle().logits(prompt)[-1]
            return EndingPrompt(prompt, int(row.argmax()))
    raise AssertionError(f"after none of {_SEARCHED * length} random prompts does the model end at once")


def agrees_with_reference(bench: Bench, free: Completion, params: SamplingParams, completion: Completion) -> bool:
    """Assert that a completion ended as the reference says; return False if the reference does not apply.

    The reference does not apply if the completion's tokens differ from those of ``free`` because rounding, which
    depends on the batch, decided between two equally likely tokens.
    """
    asked = params.model_dump(exclude_defaults=True, exclude={"temperature", "max_new_tokens", "logit_bias"})
    if completion.token_ids != free.token_ids[: len(completion.token_ids)]:
        try:
            check_greedy(bench, completion)
        except NoOracle:
            raise AssertionError(f"{asked}: the ids {completion.token_ids} are not of {free.token_ids}") from None
        return False
    expected, got = expected_ending(free, params, bench.engine.tokenizer), Ending.of(completion)
    assert got == expected, f"{asked} on {free.text!r}: expected {expected}, got {got}"
    return True


async def assert_idle_soon(bench: Bench, what: str, steps: int = 160) -> None:
    """Assert that the engine drops its requests while it generates at most ``steps`` further tokens.

    Short completions made meanwhile serve as the clock; the requests, left alone, would take many more steps.
    """
    prompt, made = bench.prompt(), 0
    while True:
        stats = await bench.engine.stats()
        if not stats.running and not stats.waiting:
            return
        assert made < steps, f"{what}: {stats.running} running and {stats.waiting} waiting after {made} more tokens"
        await bench.greedy([prompt], max_new_tokens=8)
        made += 8


def fields_of_sampling(bench: Bench) -> list[dict[str, object]]:
    """Return each field of sampling that the engine claims, with a value that leaves most tokens likely."""
    ids = ordinary_ids(bench.engine)
    return [
        {field: value}
        for needed, field, value in (
            (Capability.REPETITION_PENALTY, "repetition_penalty", 1.2),
            (Capability.FREQUENCY_PENALTY, "frequency_penalty", 0.5),
            (Capability.PRESENCE_PENALTY, "presence_penalty", 0.4),
            (Capability.LOGIT_BIAS, "logit_bias", dict.fromkeys(ids[:8], 1.5)),
            (Capability.LOGIT_PROCESSORS, "logit_processors", (DisallowedTokens(token_ids=tuple(ids[:8])),)),
            (Capability.LOGIT_PROCESSORS, "logit_processors", (TemperatureSchedule(start=0.5, end=2.0, steps=8),)),
            (Capability.TOP_K, "top_k", 64),
            (Capability.TOP_P, "top_p", 0.9),
            (Capability.MIN_P, "min_p", 0.01),
            (Capability.MIN_NEW_TOKENS, "min_new_tokens", 4),
            (Capability.PROMPT_LOGPROBS, "prompt_logprobs", 0),
        )
        if bench.claims(needed)
    ]


async def check_flat_nucleus(bench: Bench, model: Path | None = None) -> None:
    """Check that a top_p of a few of many equally likely tokens keeps these few.

    Args:
        bench: The workplace.
        model: Folder of the model that must have answered; None: the engine's own.
    """
    params = SamplingParams(
        temperature=FLAT,
        top_p=_FEW / bench.engine.model_info.vocab_size,
        max_new_tokens=24,
        ignore_eos=bench.claims(Capability.IGNORE_EOS),
    )
    output = await bench.engine.generate(bench.prompts(4), params)
    for completion in output.completions:
        try:
            rows = bench.output_logits(completion, model)
        except NoOracle:
            return
        drawn = zip(steps(completion, rows, params, bench.tolerance()), completion.token_ids, strict=True)
        for at, (step, token) in enumerate(drawn):
            step.check_drawn(token, params, 0.0, f"token {at} ({token})")
