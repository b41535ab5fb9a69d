"""Draw wrong backends from a seed.

The authors of the suite also wrote the other modules of mutants, and know what the suite checks. Drawn mutants do not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from drivetrain.backend.base import GenerateRequest
from drivetrain.backend.registry import load_backend
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.token_scores import Scoring
from drivetrain_conformance.mutants.drawn.answers import of_a_whole_answer, of_an_answer, of_other_answers
from drivetrain_conformance.mutants.drawn.calls import of_a_call, of_a_leak, of_a_tensor, of_the_configuration
from drivetrain_conformance.mutants.drawn.mutant import (
    Drawn,
    Effect,
    Holds,
    OnCall,
    OnConfig,
    OnRequest,
    OnResult,
    Scene,
)
from drivetrain_conformance.mutants.drawn.numbers import log_count
from drivetrain_conformance.mutants.drawn.requests import (
    CONTEXT,
    field_of,
    of_a_count,
    of_a_list,
    of_a_number,
    of_a_processor,
    of_a_seed,
    of_any_field,
)

_EFFECTS: Final[tuple[tuple[int, Callable[[random.Random], tuple[str, Effect]]], ...]] = (
    *((4, of_a_number), (2, of_a_count), (3, of_a_list), (2, of_a_processor), (2, of_a_seed), (4, of_any_field)),
    *((5, of_an_answer), (2, of_a_whole_answer), (3, of_other_answers), (3, of_a_call), (2, of_a_leak)),
    *((2, of_a_tensor), (1, of_the_configuration)),
)

_EVENTS: Final = (
    *("abort", "freeze in_place", "freeze retract", "sleeps", "wakes", "update", "load_lora_adapter"),
    *("unload_lora_adapter", "load_lora_tensors", "refuses", "stream", "n > 1", "reset_prefix_cache"),
)


def _calls(rng: random.Random) -> tuple[str, Holds]:
    """Draw a condition of any call."""
    event, number, every = rng.choice(_EVENTS), log_count(rng, 2, 16), rng.randrange(2, 6)
    ways: tuple[tuple[str, Holds], ...] = (
        ("", lambda scene: True),
        (f"after {event!r}", lambda scene: event in scene.past),
        (f"from call {number} on", lambda scene: scene.number >= number),
        (f"at every call {every}", lambda scene: scene.number % every == 0),
    )
    return rng.choice(ways)


_FIELDS: Final = (
    *("seed", "lora", "logit_bias", "logit_processors", "structured_output", "min_new_tokens", "logprobs"),
    *("prompt_logprobs", "repetition_penalty", "frequency_penalty", "return_hidden_states", "top_k", "min_p"),
    *("return_sampling_mask", "ignore_eos", "stop", "stop_regex", "priority", "scoring", "return_routed_experts"),
)


def _requests(rng: random.Random) -> tuple[str, Holds]:
    """Draw a condition of a request."""
    length, tokens, beside = log_count(rng, 2, CONTEXT), log_count(rng, 1, CONTEXT), log_count(rng, 1, 64)
    field = rng.choice(_FIELDS)
    off: tuple[Any, ...] = (None, 0, False, (), {}) if field != "repetition_penalty" else (1.0,)

    def asks(scene: Scene) -> bool:
        return scene.request is not None and field_of(scene.request, field) not in off

    def of(holds: Callable[[GenerateRequest], bool]) -> Holds:
        return lambda scene: scene.request is not None and holds(scene.request)

    ways: tuple[tuple[str, Holds], ...] = (
        (f"for prompts of {length} tokens or more", of(lambda request: len(request.prompt_token_ids) >= length)),
        (f"for requests of {tokens} tokens or more", of(lambda request: request.max_new_tokens >= tokens)),
        (f"beside {beside} others", lambda scene: len(scene.beside) >= beside),
        (f"with {field}", asks),
        ("in streams", lambda scene: scene.method == "stream"),
        ("with n > 1", of(lambda request: request.params.n > 1)),
        ("with weights of an update", lambda scene: "update" in scene.past),
        (_COLD, of(lambda request: request.params.temperature == 0)),
    )
    return rng.choice(ways) if rng.random() < 0.75 else _calls(rng)


_KEPT: Final = "kept by InferenceEngine"
"""A backend's remark on a field of the configuration that ``InferenceEngine`` honours for it."""
_COLD: Final = "at temperature 0"
_SCORES: Final = "with scoring"
_WITNESSES: Final = {
    _COLD: GenerateRequest(
        request_id="greedy",
        prompt_token_ids=[1],
        params=SamplingParams(temperature=0, logprobs=1),
        max_new_tokens=1,
        stop_token_ids=(),
        logprobs_mode=LogprobsMode.PROCESSED,
    ),
    _SCORES: GenerateRequest(
        request_id="scored",
        prompt_token_ids=[1] * CONTEXT,
        params=SamplingParams(max_new_tokens=0),
        max_new_tokens=0,
        stop_token_ids=(),
        logprobs_mode=LogprobsMode.RAW,
        lora="adapter",
        priority=1,
        scoring=Scoring(2, 0.5, 1, 0, b""),
    ),
}
"""Conditions that rule out the effects of most fields, and a request that fulfils each."""


def _can_show(effect: Effect, when: str, claimed: Collection[Capability], kept: Collection[str]) -> bool:
    """Return whether some request or call of a backend that claims these capabilities could show the effect."""
    if isinstance(effect, OnConfig) and effect.field in kept:
        return False
    if isinstance(effect, OnCall | OnConfig):
        return effect.needs is None or effect.needs in claimed
    if not isinstance(effect, OnRequest) or when not in _WITNESSES:
        return True
    witness, other = _WITNESSES[when], replace(_WITNESSES[when], lora="other", priority=2)
    scene = Scene("generate", 1, [other], frozenset(), earlier=other)
    return effect.shows(witness) and (when == _COLD or effect.change(witness, scene) != witness)


def draw(
    seed: int, count: int, claimed: Collection[Capability] = tuple(Capability), kept: Collection[str] = ()
) -> list[Drawn]:
    """Draw distinct wrong backends with faults that a user could see.

    Args:
        seed: The seed.
        count: The number of wrong backends.
        claimed: Capabilities that the backend claims.
        kept: Fields of the configuration that ``InferenceEngine`` honours, so that a backend may lose them.
    """
    rng, found = random.Random(f"wrong backends {seed}"), dict[str, Drawn]()
    weighted = [make for weight, make in _EFFECTS for _ in range(weight)]
    while len(found) < count:
        does, effect = rng.choice(weighted)(rng)
        asked = getattr(effect, "method", "") or (*getattr(effect, "methods", ()), "")[0]
        per_request = isinstance(effect, OnRequest | OnResult) or asked in ("generate", "stream")
        when, holds = _requests(rng) if per_request else _calls(rng)
        of_prompt = "prompt" in does or "priority" in does
        if isinstance(effect, OnRequest) and not of_prompt and "that of" not in does and rng.random() < 0.15:
            effect = replace(effect, frozen=rng.choice((PauseMode.IN_PLACE, PauseMode.RETRACT)))
            when, holds = f"once frozen {cast(PauseMode, effect.frozen).value}", lambda scene: True
        elif isinstance(effect, OnRequest | OnResult) and not of_prompt and rng.random() < 0.15:
            effect = replace(effect, start=log_count(rng, 1, 1000))
            when, holds = f"from item {effect.start} on", lambda scene: True
        elif isinstance(effect, OnConfig) or asked in ("start", "stats"):
            when, holds = "", lambda scene: True
        name = f"{does}, {when}".removesuffix(", ")
        if _can_show(effect, when, claimed, kept):
            found.setdefault(name, Drawn(name, effect, holds))
    return [*found.values()]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A draw that another process can repeat: the functions of a mutant cannot be sent to one."""

    backend: str
    seed: int
    count: int
    claimed: frozenset[Capability]

    def mutants(self) -> list[Drawn]:
        """Draw the mutants."""
        names = load_backend(self.backend).config_names
        kept = [field for field, honoured_by in names.items() if honoured_by == _KEPT]
        return draw(self.seed, self.count, self.claimed, kept)
