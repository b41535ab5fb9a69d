"""Effects on answers: numbers of another place, rounded, or of another call."""

from __future__ import annotations

import random
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from drivetrain.backend.base import EngineStats, GenerateResult, ModelInfo
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain_conformance.mutants.drawn.mutant import (
    ChangeItems,
    Effect,
    OnAnswer,
    OnCall,
    OnResult,
    Scene,
)
from drivetrain_conformance.mutants.drawn.numbers import in_bfloat16, log_count

_LISTS: Final = (
    *("token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "prompt_ranks"),
    *("hidden_states", "routed_experts", "prompt_routed_experts", "sampling_mask"),
)


def _late(items: list[Any], before: Any) -> list[Any]:
    moved = [before if before is not None else item for item in items[:1]] + items[:-1]
    return [item if old is None else old for item, old in zip(items, moved, strict=True)]


def _each(change: Callable[[Any], Any]) -> ChangeItems:
    return lambda items, before: [item if item is None else change(item) for item in items]


def of_an_answer(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to each item of a list in a result."""
    field = rng.choice(_LISTS)
    ways: list[tuple[str, ChangeItems]] = [("come one late", _late)]
    if field in ("logprobs", "prompt_logprobs"):
        ways += [("pass through bfloat16", _each(in_bfloat16)), ("are 1 % too low", _each(lambda v: v * 1.01))]
        ways += [("are not below -10", _each(lambda value: max(value, -10.0)))]
    if field in ("top_logprobs", "prompt_top_logprobs"):
        ways += [("have their first two ids exchanged", _each(_exchanged))]
        ways += [("pass through bfloat16", _each(lambda top: [(i, in_bfloat16(v)) for i, v in top]))]
    if field == "hidden_states":
        ways += [("pass through bfloat16", _each(lambda row: list(map(in_bfloat16, row))))]
    if field == "prompt_ranks":
        ways += [("count from 0", _each(lambda rank: rank - 1)), ("end at 255", _each(lambda rank: min(rank, 255)))]
    does, change = rng.choice(ways)
    return f"{field} {does}", OnResult(field, change)


def _exchanged(top: list[tuple[int, float]]) -> list[tuple[int, float]]:
    (a, p), (b, q) = top[:2] if len(top) > 1 else (*top, *top)
    return [(b, p), (a, q), *top[2:]] if len(top) > 1 else top


def of_a_whole_answer(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to a result as a whole."""

    def spans(made: GenerateResult, scene: Scene, at: int = 1) -> GenerateResult:
        first, *others = made.weight_versions or [VersionSpan("", 0, 0)]
        if not others or first.end + at > others[0].end:
            return made
        end = first.end + at
        return replace(made, weight_versions=[replace(first, end=end), replace(others[0], start=end), *others[1:]])

    def one_span(made: GenerateResult, scene: Scene) -> GenerateResult:
        count = len(made.token_ids)
        return replace(made, weight_versions=[VersionSpan(one.version, 0, count) for one in made.weight_versions[:1]])

    def ended(made: GenerateResult, scene: Scene) -> GenerateResult:
        stopped = made.matched_stop is not None
        return replace(made, finish_reason=FinishReason.LENGTH, matched_stop=None) if stopped else made

    def named(made: GenerateResult, scene: Scene) -> GenerateResult:
        others = [one for one in scene.request.stop_token_ids if one != made.matched_stop] if scene.request else []
        return replace(made, matched_stop=others[0]) if others and made.matched_stop is not None else made

    def cached(made: GenerateResult, scene: Scene) -> GenerateResult:
        return replace(made, cached_tokens=0)

    def scores(made: GenerateResult, scene: Scene) -> GenerateResult:
        if made.scores is None:
            return made
        values = made.scores.token_logprobs.tolist()
        late = _late(values[1:], None) if len(values) > 2 else values[1:]
        packed = struct.pack(f"<{len(values)}f", *values[:1], *late)
        return replace(made, scores=replace(made.scores, packed_tokens=packed))

    ways: tuple[tuple[str, Callable[[Any, Scene], Any]], ...] = (
        ("the second version begins one token late", spans),
        ("all tokens are of the first version", one_span),
        ("a stop is an end by length", ended),
        ("another stop id is named", named),
        ("no token was cached", cached),
        ("one token more was cached", lambda made, scene: replace(made, cached_tokens=made.cached_tokens + 1)),
        ("scores come one late", scores),
    )
    does, change = rng.choice(ways)
    return does, OnAnswer("generate", change)


def _with_the_initial_version(info: ModelInfo, scene: Scene) -> ModelInfo:
    return info if scene.config.weight_version == "initial" else replace(info, weight_version="initial")


def _with_half_the_context(info: ModelInfo, scene: Scene) -> ModelInfo:
    return replace(info, context_length=info.context_length // 2)


def _with_all_running(stats: EngineStats, scene: Scene) -> EngineStats:
    return replace(stats, running=stats.running + stats.waiting, waiting=0)


def _with_the_first(field: str) -> Callable[[Any, Scene], Any]:
    return lambda stats, scene: replace(stats, **{field: getattr(scene.kept.setdefault("stats", stats), field)})


def _one_bit_off(value: float) -> float:
    return value * (1 + 2**-23)


def of_other_answers(rng: random.Random) -> tuple[str, Effect]:
    """Draw what happens to the answer of another call than a request."""
    limit = log_count(rng, 2, 1000)

    def rows(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any, Scene], Any]:
        return lambda made, scene: change(made)

    def in_a_batch(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any, Scene], Any]:
        return lambda made, scene: change(made) if len(made) > 1 and scene.config.deterministic else made

    def numbers(change: Callable[[float], float]) -> Callable[[list[Any]], list[Any]]:
        return lambda made: [[*map(change, row)] if isinstance(row, list) else change(row) for row in made]

    pooled = rng.choice(("embed", "reward_score"))
    ways: tuple[tuple[str, str, Callable[[Any, Scene], Any]], ...] = (
        (pooled, "gives each input its neighbour's", rows(lambda made: made[1:] + made[:1])),
        (pooled, "passes through bfloat16", rows(numbers(in_bfloat16))),
        (pooled, "exchanges the last two", rows(lambda made: made[:-2] + made[-2:][::-1])),
        (pooled, "is off in a deterministic batch", in_a_batch(numbers(_one_bit_off))),
        ("stats", "counts one running too few", lambda made, _: replace(made, running=max(made.running - 1, 0))),
        ("stats", "counts none waiting", lambda made, _: replace(made, waiting=0)),
        ("stats", "counts the waiting as running", _with_all_running),
        ("stats", "tells the first KV cache's size", _with_the_first("kv_cache_bytes")),
        ("stats", "tells the first weights' size", _with_the_first("weight_bytes")),
        ("validate_weights", "repeats its first report", lambda made, scene: scene.kept.setdefault("report", made)),
        ("read_weight", "repeats the first tensor of a name", lambda made, s: s.kept.setdefault(made.spec.name, made)),
        ("start", "says a context of half the length", _with_half_the_context),
        ("start", "says one EOS only", lambda made, scene: replace(made, eos_token_ids=made.eos_token_ids[:1])),
        ("start", "says the configured version is initial", _with_the_initial_version),
    )
    method, does, change = rng.choice(ways)
    if method == pooled and rng.random() < 0.3:
        end = rng.choice((slice(None, limit), slice(-limit, None)))

        async def act(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
            return await proceed([ids[end] for ids in arguments[0]], *arguments[1:])

        shows = lambda arguments, scene, error: any(len(ids) > limit for ids in arguments[0])  # noqa: E731
        return f"{pooled} sees {end.start or 0} to {end.stop or 'the end'} of an input", OnCall((pooled,), act, shows)
    return f"{method} {does}", OnAnswer(method, change)
