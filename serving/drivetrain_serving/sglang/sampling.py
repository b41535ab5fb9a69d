"""SGLang's sampling parameters, translated to the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictFloat, StrictInt, StrictStr

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain_serving.sampling_fields import ids_from_json, regex_of_choices, seed_of

MAX_NEW_TOKENS: Final = 128
"""SGLang's default; null means the default too."""
TOP_P_TOKEN_IDS: Final = "return_top_p_token_ids"
"""Key of ``custom_params``. All others are read by custom logit processors only, which this server refuses."""
_MAX_REPETITION_PENALTY: Final = 2.0

_Number = StrictInt | StrictFloat


class Sampling(BaseModel):
    """The sampling parameters that SGLang 0.5.23 knows. Every one may be null, which is its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    other_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "it is called max_new_tokens here",
        "seed": "it is called sampling_seed here",
    }

    max_new_tokens: StrictInt | None = Field(default=None, description="Most tokens; 128 if not given.")
    min_new_tokens: StrictInt | None = Field(default=None, description="Fewest tokens.")
    stop: StrictStr | list[StrictStr] | None = Field(default=None, description="Strings that end generation.")
    stop_token_ids: list[StrictInt] | None = Field(default=None, description="Ids that end generation.")
    stop_regex: StrictStr | list[StrictStr] | None = Field(default=None, description="Expressions that end it.")
    temperature: _Number | None = Field(default=None, description="0 is greedy.")
    top_p: _Number | None = Field(default=None, description="1 is off.")
    top_k: StrictInt | None = Field(default=None, description="-1 is off; 0 is refused.")
    min_p: _Number | None = Field(default=None, description="0 is off.")
    frequency_penalty: _Number | None = Field(default=None, description="0 is off.")
    presence_penalty: _Number | None = Field(default=None, description="0 is off.")
    repetition_penalty: _Number | None = Field(default=None, description="1 is off; at most 2.")
    n: StrictInt | None = Field(default=None, description="Completions per prompt.")
    json_schema: StrictStr | None = Field(default=None, description="JSON schema of the text, as JSON.")
    regex: StrictStr | None = Field(default=None, description="Regular expression of the text.")
    ebnf: StrictStr | None = Field(default=None, description="Grammar of the text.")
    choice: list[StrictStr] | None = Field(default=None, description="The only texts that are allowed.")
    structural_tag: StrictStr | None = Field(default=None, description="Refused.")
    ignore_eos: StrictBool | None = Field(default=None, description="Continue past EOS.")
    skip_special_tokens: StrictBool | None = Field(default=None, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: StrictBool | None = Field(default=None, description="Without effect.")
    no_stop_trim: StrictBool | None = Field(default=None, description="Keep the stop string or token in the text.")
    stream_interval: StrictInt | None = Field(default=None, description="Without effect: each event is sent at once.")
    logit_bias: dict[str, _Number] | None = Field(default=None, description="Values added to the logits of ids.")
    sampling_seed: StrictInt | None = Field(default=None, description="Seed; a negative one is one too.")
    custom_params: JsonValue = Field(
        default=None,
        description="With return_top_p_token_ids, which slime sends: return the ids left to draw each token from.",
    )
    beam_width: StrictInt | None = Field(default=None, description="Refused above 1.")
    watermark: JsonValue = Field(default=None, description="Refused.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def top_p_token_ids(self) -> bool:
        """True if the ids that were left to draw each token from are returned, as SGLang does with slime's patch."""
        return isinstance(self.custom_params, Mapping) and bool(self.custom_params.get(TOP_P_TOKEN_IDS))


_SAME: Final = (
    *("min_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "n", "ignore_eos", "skip_special_tokens"),
)
"""Parameters of the same name and meaning in the engine."""


def engine_params(asked: Sampling, vocab_size: int) -> dict[str, object]:
    """Return the engine's sampling parameters.

    Stop strings stay in the ids, as in SGLang; :func:`drivetrain_serving.sglang.generate_answers.text_of` takes them
    out of the text.

    Raises:
        InvalidRequest: a value is wrong, or cannot be honoured.
    """
    if asked.structural_tag is not None:
        raise _unsupported("structural_tag", asked.structural_tag)
    if (asked.beam_width or 1) != 1:
        raise _unsupported("beam_width", asked.beam_width)
    if asked.watermark:
        raise _unsupported("watermark", asked.watermark)
    penalty = asked.repetition_penalty
    if penalty is not None and not 0 < penalty <= _MAX_REPETITION_PENALTY:
        raise InvalidRequest(f"repetition_penalty={penalty}: expected a number in (0, 2]", field="repetition_penalty")
    given = {name: getattr(asked, name) for name in _SAME}
    params: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    params["max_new_tokens"] = MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    if asked.temperature != 0:  # greedy: SGLang reads no top_k, and 0 is no error then
        params["top_k"] = _top_k(asked.top_k, vocab_size)
    if asked.sampling_seed is not None:
        params["seed"] = seed_of(asked.sampling_seed)
    if asked.logit_bias:
        params["logit_bias"] = ids_from_json(asked.logit_bias)
    if asked.stop or asked.stop_regex:
        params["include_stop_str_in_output"] = True
    if asked.top_p_token_ids:
        params["return_sampling_mask"] = True
    if (grammar := _grammar(asked)) is not None:
        params["structured_output"] = grammar
    return params


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """Return the engine's ``top_k``; 0 is off."""
    if top_k is None or top_k == -1 or top_k >= vocab_size:
        return 0
    if top_k < 1:
        raise InvalidRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.", field="top_k")
    return top_k


def _grammar(asked: Sampling) -> dict[str, str] | None:
    given = {
        "json_schema": asked.json_schema,
        "regex": asked.regex,
        "ebnf": asked.ebnf,
        "choice": regex_of_choices(asked.choice) if asked.choice else None,
    }
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise InvalidRequest(f"Only one of regex, json_schema, ebnf and choice can be set; got {', '.join(named)}")
    if not named:
        return None
    ((name, value),) = named.items()
    kind = "regex" if name == "choice" else name
    return {"kind": kind, kind: value}


def _unsupported(name: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name}={shown(value)} is not supported; leave it out", field=name)
