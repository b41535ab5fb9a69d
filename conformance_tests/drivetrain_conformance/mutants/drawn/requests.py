"""Effects on requests: a field that is lost, capped, rounded, cut, or another request's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from drivetrain.backend.base import GenerateRequest
from drivetrain.types.sampling import ActionMask, DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.mutants.drawn.mutant import (
    ChangeRequest,
    Effect,
    OnRequest,
    Scene,
)
from drivetrain_conformance.mutants.drawn.numbers import in_bfloat16, in_float16, log_count, log_number
from drivetrain_conformance.references.tolerances import tolerance_of

_VOCABULARY: Final = 256
_FLOATS: Final[Mapping[str, tuple[float, float, float]]] = {
    "temperature": (1e-6, 1e3, 1.0),
    "top_p": (1 / _VOCABULARY, 1.0, 1.0),
    "min_p": (1e-3, 1.0, 0.0),
    "repetition_penalty": (1e-2, 1e2, 1.0),
    "frequency_penalty": (0.05, 2.0, 0.0),
    "presence_penalty": (0.05, 2.0, 0.0),
}
"""Fields with a number: the range in which a user sees a difference, and the default."""
_AS_IT_IS: Final = frozenset({"top_p", "min_p", "presence_penalty"})
"""Numbers whose relative error is at most that of a probability: logits and counts of tokens do not multiply it."""
_HALF_ULP: Final = {"float16": 2**-11, "bfloat16": 2**-8}
"""Largest relative error of rounding."""
CONTEXT: Final = 1000
"""Tokens of a long prompt or output; the models that the suite makes take 1024 together."""
_COUNTS: Final[Mapping[str, tuple[int, int]]] = {
    "top_k": (_VOCABULARY, 0),
    "min_new_tokens": (1000, 0),
    "logprobs": (_VOCABULARY, 0),
    "prompt_logprobs": (_VOCABULARY, 0),
}
"""Fields with a count: the largest that differs from a larger one, and the value without effect."""
_DRAWS: Final = frozenset({"temperature", "top_p", "min_p", "top_k"})


def is_sampled(request: GenerateRequest) -> bool:
    """Return whether a request draws its tokens."""
    return request.params.temperature > 0 and request.max_new_tokens > 0


def _precise(request: GenerateRequest) -> bool:
    returned = request.params.logprobs is not None and request.logprobs_mode is not LogprobsMode.RAW
    return is_sampled(request) and returned


def _always(_: GenerateRequest) -> bool:
    return True


def _params(change: Callable[[SamplingParams, Scene], Mapping[str, object]]) -> ChangeRequest:
    def changed(request: GenerateRequest, scene: Scene) -> GenerateRequest:
        fields = change(request.params, scene)
        return replace(request, params=request.params.model_copy(update=dict(fields))) if fields else request

    return changed


def _of(field: str) -> ChangeRequest:
    """Return a change that takes a field of another request."""

    def changed(request: GenerateRequest, scene: Scene) -> GenerateRequest:
        other = next(iter(scene.beside), None)
        return request if other is None else _with(request, field, field_of(other, field))

    return changed


def _kept(field: str) -> ChangeRequest:
    """Return a change that keeps a field of the request before."""

    def changed(request: GenerateRequest, scene: Scene) -> GenerateRequest:
        return request if scene.earlier is None else _with(request, field, field_of(scene.earlier, field))

    return changed


def field_of(request: GenerateRequest, field: str) -> Any:
    """Return a field of a request or of its params."""
    return getattr(request if hasattr(request, field) else request.params, field)


def _with(request: GenerateRequest, field: str, value: object) -> GenerateRequest:
    if hasattr(request, field):
        changes: dict[str, Any] = {field: value}
        return replace(request, **changes)
    return replace(request, params=request.params.model_copy(update={field: value}))


def _changing(field: str, change: Callable[[Any], Any]) -> ChangeRequest:
    """Return a change of a field that is not empty."""

    def changed(request: GenerateRequest, scene: Scene) -> GenerateRequest:
        value = field_of(request, field)
        return request if value is None or value in ((), {}) else _with(request, field, change(value))

    return changed


def of_a_number(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to a field with a number."""
    field = rng.choice([*_FLOATS])
    low, high, default = _FLOATS[field]
    limit, shows = log_number(rng, low, high), is_sampled if field in _DRAWS else _always
    sign: Callable[[float, float], float] = math.copysign if low == 0.05 else lambda size, value: size
    ways: list[tuple[str, Callable[[float], float]]] = [
        ("is lost", lambda value: default),
        (f"is at most {limit:g}", lambda value: sign(min(abs(value), limit), value)),
        (f"is at least {limit:g}", lambda value: sign(max(abs(value), limit), value) if value else value),
    ]
    for dtype, rounded in (("bfloat16", in_bfloat16), ("float16", lambda value: in_float16(value) or value)):
        if field not in _AS_IT_IS or _HALF_ULP[dtype] > tolerance_of("float32"):
            ways.append((f"is rounded to {dtype}", rounded))
    does, change = rng.choice(ways)
    if "rounded" in does:
        shows = _precise
    return f"{field} {does}", OnRequest(_params(lambda params, _: {field: change(getattr(params, field))}), shows)


def of_a_count(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to a field with a count."""
    field = rng.choice([*_COUNTS])
    most, default = _COUNTS[field]
    limit = log_count(rng, 1, most)
    does, change = rng.choice(
        (
            ("is lost", lambda value: default),
            (f"is at most {limit}", lambda value: min(value, limit)),
            ("is one more", lambda value: value + 1),
            ("is one less", lambda value: value - 1),
        )
    )
    changed = _changing(field, lambda value: max(change(value), 0) if value else value)
    return f"{field} {does}", OnRequest(changed, is_sampled if field == "top_k" else _always)


def of_a_list(rng: random.Random) -> tuple[str, Effect]:
    """Draw a loss of items from a field that has several."""
    field = rng.choice(("stop_token_ids", "logit_bias", "logit_processors", "prompt_token_ids"))
    most = {"stop_token_ids": 64, "logit_bias": 256, "logit_processors": 2, "prompt_token_ids": CONTEXT}[field]
    limit, id_limit = log_count(rng, 1, most), log_count(rng, 8, _VOCABULARY)

    def cut(value: Any, keep: Callable[[list[Any]], list[Any]]) -> Any:
        return dict(keep([*value.items()])) if isinstance(value, dict) else type(value)(keep([*value]))

    ways: list[tuple[str, Callable[[list[Any]], list[Any]]]] = [
        (f"keeps its first {limit}", lambda items: items[:limit]),
        (f"keeps its last {limit}", lambda items: items[-limit:]),
        ("loses its last", lambda items: items[:-1] or items),
    ]
    if field in ("stop_token_ids", "logit_bias"):
        ways += [(f"loses ids from {id_limit}", lambda items: [i for i in items if _id_of(i) < id_limit])]
    if field != "prompt_token_ids":
        ways += [("is lost", lambda items: [])]
    does, keep = rng.choice(ways)
    return f"{field} {does}", OnRequest(_changing(field, lambda value: cut(value, keep)))


def _id_of(item: Any) -> int:
    return cast(int, item[0] if isinstance(item, tuple) else item)


def of_a_processor(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to a mask or a schedule."""
    limit, steps = log_count(rng, 1, _VOCABULARY), log_count(rng, 1, 1000)

    def of(
        kind: type[ActionMask | DisallowedTokens | TemperatureSchedule], **changes: Callable[[Any], object]
    ) -> Callable[[Any], Any]:
        """Return a change of the processors of one kind: field → its value, given the processor."""

        def changed(one: Any) -> Any:
            if not isinstance(one, kind):
                return one
            return one.model_copy(update={field: value(one) for field, value in changes.items()})

        return changed

    ways: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (f"an action mask keeps {limit} ids", of(ActionMask, allowed_token_ids=lambda o: o.allowed_token_ids[:limit])),
        (f"{limit} ids are disallowed", of(DisallowedTokens, token_ids=lambda one: one.token_ids[:limit])),
        (f"a schedule ends after {steps} steps", of(TemperatureSchedule, steps=lambda one: min(one.steps, steps))),
        ("a schedule starts at its end", of(TemperatureSchedule, start=lambda one: one.end)),
        ("a schedule keeps its start", of(TemperatureSchedule, end=lambda one: one.start)),
    )
    does, change = rng.choice(ways)
    return does, OnRequest(_changing("logit_processors", lambda value: tuple(map(change, value))))


def of_a_seed(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to the seed."""
    bits = rng.randrange(4, 63)
    does, change = rng.choice(
        (
            ("the seed is lost", lambda seed: None),
            (f"the seed has {bits} bits", lambda seed: seed % 2**bits),
            (f"the seed loses {bits // 2} low bits", lambda seed: seed >> bits // 2),
            ("the seed passes through a double", lambda seed: min(int(float(seed)), 2**63 - 1)),
        )
    )
    return does, OnRequest(_changing("seed", change), is_sampled)


def of_any_field(rng: random.Random) -> tuple[str, Effect]:
    """Draw a field that another request's replaces."""
    field = rng.choice(
        (
            *("seed", "lora", "priority", "stop_token_ids", "logit_processors", "logit_bias", "structured_output"),
            *("min_new_tokens", "scoring", "logprobs_mode", "temperature", "repetition_penalty", "top_k"),
            "max_new_tokens",
        )
    )
    shows = is_sampled if field in ("seed", "temperature", "top_k") else _always
    if field == "logprobs_mode":
        shows = _precise
    does, change = rng.choice((("is that of a neighbour", _of(field)), ("is that of the request before", _kept(field))))
    if field in ("lora", "structured_output", "priority") and rng.random() < 0.5:
        does, change = "is lost", _changing(field, lambda value: 0 if field == "priority" else None)
    if field == "scoring":
        cold = _changing(field, lambda value: replace(value, temperature=1.0))
        return "scoring loses its temperature", OnRequest(cold)
    return f"{field} {does}", OnRequest(change, shows)
