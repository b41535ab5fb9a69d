"""The same requests on every backend: :func:`record` asks one engine, :func:`compare` puts two recordings together.

Each engine has its own environment, so it is recorded by itself, with the same weights, and the recordings are compared
afterwards. If the two most likely tokens differ by less than the dtype's tolerance, engines may choose either. The rest
of the answers then differs, and is not compared.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, UnsupportedCapability
from drivetrain.types.outputs import Completion, GenerationOutput
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.harness.report_files import read_json, today
from drivetrain_conformance.harness.testbench import ordinary_ids
from drivetrain_conformance.reports.report import Hardware, hardware_here

FORMAT: Final = 1

_NEW = "parity-2"
_TOP = 5
_SCHEMA = '{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}'


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one completion that do not change from call to call, as ids and times do."""

    token_ids: list[int]
    text: str
    finish_reason: str
    matched_stop: int | str | None
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    prompt_logprobs: list[float | None] | None
    weight_versions: list[tuple[str, int, int]]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error."""

    error: str
    field: str
    message: str
    unclaimed: bool
    """True if the backend does not claim a capability that the request needs."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request's name, and its answer or error."""

    name: str
    drawn: bool = False
    """Its tokens were drawn, with a seed: the least difference of logits may lead to another."""
    answers: list[Answer] = []
    refusal: Refusal | None = None


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's answers to all requests."""

    format: int
    backend: str
    versions: dict[str, str]
    hardware: Hardware
    dtype: str
    date: str
    weights: str
    """Digest of the model's files."""
    exchanges: list[Exchange]


Ask = Callable[[InferenceEngine], Awaitable[GenerationOutput]]
_DRAWN: Final = frozenset(
    {"a seed", "a seed, several samples", "logprobs raw", "logprobs temperature", "logprobs processed"}
)


def _requests(engine: InferenceEngine, other: Path) -> Iterator[tuple[str, Ask]]:
    """Yield each request with its name. Some contain the engine's answers to earlier requests."""
    draw, ids = random.Random(0), ordinary_ids(engine)
    prompts = [[draw.choice(ids) for _ in range(length)] for length in (3, 6, 17, 40)]
    prompt, text = prompts[1], engine.decode(prompts[2])
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "logprobs": _TOP, "ignore_eos": True}

    def asks(prompt: Any, **fields: Any) -> Ask:
        async def ask(engine: InferenceEngine) -> GenerationOutput:
            return await engine.generate(prompt, {**greedy, **fields})

        return ask

    for one in prompts:
        yield f"greedy, a prompt of {len(one)} tokens", asks(one)
    yield "greedy, a batch", asks(prompts)
    yield "greedy, a prompt of text", asks(text)
    yield "greedy, 200 tokens", asks(prompt, max_new_tokens=200)
    yield "a seed", asks(prompt, temperature=1.0, seed=7)
    yield "a seed, several samples", asks(prompt, temperature=0.8, seed=7, n=3, top_p=0.9, top_k=20)
    for mode in ("raw", "temperature", "processed"):
        yield f"logprobs {mode}", asks(prompt, temperature=0.7, seed=1, top_p=0.8, logprobs_mode=mode)
    yield "logprobs of the prompt", asks(prompts[2], prompt_logprobs=2)
    yield "a score", asks(prompts[3], max_new_tokens=0, prompt_logprobs=0)
    yield "penalties", asks(prompt, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    yield "a bias", asks(prompt, logit_bias={ids[3]: 30.0})
    yield "only some tokens", asks(prompt, logit_processors=[{"kind": "action_mask", "allowed_token_ids": ids[:9]}])
    yield "no logprobs", asks(prompt, logprobs=None)
    yield "one token", asks(prompt, max_new_tokens=1)
    end = engine.model_info.eos_token_ids[0]
    yield "the end of the text", asks(prompt, logit_bias={end: 100.0}, ignore_eos=False)
    yield "past the end of the text", asks(prompt, logit_bias={end: 100.0}, max_new_tokens=5)
    yield from _stops(prompt, ids, asks)
    for name, grammar in (
        ("a regex", {"kind": "regex", "regex": "[0-9]{3}-[a-f]{4}"}),
        ("an EBNF", {"kind": "ebnf", "ebnf": 'root ::= "yes" | "no"'}),
        ("JSON", {"kind": "json_schema", "json_schema": _SCHEMA}),
    ):
        yield f"held to {name}", asks(prompt, structured_output=grammar, ignore_eos=False)
    yield from _mistakes(engine, prompt, asks)

    async def after_an_update(engine: InferenceEngine) -> GenerationOutput:
        await engine.load_weights_from_disk(str(other), _NEW)
        return await engine.generate(prompts, greedy)

    yield "after an update", after_an_update


def _stops(prompt: list[int], ids: list[int], asks: Callable[..., Ask]) -> Iterator[tuple[str, Ask]]:
    printable: dict[str, Any] = {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": ids}]}

    async def at(engine: InferenceEngine, make: Callable[[Completion], dict[str, Any]]) -> GenerationOutput:
        free = (await asks(prompt, **printable)(engine)).completions[0]
        return await asks(prompt, **printable, **make(free))(engine)

    def part(completion: Completion, start: int, end: int) -> str:
        return completion.text[start:end]  # of a token each

    makers: dict[str, Callable[[Completion], dict[str, Any]]] = {
        "a stop id": lambda free: {"stop_token_ids": [free.token_ids[5]]},
        "a stop string": lambda free: {"stop": part(free, 6, 8)},
        "a stop string, kept": lambda free: {"stop": part(free, 6, 8), "include_stop_str_in_output": True},
        "the first of two stop strings": lambda free: {"stop": [part(free, 9, 11), part(free, 4, 5)]},
        "a stop string after enough tokens": lambda free: {"stop": part(free, 3, 4), "min_new_tokens": 10},
        "a stop pattern": lambda free: {"stop_regex": "[^a-z][a-z]+[^a-z]"},
        "a stop id in the last place": lambda free: {"stop_token_ids": [free.token_ids[3]], "max_new_tokens": 4},
    }
    for name, make in makers.items():
        yield name, lambda engine, make=make: at(engine, make)  # type: ignore[misc]


def _mistakes(engine: InferenceEngine, prompt: list[int], asks: Callable[..., Ask]) -> Iterator[tuple[str, Ask]]:
    info = engine.model_info
    mistakes: dict[str, tuple[Any, dict[str, Any]]] = {
        "an empty prompt": ([], {}),
        "an id outside the vocabulary": ([*prompt, info.vocab_size], {}),
        "a negative id": ([*prompt, -1], {}),
        "a prompt longer than the context": ([prompt[0]] * (info.context_length + 1), {}),
        "more tokens than the context has": (prompt, {"max_new_tokens": info.context_length}),
        "a stop id outside the vocabulary": (prompt, {"stop_token_ids": [info.vocab_size]}),
        "a bias outside the vocabulary": (prompt, {"logit_bias": {info.vocab_size: 1.0}}),
        "a negative temperature": (prompt, {"temperature": -1}),
        "an unknown param": (prompt, {"temprature": 1.0}),
        "a pattern that does not compile": (prompt, {"stop_regex": "("}),
        "a schema that is none": (prompt, {"structured_output": {"kind": "json_schema", "json_schema": "{"}}),
        "a grammar that is none": (prompt, {"structured_output": {"kind": "ebnf", "ebnf": "root ::= ("}}),
    }
    for name, (wrong, fields) in mistakes.items():
        yield f"refused: {name}", asks(wrong, **fields)

    async def unknown_adapter(engine: InferenceEngine) -> GenerationOutput:
        return await engine.generate(prompt, {"max_new_tokens": 1}, lora="nowhere")

    yield "refused: an adapter that is not loaded", unknown_adapter


async def record(backend: str, dtype: str, fields: Mapping[str, object]) -> Recording:
    """Ask one engine everything, over the suite's tiny model.

    Args:
        backend: Name of the backend.
        dtype: Dtype of the model's weights.
        fields: Further fields of the engine's configuration.

    Raises:
        DrivetrainError: the engine does not start.
    """
    models = Models(dtype=dtype)
    try:
        model = models.path(ModelKind.TEXT)
        other = models.with_other_weights(model)
        digest = hashlib.sha256()
        for folder in (model, other):
            digest.update((folder / "model.safetensors").read_bytes())
        exchanges: list[Exchange] = []
        async with create_engine({"backend": backend, "model": str(model), **fields}) as engine:
            for name, ask in _requests(engine, other):
                exchanges.append(await _exchange(engine, name, ask))
            return Recording(
                format=FORMAT,
                backend=backend,
                versions=dict(sorted(engine.versions.items())),
                hardware=hardware_here(),
                dtype=engine.model_info.dtype,
                date=today(),
                weights=digest.hexdigest()[:16],
                exchanges=exchanges,
            )
    finally:
        models.close()


async def _exchange(engine: InferenceEngine, name: str, ask: Ask) -> Exchange:
    try:
        output = await ask(engine)
    except DrivetrainError as error:
        refusal = Refusal(
            error=type(error).__name__,
            field=getattr(error, "field", ""),
            message=str(error),
            unclaimed=isinstance(error, UnsupportedCapability),
        )
        return Exchange(name=name, drawn=name in _DRAWN, refusal=refusal)
    return Exchange(name=name, drawn=name in _DRAWN, answers=[_answer(completion) for completion in output.completions])


def _answer(completion: Completion) -> Answer:
    return Answer(
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason.value,
        matched_stop=completion.matched_stop,
        logprobs=_rounded(completion.logprobs),
        top_logprobs=(
            None
            if completion.top_logprobs is None
            else [[(token, round(logprob, 6)) for token, logprob in top] for top in completion.top_logprobs]
        ),
        prompt_logprobs=_rounded(completion.prompt_logprobs),
        weight_versions=[(span.version, span.start, span.end) for span in completion.weight_versions],
    )


def _rounded(values: list[float] | list[float | None] | None) -> Any:
    return None if values is None else [None if value is None else round(value, 6) for value in values]


def read_recording(path: Path) -> Recording:
    """Read a recording of 'drivetrain record'.

    Raises:
        InvalidConfig: the file cannot be read, holds no recording, or one in another format.
    """
    return read_json(path, Recording, "recording", "record", FORMAT)


# Comparing -----------------------------------------------------------------------------------------------------------


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two engines' answers to one request."""

    difference: str = ""
    """The first difference, in words; empty if there is none."""
    tie: int | None = None
    """Index of the token where a tie let the answers diverge; later tokens are not compared."""
    largest: float = 0.0
    """Largest difference of two logprobs, in nats."""
    unclaimed: bool = False
    """True if one of them does not claim a capability that the request needs."""


def compare(one: Exchange, other: Exchange, tolerance: float) -> Agreement:
    """Compare answers to the same request; ``tolerance`` is for logprobs, in nats."""
    if one.refusal is not None or other.refusal is not None:
        return _compare_refusals(one.refusal, other.refusal)
    if len(one.answers) != len(other.answers):
        return Agreement(difference=f"{len(one.answers)} completions and {len(other.answers)}")
    pairs = zip(one.answers, other.answers, strict=True)
    found = [_compare_answers(*pair, tolerance, drawn=one.drawn) for pair in pairs]
    ties = [agreement.tie for agreement in found if agreement.tie is not None]
    return Agreement(
        difference=next((agreement.difference for agreement in found if agreement.difference), ""),
        tie=min(ties) if ties else None,
        largest=max((agreement.largest for agreement in found), default=0.0),
    )


def _compare_refusals(one: Refusal | None, other: Refusal | None) -> Agreement:
    if (one is not None and one.unclaimed) or (other is not None and other.unclaimed):
        return Agreement(unclaimed=True)
    if one is None or other is None:
        refusal = one or other
        assert refusal is not None
        return Agreement(difference=f"one refuses with {refusal.error}: {refusal.message}")
    for name in ("error", "field", "message"):
        if getattr(one, name) != getattr(other, name):
            return Agreement(difference=f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}")
    return Agreement()


def _compare_answers(one: Answer, other: Answer, tolerance: float, *, drawn: bool) -> Agreement:
    same = next(
        (place for place, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if pair[0] != pair[1]),
        min(len(one.token_ids), len(other.token_ids)),
    )
    largest = max(_largest(one.logprobs, other.logprobs, same), _largest(one.prompt_logprobs, other.prompt_logprobs))
    if largest > tolerance:
        return Agreement(difference=f"logprobs differ by {largest:.2g} nats", largest=largest)
    if one.token_ids != other.token_ids:
        both_go_on = same < min(len(one.token_ids), len(other.token_ids))
        if both_go_on and (drawn or _is_tie(one, other, same, tolerance)):
            return Agreement(tie=same, largest=largest)
        return Agreement(difference=f"token {same} differs", largest=largest)
    for name in ("text", "finish_reason", "matched_stop", "weight_versions"):
        if getattr(one, name) != getattr(other, name):
            return Agreement(difference=f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}", largest=largest)
    return Agreement(largest=largest)


def _largest(one: list[Any] | None, other: list[Any] | None, count: int | None = None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    pairs = [(a, b) for a, b in zip(one[:count], other[:count], strict=count is None) if a is not None]
    return float(np.abs(np.subtract(*np.transpose(pairs))).max()) if pairs else 0.0


def _is_tie(one: Answer, other: Answer, place: int, tolerance: float) -> bool:
    """Return whether each engine gives both tokens the same logprob, within ``tolerance``."""
    for answer, token in ((one, other.token_ids[place]), (other, one.token_ids[place])):
        if answer.top_logprobs is None or answer.logprobs is None:
            return False
        rival = dict(answer.top_logprobs[place]).get(token, -math.inf)
        if abs(answer.logprobs[place] - rival) > tolerance:
            return False
    return True
