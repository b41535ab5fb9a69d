"""Output constrained to a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import regex

from drivetrain.errors import InvalidRequest, NoTokenAllowed
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion, FinishReason, GenerationOutput
from drivetrain.types.sampling import ActionMask, EbnfGrammar, JsonSchema, LogprobsMode, RegexGrammar, SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, ordinary_ids
from drivetrain_conformance.references.reference_sampling import step

_ACTIONS: Final = ("buy", "sell", "hold")
_SCHEMA: Final = JsonSchema(
    json_schema=json.dumps(
        {
            "type": "object",
            "properties": {"action": {"enum": _ACTIONS}, "sure": {"type": "boolean"}, "count": {"enum": [1, 22, 333]}},
            "required": ["action", "sure", "count"],
            "additionalProperties": False,
        }
    )
)
_REGEX: Final = RegexGrammar(regex="(cat|dog)-[0-9]{3}")
_OTHER_REGEX: Final = RegexGrammar(regex="[x-z]{5}")
_GRAMMAR: Final = EbnfGrammar(ebnf='root ::= answer " " digit digit\nanswer ::= "yes" | "no"\ndigit ::= [0-9]\n')

_RARER: Final[Sequence[tuple[dict[str, object], Callable[[Any], bool]]]] = (
    (
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
        lambda value: value[0] != value[1],
    ),
    ({"$defs": {"n": {"enum": [1, 22, 333]}}, "$ref": "#/$defs/n", "minimum": 100}, lambda value: value >= 100),
    ({"type": "string", "pattern": "^[ab]{1,8}$", "minLength": 8}, lambda value: len(value) >= 8),
)
"""Schemas with keywords that libraries accept and ignore, and what values of them hold."""

_FIELD: Final = "sampling_params.structured_output"

_ALIKE: Final = {"title": "Answer", "$id": "https://example.org/answer", "description": "One word. " * 60}
"""Keywords that schemas of two versions of a class have in common."""
_NAMESAKES: Final[Sequence[Sequence[str]]] = (("yes", "no"), ("left", "right"), ("up", "down"))
"""Values of schemas that begin alike and have the same title and id."""


@case(Capability.STRUCTURED_JSON)
async def json_follows_the_schema(bench: Bench) -> None:
    """Samples constrained to a JSON schema are JSON with its keys, types and values, and nothing else.

    No schema is taken for another that has its title and id, and begins as it does.
    """
    params = SamplingParams(max_new_tokens=_room(bench), n=4, structured_output=_SCHEMA)
    output = await bench.engine.generate(bench.prompts(2), params)
    for completion in _ended(output.completions):
        value = json.loads(completion.text)
        assert isinstance(value, dict)
        assert set(value) == {"action", "sure", "count"}, f"the schema has other keys: {completion.text!r}"
        assert value["action"] in _ACTIONS
        assert isinstance(value["sure"], bool)
        assert value["count"] in (1, 22, 333)
    for schema, holds in _RARER:
        await _is_held_or_refused(bench, JsonSchema(json_schema=json.dumps(schema)), holds)
    for values in _NAMESAKES:
        namesake = JsonSchema(json_schema=json.dumps({**_ALIKE, "enum": values}))
        await _is_held_or_refused(bench, namesake, partial(operator.contains, values))


@case(Capability.STRUCTURED_REGEX)
async def the_whole_output_matches_the_regex(bench: Bench) -> None:
    """Samples constrained to a regular expression match it and then end, even with ignore_eos."""
    params = SamplingParams(max_new_tokens=_room(bench), n=8, structured_output=_REGEX)
    ignoring = params.model_copy(update={"ignore_eos": bench.claims(Capability.IGNORE_EOS)})
    output = await bench.engine.generate(bench.prompts(2), [params, ignoring])
    texts = [completion.text for half in (slice(8), slice(8, None)) for completion in _ended(output.completions[half])]
    for text in texts:
        assert re.fullmatch(_REGEX.regex, text), f"{text!r} does not match {_REGEX.regex!r}"
    assert len(set(texts)) > 1, f"samples at temperature 1 are all the same: {texts[0]!r}"


@case(Capability.STRUCTURED_EBNF)
async def output_follows_the_grammar(bench: Bench) -> None:
    """Samples constrained to an EBNF grammar are sentences of it."""
    params = SamplingParams(max_new_tokens=_room(bench), n=8, structured_output=_GRAMMAR)
    output = await bench.engine.generate(bench.prompts(2), params)
    for completion in _ended(output.completions):
        assert re.fullmatch("(yes|no) [0-9][0-9]", completion.text), f"{completion.text!r} is no sentence"


@case(Capability.STRUCTURED_REGEX, Capability.STOP_TOKEN_IDS)
async def greedy_output_matches_too(bench: Bench) -> None:
    """At temperature 0 the grammar holds too, the same request has the same answer, and a stop id ends it."""
    params = SamplingParams(max_new_tokens=_room(bench), temperature=0, structured_output=_REGEX)
    prompts = bench.prompts(3)
    first, second = [(await bench.engine.generate(prompts, params)).completions for _ in range(2)]
    for completion in _ended(first):
        assert re.fullmatch(_REGEX.regex, completion.text), f"{completion.text!r} does not match {_REGEX.regex!r}"
    assert [one.text for one in first] == [one.text for one in second]
    within = first[0].token_ids[1]
    stopped = params.model_copy(update={"stop_token_ids": (within,)})
    completion = (await bench.engine.generate(prompts[0], stopped)).completions[0]
    end = first[0].token_ids.index(within) + 1
    assert completion.token_ids == first[0].token_ids[:end], "a stop id within the grammar does not end it"
    assert completion.matched_stop == within


@case(Capability.STRUCTURED_REGEX)
async def a_grammar_holds_its_own_request_alone(bench: Bench) -> None:
    """In a batch each request follows its own grammar, and requests without one answer as they do alone."""
    prompts = bench.prompts(6)
    free = SamplingParams(max_new_tokens=12, temperature=0)
    grammars = (_REGEX, None, _OTHER_REGEX, None, _REGEX, None)
    held = SamplingParams(max_new_tokens=_room(bench))
    params = [held.model_copy(update={"structured_output": one}) if one else free for one in grammars]
    together = (await bench.engine.generate(prompts, params)).completions
    for completion, grammar in zip(together, grammars, strict=True):
        if grammar is not None:
            _ended([completion])
            assert re.fullmatch(grammar.regex, completion.text), f"{completion.text!r} is not {grammar.regex!r}"
    check_same(bench, together[1::2], await bench.greedy(prompts[1::2]))


@case(Capability.STRUCTURED_REGEX)
async def output_that_is_cut_short_begins_a_match(bench: Bench) -> None:
    """Output that reaches its length limit before the grammar's end is the beginning of a match."""
    long = RegexGrammar(regex="[a-f]{64}(cat|dog)")
    params = SamplingParams(max_new_tokens=5, n=4, structured_output=long)
    for completion in (await bench.engine.generate(bench.prompt(), params)).completions:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == 5
        assert regex.fullmatch(long.regex, completion.text, partial=True), f"{completion.text!r} begins no match"


@case(Capability.STRUCTURED_REGEX, Capability.LOGPROBS_RAW)
async def raw_logprobs_are_those_before_the_grammar(bench: Bench) -> None:
    """Raw logprobs are the model's own, one for each token, even where a grammar allows few tokens."""
    params = SamplingParams(
        max_new_tokens=_room(bench), n=2, structured_output=_REGEX, logprobs=0, logprobs_mode=LogprobsMode.RAW
    )
    for completion in _ended((await bench.engine.generate(bench.prompts(2), params)).completions):
        assert re.fullmatch(_REGEX.regex, completion.text), f"{completion.text!r} does not match {_REGEX.regex!r}"
        assert completion.logprobs is not None
        expected = bench.output_logprobs(completion)
        assert len(completion.logprobs) == len(expected)
        worst = max(abs(one - other) for one, other in zip(completion.logprobs, expected, strict=True))
        assert worst <= bench.tolerance(), f"a logprob is {worst:.3g} nats off the model's own"


@case(Capability.STRUCTURED_REGEX, Capability.LOGPROBS_PROCESSED, Capability.TOP_LOGPROBS)
async def processed_logprobs_are_those_within_the_grammar(bench: Bench) -> None:
    """Processed logprobs are those of the tokens that the grammar allows: together they have probability 1."""
    few = RegexGrammar(regex="[01]{4}")
    plain = SamplingParams(
        max_new_tokens=8, n=4, structured_output=few, logprobs=20, logprobs_mode=LogprobsMode.PROCESSED
    )
    tokenizer, ids = bench.engine.tokenizer, ordinary_ids(bench.engine)
    zeros = [token for token in ids if tokenizer([token], skip_special_tokens=True) == "0"]
    prompt = [*bench.prompt(4), *zeros]
    params = [plain, *(plain.model_copy(update=fields) for fields in _fields_within_a_grammar(bench, zeros))]
    for completion in _ended((await bench.engine.generate([prompt] * len(params), params)).completions):
        assert completion.logprobs is not None
        assert completion.top_logprobs is not None
        for token, own, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
            total = sum(math.exp(logprob) for _, logprob in top)
            assert abs(total - 1) <= bench.tolerance(), f"allowed tokens have probability {total:.4g} together: {top}"
            assert abs(dict(top)[token] - own) <= bench.tolerance()
        _check_within_the_grammar(bench, completion, params[completion.prompt_index])


def _fields_within_a_grammar(bench: Bench, tokens: Sequence[int]) -> list[Mapping[str, object]]:
    """Return fields that change the distribution within a grammar which allows ``tokens``: each alone, and all."""
    claimed: dict[str, object] = {
        name: value
        for needed, name, value in (
            (Capability.REPETITION_PENALTY, "repetition_penalty", 1.8),
            (Capability.FREQUENCY_PENALTY, "frequency_penalty", 1.2),
            (Capability.PRESENCE_PENALTY, "presence_penalty", -1.0),
            (Capability.LOGIT_BIAS, "logit_bias", dict.fromkeys(tokens, 1.5)),
        )
        if bench.claims(needed)
    }
    claimed["temperature"] = 1.7
    return [*({name: value} for name, value in claimed.items()), {**claimed, "temperature": 0.6}]


def _check_within_the_grammar(bench: Bench, completion: Completion, params: SamplingParams) -> None:
    """Check processed logprobs by the reference; the alternatives of each token are its whole distribution."""
    rows, drawn = bench.output_logits(completion), completion.token_ids
    slack = 4 * bench.tolerance() / min(1.0, params.temperature)
    for at, (row, top) in enumerate(zip(rows, completion.top_logprobs or (), strict=True)):
        mask = ActionMask(allowed_token_ids=tuple(token for token, _ in top))
        masked = params.model_copy(update={"logit_processors": (mask,)})
        expected = step(row, masked, completion.prompt_token_ids, drawn[:at], bench.tolerance()).processed
        for token, value in top:
            assert abs(value - expected[token]) <= slack, (
                f"within the grammar, with {params!r}, token {token} has logprob {value:.5f} at {at}; "
                f"the reference says {expected[token]:.5f}"
            )


@case(Capability.STRUCTURED_REGEX, Capability.LOGIT_PROCESSORS, Capability.MIN_NEW_TOKENS)
async def what_leaves_no_token_ends_in_an_error(bench: Bench) -> None:
    """If a grammar and masks allow no token, the request fails with NoTokenAllowed, naming them; others go on."""
    tokenizer, prompts = bench.engine.tokenizer, bench.prompts(2)
    letters = tuple(
        token for token in ordinary_ids(bench.engine) if tokenizer([token], skip_special_tokens=True).isalpha()
    )
    digits = SamplingParams(structured_output=RegexGrammar(regex="[0-9]{3}"), max_new_tokens=16)
    masked = digits.model_copy(update={"logit_processors": (ActionMask(allowed_token_ids=letters),)})
    held_back = digits.model_copy(update={"min_new_tokens": 12})
    for params, field in ((masked, "logit_processors"), (held_back, "min_new_tokens")):
        for temperature in (0.0, 1.0):
            with refused(NoTokenAllowed, field=_FIELD, naming=field):
                await bench.engine.generate(prompts[0], params.model_copy(update={"temperature": temperature}))
    before = await bench.greedy(prompts)
    others = bench.engine.generate(prompts[0], masked), bench.engine.generate(prompts[1], digits)
    beside, failed, held = await asyncio.gather(bench.greedy(prompts), *others, return_exceptions=True)
    assert isinstance(failed, NoTokenAllowed), f"it ended as {failed!r}"
    for one in (beside, held):
        if isinstance(one, BaseException):
            raise one
    assert isinstance(beside, list)
    check_same(bench, beside, before)
    assert isinstance(held, GenerationOutput)
    assert re.fullmatch("[0-9]{3}", held.completions[0].text), f"{held.completions[0].text!r} is not of the grammar"


@case()
async def a_schema_that_is_no_json_is_refused(bench: Bench) -> None:
    """A JSON schema that is not JSON, or not a schema, is refused before any work, naming the field.

    A reference that leads out of the schema, such as to a URL, would constrain nothing, and one that leads back to
    itself allows nothing: both are refused too.
    """
    for schema in ('{"type": "object"', "[1, 2]", "", *map(json.dumps, _REFERRING)):
        with refused(InvalidRequest, field=_FIELD):
            await bench.engine.generate(
                bench.prompt(), {"structured_output": {"kind": "json_schema", "json_schema": schema}}
            )


_REFERRING: Final[Sequence[object]] = (
    {"$ref": "https://example.org/answer.json"},
    {"type": "object", "properties": {"a": {"$ref": "answer.json#/$defs/a"}}, "required": ["a"]},
    {"$defs": {"a": {"enum": ["yes"]}}, "anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
    {"$dynamicRef": "#nowhere"},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
)
"""Schemas with references to a URL, to a file, to nothing and to themselves."""


@case()
async def a_regex_that_does_not_compile_is_refused(bench: Bench) -> None:
    """A regular expression that is empty or does not compile is refused before any work, naming the field."""
    for given, words in (("(cat|dog", "(cat"), ("", "at least 1 character")):
        with refused(InvalidRequest, field=_FIELD, naming=words):
            await bench.engine.generate(bench.prompt(), {"structured_output": {"kind": "regex", "regex": given}})


@case(Capability.STRUCTURED_JSON)
async def a_schema_with_unknown_types_is_refused(bench: Bench) -> None:
    """JSON that is not a valid schema is refused as a mistake in the request, and the engine serves on.

    A deeply nested schema is taken, or refused in the same way.
    """
    for broken in ('{"type": "no such type"}', '{"type": "string", "format": []}', '{"allOf": 5}'):
        params = SamplingParams(max_new_tokens=8, structured_output=JsonSchema(json_schema=broken))
        with refused(InvalidRequest, field=_FIELD):
            await bench.engine.generate(bench.prompt(), params)
    deep = JsonSchema(json_schema='{"type": "array", "items": ' * 200 + "{}" + "}" * 200)
    try:
        await bench.engine.generate(bench.prompt(), SamplingParams(max_new_tokens=1, structured_output=deep))
    except InvalidRequest as error:
        _require_grammar_named(error)
    assert (await bench.greedy([bench.prompt()]))[0].token_ids


@case(Capability.STRUCTURED_EBNF)
async def a_grammar_that_does_not_compile_is_refused(bench: Bench) -> None:
    """A grammar that does not compile is refused as a mistake in the request, and the engine serves on."""
    for broken in ("root ::= (((", 'root ::= missing "a"\n'):
        with refused(InvalidRequest, field=_FIELD):
            params = SamplingParams(max_new_tokens=8, structured_output=EbnfGrammar(ebnf=broken))
            await bench.engine.generate(bench.prompt(), params)
    assert (await bench.greedy([bench.prompt()]))[0].token_ids


def _require_grammar_named(error: InvalidRequest) -> None:
    assert error.field.startswith(_FIELD), f"the error names {error.field!r}: {error}"


async def _is_held_or_refused(bench: Bench, schema: JsonSchema, holds: Callable[[Any], bool]) -> None:
    params = SamplingParams(max_new_tokens=_room(bench), n=8, structured_output=schema)
    try:
        output = await bench.engine.generate(bench.prompt(), params)
    except InvalidRequest as error:
        _require_grammar_named(error)
        return
    wrong = [one.text for one in _ended(output.completions) if not holds(json.loads(one.text))]
    assert not wrong, f"{wrong[0]!r} is not of the schema {schema.json_schema}"


def _room(bench: Bench) -> int:
    """Return room for any output of these grammars, including the white space that a schema may leave open."""
    return min(512, bench.engine.model_info.context_length - 16)


def _ended(completions: Sequence[Completion]) -> list[Completion]:
    """Return the completions that reached the grammar's end, at least one: some may write white space to the limit."""
    ended = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    assert ended, f"nothing came to the grammar's end: {[completion.text[:80] for completion in completions]}"
    return ended
