"""A batch in which each claimed field is set by one request, and requests end at different times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from drivetrain.types.capability import Capability
from drivetrain.types.prompts import TokenPrompt
from drivetrain.types.sampling import ActionMask, DisallowedTokens, RegexGrammar, SamplingParams, TemperatureSchedule
from drivetrain_conformance.engine_model.strategies import Batch
from drivetrain_conformance.harness.testbench import Bench, ordinary_ids

_LASTING: Final = 16
"""Tokens of the requests that outlast the others."""
_Request = tuple[Mapping[str, object], Sequence[Capability]]


def field_batch(bench: Bench, length: int = 6) -> Batch:
    """Return a batch whose first requests end one after another, while the last ones run on.

    An engine that keeps a batch dense moves a later request into the place of one that ends. The moved request must
    keep its own fields and get none of the other's. Requests with seeds are random.

    Args:
        bench: The workplace.
        length: Tokens of each prompt.
    """
    ids = ordinary_ids(bench.engine)
    some, few = ids[::2], tuple(sorted(set(bench.rng.sample(ids, min(12, len(ids))))))
    drawn: Mapping[str, object] = {"temperature": 1.0}
    masked = {"logit_processors": (DisallowedTokens(token_ids=tuple(some)),)}
    claimed: Sequence[_Request] = (
        (masked, (Capability.LOGIT_PROCESSORS,)),
        ({"logit_processors": (ActionMask(allowed_token_ids=few),)}, (Capability.LOGIT_PROCESSORS,)),
        ({"logit_bias": dict.fromkeys(few, 4.0)}, (Capability.LOGIT_BIAS,)),
        ({"repetition_penalty": 1.75}, (Capability.REPETITION_PENALTY,)),
        ({"frequency_penalty": 1.5}, (Capability.FREQUENCY_PENALTY,)),
        ({"presence_penalty": 1.5}, (Capability.PRESENCE_PENALTY,)),
        ({**drawn, "seed": 1, "top_k": 2}, (Capability.SEED, Capability.TOP_K)),
        ({**drawn, "seed": 2, "min_p": 0.5}, (Capability.SEED, Capability.MIN_P)),
        (
            {**drawn, "seed": 3, "logit_processors": (TemperatureSchedule(start=0.25, end=2.0, steps=8),)},
            (Capability.SEED, Capability.LOGIT_PROCESSORS),
        ),
        ({"structured_output": RegexGrammar(regex="[ab]{3}[0-9]{9}")}, (Capability.STRUCTURED_REGEX,)),
        ({"stop_token_ids": few}, (Capability.STOP_TOKEN_IDS,)),
    )
    fields = [own for own, needed in claimed if all(map(bench.claims, needed))]
    lasting = [{}, *fields] + [{**drawn, "seed": seed} for seed in (4, 5) if bench.claims(Capability.SEED)]
    bench.rng.shuffle(lasting)
    # Each ends a step after the one before, and the last of the others takes its place.
    params = [{"max_new_tokens": tokens, **own} for tokens, own in enumerate(fields, 2)]
    params += [{"max_new_tokens": _LASTING, **own} for own in lasting]
    prompts = bench.prompts(len(params), length)
    return Batch(
        tuple(TokenPrompt(token_ids=tuple(prompt)) for prompt in prompts),
        tuple(SamplingParams.model_validate({"temperature": 0, **own}) for own in params),
    )
