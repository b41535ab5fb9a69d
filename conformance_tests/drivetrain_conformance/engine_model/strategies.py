"""Hypothesis strategies for tests of an engine: prompts, sampling params, batches, weight plans, abort points.

Every drawn value is valid, and an engine with the given capabilities must honour it. Values shrink towards plain ones:
fewer and shorter prompts, greedy sampling, no field set.

    @given(batches(ordinary_ids(engine), engine.capabilities))
    def holds(batch: Batch) -> None: ...
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from drivetrain.engine.validation import MODE_CAPABILITY
from drivetrain.types.capability import Capability
from drivetrain.types.prompts import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    EbnfGrammar,
    JsonSchema,
    LogitProcessor,
    LogprobsMode,
    RegexGrammar,
    SamplingParams,
    StructuredOutput,
    TemperatureSchedule,
)
from drivetrain_conformance.references.reference_sampling import FLAT

_T = TypeVar("_T")

LONGEST: Final = 480
"""Most tokens of a drawn prompt, and of a drawn output."""
_FINEST: Final = 1000

# Numbers -------------------------------------------------------------------------------------------------------------


def numbers(low: float, high: float) -> SearchStrategy[float]:
    """Draw numbers of three digits, each order of magnitude as often as any other.

    Few of them survive a conversion to 16 bits, so that an engine that rounds a field is found.
    """
    return st.integers(0, _FINEST).map(lambda step: float(f"{low * (high / low) ** (step / _FINEST):.3g}"))


def counts(low: int, high: int) -> SearchStrategy[int]:
    """Draw whole numbers, each order of magnitude as often as any other."""
    return numbers(low, high).map(round)


def signed(high: float) -> SearchStrategy[float]:
    """Draw numbers of either sign up to ``high``, and 0."""
    return st.just(0.0) | numbers(high / 100, high) | numbers(high / 100, high).map(lambda number: -number)


def sometimes(usual: SearchStrategy[_T], rare: SearchStrategy[_T], odds: int = 8) -> SearchStrategy[_T]:
    """Draw from ``rare`` once in ``odds`` times."""
    return st.integers(1, odds).flatmap(lambda one: rare if one == odds else usual)


# Prompts -------------------------------------------------------------------------------------------------------------

_CHARACTERS: Final = "aeiou nst ABC 0129 .,;:!?\n\t'\"<>{}[]()/\\|-_ éßñ Ωж 漢字 نص עב 🙂👩‍🚀🇫🇷 ́ ﬁ ½"
"""Characters of one to four bytes; some combine with the previous one, some are several code points."""


def token_prompts(ids: Sequence[int], lengths: SearchStrategy[int] | None = None) -> SearchStrategy[TokenPrompt]:
    """Draw prompts of these token ids, of up to 24 ids, or of these lengths; long ones repeat a few ids over and over.

    Unless lengths are given, one prompt in eight is long.
    """
    chosen = st.lists(st.sampled_from(ids), min_size=1, max_size=24).map(tuple)
    if lengths is None:
        lengths = sometimes(st.just(0), counts(24, LONGEST))
    repeated = st.builds(lambda few, length: (few * max(length, 1))[: max(length, len(few))], chosen, lengths)
    return st.builds(TokenPrompt, token_ids=repeated)


def texts(max_length: int = 24) -> SearchStrategy[str]:
    """Draw texts that begin with a letter, which any tokenizer has a token for; multi-byte characters follow."""
    characters = st.sampled_from(_CHARACTERS) | st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co"))
    return st.builds(
        lambda first, rest: first + rest, st.sampled_from("abcxyz"), st.text(characters, max_size=max_length)
    )


def text_prompts() -> SearchStrategy[TextPrompt]:
    """Draw text prompts."""
    return st.builds(TextPrompt, text=texts(), add_special_tokens=st.booleans())


def chat_prompts() -> SearchStrategy[ChatPrompt]:
    """Draw conversations in which user and assistant alternate, and the user has the last word."""

    def conversation(contents: list[str]) -> ChatPrompt:
        contents = contents if len(contents) % 2 else contents[:-1]
        turns = [Message(role=("user", "assistant")[i % 2], content=content) for i, content in enumerate(contents)]
        return ChatPrompt(messages=tuple(turns))

    return st.lists(texts(max_length=16), min_size=1, max_size=3).map(conversation)


def prompts(ids: Sequence[int], *, chat: bool) -> SearchStrategy[Prompt]:
    """Draw prompts of every kind; chat messages only if the model's tokenizer has a template for them."""
    kinds: list[SearchStrategy[Any]] = [token_prompts(ids), text_prompts()]
    if chat:
        kinds.append(chat_prompts())
    return st.one_of(kinds)


# Sampling params -----------------------------------------------------------------------------------------------------

_STOP_PATTERNS: Final = (r"[0-9]", r"[aeiou]", r"[A-Z]", r"[\x80-\u07ff]", r"[a-zA-Z][ -@]", r"a+b|[c-z]")
"""None matches the replacement character, which is shown for part of a character and later replaced."""
_SCHEMA: Final = json.dumps(
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
)
_EBNF: Final = 'root ::= ("yes" | "no") digit\ndigit ::= [0-9]'
EBNF_AS_REGEX: Final = "(yes|no)[0-9]"
"""The language of the grammar in drawn params."""
SCHEMA_AS_REGEX: Final = r'\s*\{\s*"ok"\s*:\s*(true|false)\s*\}\s*'
"""The language of the schema in drawn params."""
_GRAMMARS: Final[tuple[tuple[Capability, StructuredOutput], ...]] = (
    (Capability.STRUCTURED_REGEX, RegexGrammar(regex=r"[ab]{1,3}[0-9]")),
    (Capability.STRUCTURED_EBNF, EbnfGrammar(ebnf=_EBNF)),
    (Capability.STRUCTURED_JSON, JsonSchema(json_schema=_SCHEMA)),
)


_SELDOM: Final = (False, False, False, True)
_OFTEN: Final = (False, True, True)
"""Most requests set few fields; some set most, so that all pairs of fields meet."""
_HEAT: Final = sometimes(numbers(0.25, 2.0), numbers(0.01, 100.0), 4)
_LARGE_SEEDS: Final = st.integers(2**62, 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of random requests: strategies of some fields, and the odds of others."""

    tokens: SearchStrategy[int]
    samples: SearchStrategy[int]
    temperatures: SearchStrategy[float]
    seeds: SearchStrategy[int]
    odds: SearchStrategy[Sequence[bool]]
    """Drawn once for a request; each field is then set with these odds."""
    always: frozenset[str] = frozenset()
    """Fields that are set whenever the engine can honour them."""
    seldom: frozenset[str] = frozenset()
    """Fields that are set in one request of four."""
    never: frozenset[str] = frozenset()
    stops: Sequence[str] = ("", "", "", "strings", "expressions", "both")
    """Kinds of text stops, of which one is drawn."""


MIXED: Final = Kind(
    tokens=sometimes(st.integers(1, 16) | st.just(16), counts(16, LONGEST)),
    samples=st.integers(1, 3),
    temperatures=st.just(0.0) | _HEAT,
    seeds=_LARGE_SEEDS | st.integers(0, 3),
    odds=st.sampled_from((_SELDOM, _OFTEN)),
)
"""Any mixture of fields."""


_DECISIVE: Final = frozenset({"top_k", "top_p", "min_p", "logit_bias", "structured_output"})
"""Fields that may leave one token to draw, so that no seed matters, or end a request early."""


def lasting(least: int, most: int) -> Kind:
    """Return seeded requests of many fields that no stop ends, of ``least`` to ``most`` tokens.

    Fields in :data:`_DECISIVE` are seldom set.
    """
    return Kind(
        tokens=counts(least, most),
        samples=st.just(1),
        temperatures=st.sampled_from((0.0, 1.0, 1.0)).flatmap(lambda warm: _HEAT if warm else st.just(0.0)),
        seeds=_LARGE_SEEDS,
        odds=st.just(_OFTEN),
        always=frozenset({"seed", "ignore_eos"}),
        seldom=_DECISIVE,
        never=frozenset({"stop_token_ids"}),
        stops=("",),
    )


@st.composite
def sampling_params(
    draw: DrawFn,
    vocabulary: Sequence[int],
    capabilities: frozenset[Capability],
    kind: Kind = MIXED,
    stops: Sequence[str] = tuple("aeiou 012"),
) -> SamplingParams:
    """Draw params with any of the fields that the capabilities allow.

    Args:
        draw: Given by hypothesis.
        vocabulary: Token ids that fields may name.
        capabilities: The engine's capabilities. A field that needs another one is never set.
        kind: The kind of requests.
        stops: Parts of stop strings, best ones that the model is likely to write.
    """
    ids = st.sampled_from(vocabulary)
    fields: dict[str, Any] = {}
    odds = draw(kind.odds)

    def always(field: str, values: SearchStrategy[Any], *needed: Capability) -> bool:
        """Set a field, if the engine claims the capabilities that it needs."""
        if not capabilities.issuperset(needed):
            return False
        fields[field] = draw(values)
        return True

    def maybe(field: str, values: SearchStrategy[Any], *needed: Capability) -> bool:
        """Set a field as often as the kind of requests says."""
        if field in kind.never:
            return False
        own = _SELDOM if field in kind.seldom else odds
        return (field in kind.always or draw(st.sampled_from(own))) and always(field, values, *needed)

    if maybe("prompt_logprobs", st.integers(0, 3), Capability.PROMPT_LOGPROBS):
        maybe("return_prompt_ranks", st.just(True), Capability.PROMPT_RANKS)
    if Capability.SCORE_TOKENS in capabilities and draw(st.integers(0, 15)) == 15:
        return SamplingParams.model_validate({**fields, "max_new_tokens": 0})
    fields["max_new_tokens"] = most = draw(kind.tokens)
    fields["n"] = draw(kind.samples)
    fields["temperature"] = temperature = draw(kind.temperatures)
    maybe("skip_special_tokens", st.just(False))
    modes = [mode for mode, capability in MODE_CAPABILITY.items() if capability in capabilities]
    wants_logprobs: bool = draw(st.booleans())
    if modes and wants_logprobs:
        fields["logprobs"] = draw(st.integers(0, 4 if Capability.TOP_LOGPROBS in capabilities else 0))
        fields["logprobs_mode"] = draw(st.sampled_from(modes))
    maybe("return_hidden_states", st.just(True), Capability.HIDDEN_STATES)
    maybe("return_routed_experts", st.just(True), Capability.ROUTED_EXPERTS)
    maybe("return_prompt_routed_experts", st.just(True), Capability.PROMPT_ROUTED_EXPERTS)
    maybe("return_sampling_mask", st.just(True), Capability.SAMPLING_MASK)
    maybe("seed", kind.seeds, Capability.SEED)
    maybe("top_k", st.integers(1, 8) | counts(1, len(vocabulary)), Capability.TOP_K)
    maybe("top_p", numbers(0.003, 1.0), Capability.TOP_P)
    maybe("min_p", st.just(0.0) | numbers(0.001, 1.0), Capability.MIN_P)
    # A grammar itself says where output ends and what may be drawn; fields that contradict it have no correct result.
    grammars = [grammar for capability, grammar in _GRAMMARS if capability in capabilities]
    if grammars and maybe("structured_output", st.sampled_from(grammars)):
        return SamplingParams.model_validate(fields)
    maybe("min_new_tokens", st.integers(0, most), Capability.MIN_NEW_TOKENS)
    maybe("ignore_eos", st.just(True), Capability.IGNORE_EOS)
    maybe("repetition_penalty", sometimes(numbers(0.5, 2.0), numbers(0.1, 10.0), 4), Capability.REPETITION_PENALTY)
    maybe("frequency_penalty", signed(2.0), Capability.FREQUENCY_PENALTY)
    maybe("presence_penalty", signed(2.0), Capability.PRESENCE_PENALTY)
    some = sometimes(_few(ids), _many(vocabulary), 4)
    maybe("logit_bias", some.flatmap(_biased), Capability.LOGIT_BIAS)
    maybe("stop_token_ids", some, Capability.STOP_TOKEN_IDS)
    either = draw(st.sampled_from(kind.stops))
    strings = st.sampled_from(stops) | st.lists(st.sampled_from(stops), min_size=2, max_size=3).map("".join)
    stop = either in ("strings", "both") and always("stop", _few(strings), Capability.STOP_STRINGS)
    expressions = _few(st.sampled_from(_STOP_PATTERNS))
    stop_regex = either in ("expressions", "both") and always("stop_regex", expressions, Capability.STOP_REGEX)
    if stop or stop_regex:
        fields["include_stop_str_in_output"] = draw(st.booleans())
    maybe("logit_processors", _processors(some, heated=temperature > 0), Capability.LOGIT_PROCESSORS)
    if any(
        isinstance(one, ActionMask) and set(one.allowed_token_ids) <= {*fields.get("stop_token_ids", ())}
        for one in fields.get("logit_processors", ())
    ):
        # Before min_new_tokens, a mask of stop ids alone would allow no token.
        del fields["stop_token_ids"]
    return SamplingParams.model_validate(fields)


def _few(items: SearchStrategy[_T]) -> SearchStrategy[tuple[_T, ...]]:
    return st.lists(items, min_size=1, max_size=6, unique=True).map(tuple)


def _many(vocabulary: Sequence[int]) -> SearchStrategy[tuple[int, ...]]:
    """Draw up to a third of the vocabulary: ids to exclude, with ids to stop at, then leave tokens to draw."""
    most = max(1, len(vocabulary) // 3)
    orders = st.integers(0, 2**16).map(lambda seed: random.Random(seed).sample(vocabulary, most))
    return st.builds(lambda order, count: tuple(order[:count]), orders, counts(1, most))


def _biased(ids: Sequence[int]) -> SearchStrategy[dict[int, float]]:
    """Draw a bias for each of these ids, up to five different ones."""
    values = st.lists(signed(32.0), min_size=1, max_size=5)
    return values.map(lambda few: {one: few[place % len(few)] for place, one in enumerate(ids)})


def _processors(ids: SearchStrategy[tuple[int, ...]], *, heated: bool) -> SearchStrategy[tuple[LogitProcessor, ...]]:
    """Draw a mask or a list of disallowed ids, never both, as together they may allow no token."""
    masks: SearchStrategy[Any] = st.builds(ActionMask, allowed_token_ids=ids) | st.builds(
        DisallowedTokens, token_ids=ids
    )
    if not heated:
        return masks.map(lambda mask: (mask,))
    temperatures = numbers(0.25, 2.0)
    steps = sometimes(st.integers(1, 8), counts(8, 2 * LONGEST), 4)
    schedules = st.builds(TemperatureSchedule, start=temperatures, end=temperatures, steps=steps)
    both = st.tuples(masks, schedules)
    return masks.map(lambda mask: (mask,)) | schedules.map(lambda schedule: (schedule,)) | both


# Batches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """One call: prompts, and the params of each."""

    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]


def batches(
    ids: Sequence[int],
    capabilities: frozenset[Capability],
    *,
    chat: bool,
    stops: Sequence[str] = tuple("aeiou 012"),
) -> SearchStrategy[Batch]:
    """Draw calls of several prompts of any kind, each with its own params; see :func:`sampling_params`."""
    params = sampling_params(ids, capabilities, stops=stops)
    pairs = st.lists(st.tuples(prompts(ids, chat=chat), params), min_size=1, max_size=4)
    crowds = st.lists(st.tuples(prompts(ids, chat=chat), params), min_size=2, max_size=2).map(lambda two: 12 * two)
    return sometimes(pairs, crowds, 24).map(_batch)


def lasting_batches(
    ids: Sequence[int], capabilities: frozenset[Capability], least: int, most: int, context: int = 2 * LONGEST
) -> SearchStrategy[Batch]:
    """Draw calls of several requests of the kind :func:`lasting`.

    The last two differ in one bit of their seeds alone, and are drawn from all tokens alike, or they have precise
    numbers. One prompt in six fills the ``context``, together with the longest output.
    """
    lasts = sampling_params(ids, capabilities, lasting(least, most))
    longest = context - most
    begins = token_prompts(ids, sometimes(counts(1, longest), st.just(longest), 6))
    calls = st.lists(st.tuples(begins, lasts), min_size=3, max_size=5)
    precise = st.sampled_from([(), _precise(ids, capabilities)])
    return st.builds(_with_twins, calls, st.integers(0, 9) | st.integers(0, 62), precise)


def _with_twins(calls: Sequence[tuple[Prompt, SamplingParams]], bit: int, precise: Sequence[SamplingParams]) -> Batch:
    """Add one of the calls with precise numbers; without these, so hot that no context matters, with two seeds."""
    drawn = [call for call in calls if call[1].max_new_tokens]
    if not drawn:
        return _batch(calls)
    prompt, params = drawn[0]
    fields = params.model_dump(include=params.model_fields_set - _DECISIVE - {"structured_output", "logit_processors"})
    seeds = [] if precise or params.seed is None else [params.seed, params.seed ^ 1 << bit]
    added = [SamplingParams.model_validate({**fields, "temperature": FLAT, "seed": seed}) for seed in seeds]
    added += [one.model_copy(update={"max_new_tokens": params.max_new_tokens}) for one in precise]
    return _batch([*calls, *((prompt, one) for one in added)])


def _precise(ids: Sequence[int], capabilities: frozenset[Capability]) -> list[SamplingParams]:
    """Return params whose numbers 16 bits cannot hold, and whose logprobs show an engine that rounds them.

    Biases make the temperature's error large, and repeated tokens those of penalties. Among tokens of about equal
    probability, the logprob of each shows the width of a nucleus.
    """
    if not capabilities.issuperset({Capability.LOGPROBS_PROCESSED, Capability.TOP_LOGPROBS, Capability.LOGIT_BIAS}):
        return []
    fields: dict[str, object] = {"temperature": 4.0019, "logprobs": 8, "logprobs_mode": LogprobsMode.PROCESSED}
    fields["logit_bias"] = {**dict.fromkeys(ids[:4], 32.0), **dict.fromkeys(ids[4:8], -32.0)}
    for field, needed, value in (
        ("repetition_penalty", Capability.REPETITION_PENALTY, 0.12506),
        ("frequency_penalty", Capability.FREQUENCY_PENALTY, -1.00048),
        ("ignore_eos", Capability.IGNORE_EOS, True),
        ("seed", Capability.SEED, 2**62 + 1),
    ):
        if needed in capabilities:
            fields[field] = value
    found = [SamplingParams.model_validate(fields)]
    if Capability.TOP_P in capabilities:
        flat = {name: fields[name] for name in ("logprobs", "logprobs_mode", "ignore_eos", "seed") if name in fields}
        found.append(SamplingParams.model_validate({**flat, "temperature": FLAT, "top_p": 0.50195}))
    return found


def _batch(calls: Sequence[tuple[Prompt, SamplingParams]]) -> Batch:
    return Batch(tuple(prompt for prompt, _ in calls), tuple(one for _, one in calls))


# Weight updates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightPlanChoice:
    """Order of one push's tensors, and their split into buckets."""

    bucket_bytes: int
    order: int = 0
    """Order of the tensors, or of the buckets: 0 keeps it, other values seed a shuffle (:func:`shuffled`)."""


def weight_plans(total_bytes: int) -> SearchStrategy[WeightPlanChoice]:
    """Draw bucket sizes from a single byte (a layer always travels whole) to ``total_bytes``, in any order."""
    sizes = st.sampled_from([total_bytes, max(1, total_bytes // 3), 1]) | st.integers(1, total_bytes)
    return st.builds(WeightPlanChoice, bucket_bytes=sizes, order=st.integers(0, 2**16))


def shuffled(items: Sequence[_T], order: int) -> list[_T]:
    """Shuffle the items with the seed ``order``; 0 leaves them as they are."""
    found = list(items)
    if order:
        random.Random(order).shuffle(found)
    return found


# Aborts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AbortPoint:
    """The moment at which a request is aborted."""

    tokens: int | None
    """At once (0), after this many tokens, or after its end (None)."""


def abort_points(max_tokens: int) -> SearchStrategy[AbortPoint]:
    """Draw an abort at once, after up to ``max_tokens`` tokens, or after the end."""
    return st.builds(AbortPoint, st.just(0) | st.integers(1, max_tokens) | st.none())
