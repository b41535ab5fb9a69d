"""How tokens are drawn from the model's distribution, and when drawing ends."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, field_validator, model_validator

TokenId = Annotated[StrictInt, Field(ge=0)]


class LogprobsMode(Enum):
    """Which distribution a logprob belongs to."""

    RAW = "raw"
    """The model's own distribution: ``log_softmax(logits)``."""
    TEMPERATURE = "temperature"
    """``log_softmax(logits / temperature)``: before penalties, bias and top-k/top-p/min-p; raw when greedy."""
    PROCESSED = "processed"
    """The distribution that was drawn from, after everything; a point mass when greedy."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JsonSchema(_Frozen):
    """Hold the output to a JSON schema."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: str = Field(description="The schema, as JSON text.")

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: str) -> str:
        try:
            schema = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"the schema is no JSON: {error}") from None
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a JSON schema is an object; this is a {type(schema).__name__}")
        return value


class RegexGrammar(_Frozen):
    """Hold the whole output to a regular expression."""

    kind: Literal["regex"] = "regex"
    regex: str = Field(description="The expression that the whole output must match.")

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            regex.compile(value)
        except regex.error as error:
            raise ValueError(f"the expression {value!r} does not compile: {error}") from None
        return value


class EbnfGrammar(_Frozen):
    """Hold the output to an EBNF grammar."""

    kind: Literal["ebnf"] = "ebnf"
    ebnf: str = Field(min_length=1, description="The grammar's text.")


StructuredOutput = Annotated[JsonSchema | RegexGrammar | EbnfGrammar, Field(discriminator="kind")]


class ActionMask(_Frozen):
    """Allow only these tokens."""

    kind: Literal["action_mask"] = "action_mask"
    allowed_token_ids: tuple[TokenId, ...] = Field(min_length=1, description="The ids that may be drawn.")


class DisallowedTokens(_Frozen):
    """Never draw these tokens."""

    kind: Literal["disallowed_tokens"] = "disallowed_tokens"
    token_ids: tuple[TokenId, ...] = Field(min_length=1, description="The ids that may not be drawn.")


class TemperatureSchedule(_Frozen):
    """Let the temperature go from one value to another over the generated tokens, linearly."""

    kind: Literal["temperature_schedule"] = "temperature_schedule"
    start: FiniteFloat = Field(gt=0, description="Temperature of the first token.")
    end: FiniteFloat = Field(gt=0, description="Temperature from the last scheduled token on.")
    steps: StrictInt = Field(ge=1, description="Over how many tokens.")


LogitProcessor = Annotated[ActionMask | DisallowedTokens | TemperatureSchedule, Field(discriminator="kind")]


class SamplingParams(_Frozen):
    """How one prompt's completions are drawn. Frozen; unknown fields are refused, others honoured or refused.

    What changes the distribution is applied in this order: logit processors, repetition, frequency and presence
    penalty, logit bias, temperature, top-k, top-p over what top-k left, min-p over what top-p left.
    """

    n: StrictInt = Field(default=1, ge=1, description="Completions per prompt.")
    max_new_tokens: StrictInt | None = Field(
        default=None, ge=0, description="Most tokens to generate; None: up to the context length; 0: score only."
    )
    min_new_tokens: StrictInt = Field(default=0, ge=0, description="No stop of any kind before this many tokens.")
    temperature: FiniteFloat = Field(default=1.0, ge=0, description="Divides the logits; 0 is greedy.")
    top_p: FiniteFloat = Field(default=1.0, gt=0, le=1, description="Nucleus probability; 1 is off.")
    top_k: StrictInt = Field(default=0, ge=0, description="Number of candidate tokens; 0 is off.")
    min_p: FiniteFloat = Field(default=0.0, ge=0, le=1, description="Share of the top probability; 0 is off.")
    repetition_penalty: FiniteFloat = Field(
        default=1.0, gt=0, description="Divides positive and multiplies negative logits of tokens seen; 1 is off."
    )
    frequency_penalty: FiniteFloat = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a logit for each time its token was generated."
    )
    presence_penalty: FiniteFloat = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a logit once its token was generated."
    )
    logit_bias: dict[TokenId, FiniteFloat] = Field(
        default_factory=dict, description="Values added to the logits of token ids."
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="Fixes the random stream; sample i of a prompt uses seed + i. None: not repeatable."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end generation, also across tokens.")
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), description="Ids that end generation.")
    stop_regex: tuple[str, ...] = Field(
        default=(), description="Expressions (as Python's re) whose match ends generation."
    )
    include_stop_str_in_output: bool = Field(
        default=False, strict=True, description="Keep the matched stop string or regex match in ids and text."
    )
    ignore_eos: bool = Field(
        default=False, strict=True, description="Go on past EOS; stop_token_ids still end generation."
    )
    skip_special_tokens: bool = Field(default=True, strict=True, description="Leave special tokens out of the text.")
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="None: no logprobs; 0: of the sampled tokens; k: also of the k most likely."
    )
    prompt_logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="The same for the prompt's tokens; always raw; the first token has none."
    )
    logprobs_mode: LogprobsMode | None = Field(
        default=None, description="Which distribution the logprobs belong to; None: the engine's configured mode."
    )
    structured_output: StructuredOutput | None = Field(default=None, description="A grammar to hold the output to.")
    logit_processors: tuple[LogitProcessor, ...] = Field(
        default=(), description="Applied in order to the logits before penalties and temperature."
    )
    return_hidden_states: bool = Field(
        default=False, strict=True, description="Return the last layer's hidden state of each output token."
    )
    return_routed_experts: bool = Field(
        default=False, strict=True, description="Return the experts each token was routed to (MoE models)."
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
                raise ValueError(f"{text!r} holds half of a surrogate pair, which no text can; it could never match")
        return value

    @field_validator("stop_regex")
    @classmethod
    def _stop_regex_compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                compiled = regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"stop regex {pattern!r} does not compile: {error}") from None
            if compiled.search("") is not None:
                raise ValueError(f"stop regex {pattern!r} matches the empty string and would end generation at once")
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
        if self.max_new_tokens == 0 and self.n > 1:
            raise ValueError(f"max_new_tokens=0 samples nothing, so n={self.n} has no meaning; use n=1")
        return self
