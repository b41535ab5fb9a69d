"""Sampling parameters: the distribution that tokens are drawn from, and the ends of generation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictInt,
    field_validator,
    model_validator,
)

from drivetrain.checks import limits
from drivetrain.checks.enum_fields import BY_NAME
from drivetrain.checks.name_hints import SAMPLING_NAMES, SAMPLING_VALUES
from drivetrain.checks.regular_expressions import compiled
from drivetrain.checks.safe_repr import shown
from drivetrain.types.token_ids import TokenId

_StopText = Annotated[str, Field(max_length=limits.MOST_STOP_CHARACTERS)]


def _no_other_type(value: object) -> object:
    """Reject booleans and strings, which pydantic would coerce to numbers."""
    if isinstance(value, bool | str | bytes):
        raise ValueError(f"it is a {type(value).__name__}; expected a number")
    return value


Number = Annotated[FiniteFloat, BeforeValidator(_no_other_type)]
"""A finite number; a boolean or text is none."""
INT32_MAX: Final = 2**31 - 1
MIN_TEMPERATURE: Final = 1e-6
"""Smallest non-zero temperature. Within this and the bounds below, a logit divided by it stays within float32."""
MAX_MAGNITUDE: Final = 1e30
"""Upper bound of a temperature, and of a logit bias in either direction."""
MAX_REPETITION_PENALTY: Final = 1e6
MIN_TOP_P: Final = 2.0**-126
"""Smallest normal float32; most devices flush smaller numbers to 0."""


def _temperature(value: float) -> float:
    if value and not MIN_TEMPERATURE <= value <= MAX_MAGNITUDE:
        raise ValueError(
            f"expected 0 (greedy), or a number from {MIN_TEMPERATURE:g} to {MAX_MAGNITUDE:g}: float32 logits are "
            "divided by it"
        )
    return value


Temperature = Annotated[Number, Field(ge=0), AfterValidator(_temperature)]


class LogprobsMode(Enum):
    """The distribution that a logprob belongs to."""

    RAW = "raw"
    """The model's own distribution: ``log_softmax(logits)``."""
    TEMPERATURE = "temperature"
    """``log_softmax(logits / temperature)``: before penalties, bias and top-k/top-p/min-p; raw when greedy."""
    PROCESSED = "processed"
    """The distribution that was sampled from, after all processing; a point mass when greedy."""


class _Frozen(BaseModel):
    # Instances are checked again: model_copy(update=…) and model_construct() check nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")


class JsonSchema(_Frozen):
    """Constrain the output to a JSON schema."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: str = Field(description="The schema, as JSON text.")

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: str) -> str:
        try:
            schema = json.loads(value)
        except ValueError as error:  # invalid JSON, or a number with too many digits
            raise ValueError(f"the schema is no JSON: {error}") from None
        except RecursionError:
            raise ValueError("the schema is nested too deeply to be read; flatten it") from None
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a JSON schema is an object; this is a {type(schema).__name__}")
        for reference in _references(schema):
            if _target(reference, schema) is _NOTHING:
                raise ValueError(
                    f"$ref {shown(reference)} leads to nothing in the schema; write what it stands for into '$defs', "
                    "and refer to it as '#/$defs/NAME'"
                )
        if (circular := _circular_reference(schema)) is not None:
            raise ValueError(f"$ref {shown(circular)} leads back to itself, so that it stands for no value")
        return value


DATA: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a JSON schema that hold values, not schemas."""
REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
"""Keywords of a JSON schema whose value is where another schema is."""


def _references(schema: object) -> Iterator[str]:
    """Yield the target of every ``$ref``, ``$dynamicRef`` and ``$recursiveRef`` in a schema."""
    todo = [schema]
    while todo:
        match todo.pop():
            case dict() as node:
                for key, value in node.items():
                    if key in REFERENCES and isinstance(value, str):
                        yield value
                    elif key not in DATA or isinstance(value, dict):
                        todo.append(value)
            case list() as nodes:
                todo += nodes


_NOTHING: Final = object()


def _target(reference: str, schema: object) -> object:
    """Return the part of a schema that a JSON pointer such as ``#/$defs/name`` points to; ``_NOTHING`` without one.

    Engines accept any value where a reference does not resolve, so anything else is treated as unresolved.
    """
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return _NOTHING
    node = schema
    for escaped in reference[2:].split("/"):
        key = unquote(escaped).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return _NOTHING
    return node


def _circular_reference(schema: object) -> str | None:
    """Return a ``$ref`` that leads back to itself through other references alone; None if there is none."""
    ending: set[str] = set()
    for reference in _references(schema):
        chain: set[str] = set()
        followed: object = reference
        while isinstance(followed, str) and followed not in ending:
            if followed in chain:
                return followed
            chain.add(followed)
            target = _target(followed, schema)
            followed = target.get("$ref") if isinstance(target, dict) else None
        ending |= chain
    return None


class RegexGrammar(_Frozen):
    """Constrain the whole output to a regular expression."""

    kind: Literal["regex"] = "regex"
    regex: str = Field(
        min_length=1,
        max_length=limits.MOST_EXPRESSION_CHARACTERS,
        description="The expression that the whole output must match.",
    )

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            compiled(value)
        except ValueError as error:
            raise ValueError(f"the expression {shown(value)} {error}") from None
        return value


class EbnfGrammar(_Frozen):
    """Constrain the output to an EBNF grammar."""

    kind: Literal["ebnf"] = "ebnf"
    ebnf: str = Field(min_length=1, description="The grammar's text.")


StructuredOutput = Annotated[JsonSchema | RegexGrammar | EbnfGrammar, Field(discriminator="kind")]


class ActionMask(_Frozen):
    """Allow only these tokens."""

    kind: Literal["action_mask"] = "action_mask"
    allowed_token_ids: tuple[TokenId, ...] = Field(
        min_length=1, max_length=limits.MOST_LISTED_TOKEN_IDS, description="The only ids that may be drawn."
    )


class DisallowedTokens(_Frozen):
    """Never draw these tokens."""

    kind: Literal["disallowed_tokens"] = "disallowed_tokens"
    token_ids: tuple[TokenId, ...] = Field(
        min_length=1, max_length=limits.MOST_LISTED_TOKEN_IDS, description="The ids that may not be drawn."
    )


class TemperatureSchedule(_Frozen):
    """Change the temperature linearly from ``start`` to ``end`` over the generated tokens."""

    kind: Literal["temperature_schedule"] = "temperature_schedule"
    start: Temperature = Field(gt=0, description="Temperature of the first token.")
    end: Temperature = Field(gt=0, description="Temperature from token number steps on.")
    steps: StrictInt = Field(ge=1, le=INT32_MAX, description="Number of tokens over which the temperature changes.")


LogitProcessor = Annotated[ActionMask | DisallowedTokens | TemperatureSchedule, Field(discriminator="kind")]


class SamplingParams(_Frozen):
    """Sampling parameters of one prompt. Frozen; unknown fields are refused, and every field is honoured or refused.

    The distribution is changed in this order: logit processors, repetition, frequency and presence penalty, logit bias,
    temperature, top-k, top-p over the tokens that top-k left, min-p over the tokens that top-p left.
    """

    other_names: ClassVar = SAMPLING_NAMES
    other_values: ClassVar = SAMPLING_VALUES

    n: StrictInt = Field(
        default=1, ge=1, le=limits.MOST_SAMPLES, description=f"Completions per prompt, at most {limits.MOST_SAMPLES}."
    )
    max_new_tokens: StrictInt | None = Field(
        default=None, ge=0, description="Maximum tokens to generate; None: up to the context length; 0: score only."
    )
    min_new_tokens: StrictInt = Field(default=0, ge=0, description="Minimum tokens before any kind of stop.")
    temperature: Temperature = Field(default=1.0, description="Divides the logits; 0 is greedy, else at least 1e-6.")
    top_p: Number = Field(default=1.0, ge=MIN_TOP_P, le=1, description="Nucleus probability; 1 is off.")
    top_k: StrictInt = Field(default=0, ge=0, le=INT32_MAX, description="Number of candidate tokens; 0 is off.")
    min_p: Number = Field(
        default=0.0, ge=0, le=1, description="Minimum probability, as a share of the top token's; 0 is off."
    )
    repetition_penalty: Number = Field(
        default=1.0,
        ge=1 / MAX_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Divides positive and multiplies negative logits of tokens seen; 1 is off.",
    )
    frequency_penalty: Number = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a logit for each time its token was generated."
    )
    presence_penalty: Number = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a logit once its token was generated."
    )
    logit_bias: dict[TokenId, Annotated[Number, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]] = Field(
        default_factory=dict, description="Values added to the logits of token ids."
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = Field(
        default=None,
        description="Seed of the random numbers; sample i of a prompt uses seed + i. None: not repeatable.",
    )
    stop: tuple[_StopText, ...] = Field(
        default=(), max_length=limits.MOST_STOPS, description="Strings that end generation; a match may span tokens."
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(), max_length=limits.MOST_STOP_TOKEN_IDS, description="Ids that end generation."
    )
    stop_regex: tuple[_StopText, ...] = Field(
        default=(),
        max_length=limits.MOST_STOP_REGEXES,
        description="Regular expressions (as Python's re) whose match ends generation. If matching takes longer than "
        f"{limits.STOP_SEARCH_S:g} s after one token, the request fails with InvalidRequest.",
    )
    include_stop_str_in_output: bool = Field(
        default=False, strict=True, description="Keep the matched stop string or regex match in ids and text."
    )
    ignore_eos: bool = Field(
        default=False,
        strict=True,
        description="Continue past EOS; stop_token_ids still end generation, and EOS still ends a grammar.",
    )
    skip_special_tokens: bool = Field(default=True, strict=True, description="Leave special tokens out of the text.")
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None,
        description="None: no logprobs; 0: those of the sampled tokens; k: also those of the k most likely tokens.",
    )
    prompt_logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="As logprobs, for the prompt's tokens. Always raw; the first token has none."
    )
    return_prompt_ranks: bool = Field(
        default=False, strict=True, description="With prompt_logprobs: return the rank of each of the prompt's tokens."
    )
    logprobs_mode: Annotated[LogprobsMode, BY_NAME] | None = Field(
        default=None, description="Distribution that the logprobs belong to; None: the engine's configured mode."
    )
    structured_output: StructuredOutput | None = Field(default=None, description="Grammar that constrains the output.")
    logit_processors: tuple[LogitProcessor, ...] = Field(
        default=(), description="Applied to the logits in this order, before penalties and temperature."
    )
    return_hidden_states: bool = Field(
        default=False, strict=True, description="Return the last layer's hidden state of each output token."
    )
    return_routed_experts: bool = Field(
        default=False, strict=True, description="Return the experts each token was routed to (MoE models)."
    )
    return_prompt_routed_experts: bool = Field(
        default=False, strict=True, description="Return the experts each prompt token was routed to (MoE models)."
    )
    return_sampling_mask: bool = Field(
        default=False, strict=True, description="Return the ids that were left to draw each output token from."
    )

    @field_validator("stop", "stop_regex", "stop_token_ids", mode="before")
    @classmethod
    def _one_is_a_tuple_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str | int) else value

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end generation at once; leave it out")
        return value

    @field_validator("stop", "stop_regex")
    @classmethod
    def _stop_is_unicode(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(
                    f"{shown(text)} holds half of a surrogate pair, which no text can; it could never match"
                )
        return value

    @field_validator("stop_regex")
    @classmethod
    def _stop_regex_compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        total = sum(map(len, value))
        if total > limits.MOST_EXPRESSION_CHARACTERS:
            raise ValueError(
                f"its expressions have {total} characters together; expected at most "
                f"{limits.MOST_EXPRESSION_CHARACTERS}"
            )
        for pattern in value:
            try:
                expression = compiled(pattern)
            except ValueError as error:
                raise ValueError(f"stop regex {shown(pattern)} {error}") from None
            try:
                empty = expression.search("", timeout=limits.STOP_SEARCH_S)
            except TimeoutError:
                raise ValueError(
                    f"stop regex {pattern!r} takes too long on the empty string; write it simpler"
                ) from None
            if empty is not None:
                raise ValueError(
                    f"stop regex {shown(pattern)} matches the empty string and would end generation at once"
                )
        return value

    @field_validator("logit_processors")
    @classmethod
    def _some_token_is_left(cls, value: tuple[LogitProcessor, ...]) -> tuple[LogitProcessor, ...]:
        if len(value) > 1 and _allowed(value) == frozenset():
            raise ValueError(
                "they leave no token: no id is in every action_mask's allowed_token_ids and in no disallowed_tokens' "
                "token_ids; change one of them"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        if self.include_stop_str_in_output and not (self.stop or self.stop_regex):
            raise ValueError("include_stop_str_in_output needs a stop string or a stop regex; give one or leave it out")
        if self.logprobs_mode is not None and self.logprobs is None:
            raise ValueError("logprobs_mode is given but logprobs is None, so no logprobs are returned; set logprobs=0")
        if self.return_prompt_ranks and self.prompt_logprobs is None:
            raise ValueError("return_prompt_ranks needs the prompt's logprobs; set prompt_logprobs=0 or leave it out")
        if self.max_new_tokens == 0 and self.n > 1:
            raise ValueError(f"max_new_tokens=0 samples nothing, so n={self.n} has no meaning; use n=1")
        return self

    @property
    def allowed_token_ids(self) -> frozenset[int] | None:
        """Ids that all action masks allow and no disallowed tokens exclude; None without an action mask."""
        return _allowed(self.logit_processors)

    @property
    def disallowed_token_ids(self) -> frozenset[int]:
        """Ids that any of the disallowed tokens excludes."""
        return _disallowed(self.logit_processors)


def _allowed(processors: Sequence[LogitProcessor]) -> frozenset[int] | None:
    masks = [set(one.allowed_token_ids) for one in processors if isinstance(one, ActionMask)]
    return frozenset(set.intersection(*masks) - _disallowed(processors)) if masks else None


def _disallowed(processors: Sequence[LogitProcessor]) -> frozenset[int]:
    return frozenset().union(*(one.token_ids for one in processors if isinstance(one, DisallowedTokens)))
