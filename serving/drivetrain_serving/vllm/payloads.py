"""Requests of vLLM's clients, translated to the engine's.

``InferenceEngine`` is strict, and this dialect is as tolerant as vLLM: null means absent, unknown fields are ignored,
and some values differ, such as ``top_k=-1`` for "off", ``logprobs=true``, and lower priorities that are sooner. A field
that would change the tokens and cannot be honoured is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.config import JsonDict

from drivetrain.checks.pydantic_errors import describe_validation_error, reason_of
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.openai.engine_calls import Call
from drivetrain.openai.payloads import ChatPayload, CompletionPayload, parse
from drivetrain.text.chat_templates import reads_variable
from drivetrain.types.prompts import TokenPrompt
from drivetrain.types.sampling import EbnfGrammar, JsonSchema, RegexGrammar, StructuredOutput
from drivetrain.types.token_ids import TokenIds
from drivetrain_serving.http_layer.bodies import flag_of
from drivetrain_serving.sampling_fields import ids_from_json, regex_of_choices, seed_of

_REFUSED: Final = (
    *("allowed_media_domains", "bad_words", "chat_template", "documents", "ec_transfer_params", "guided_choice"),
    *("guided_grammar", "guided_json", "guided_regex", "kv_transfer_params", "logprob_token_ids", "media_io_kwargs"),
    *("mm_payload", "mm_processor_kwargs", "prompt_embeds", "repetition_detection", "return_mm_kwargs"),
    *("return_prompt_text", "return_token_offsets", "thinking_token_budget", "truncate_prompt_tokens"),
    *("use_beam_search", "vllm_xargs", "watermarking"),
)
"""Fields that change the answer and are not honoured; null, false and empty values are taken."""
_REFUSED_OF_CHATS: Final = ("add_special_tokens", "echo")
"""Fields of chats alone that are not honoured; completions have them."""
_REFUSED_OF_GENERATE: Final = ("extra_args", "trace_decode_token_ids")
"""Sampling parameters of ``/inference/v1/generate`` that are not honoured, beside the fields of all requests."""
_LABELS: Final = (
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
    *("store", "user", "verbosity"),
)
"""OpenAI's fields that change no token here. They are taken with any value, as vLLM does."""
EMPTY: Final[tuple[object, ...]] = (None, False, "", [], {})
"""Values of a field that ask for nothing. 0 is none of them: it may be a bound."""

_A = TypeVar("_A", "CompletionRequest", "ChatRequest")


class _Extras(BaseModel):
    """Fields of both requests that OpenAI does not have, and that shape the response."""

    return_token_ids: StrictBool | None = Field(default=None, description="Return prompt and sampled ids.")
    return_tokens_as_token_ids: StrictBool | None = Field(
        default=None, description="Write each token of the logprobs as ``token_id:N``."
    )
    prompt_logprobs: StrictInt | None = Field(
        default=None,
        ge=-1,
        description="Return logprobs of the prompt, and of its k most likely tokens; -1: of the whole vocabulary. Not "
        "in a stream.",
    )
    continuous_usage: StrictBool = Field(default=False, description="Tell the usage so far in each chunk of a stream.")


def _by_wire_names(schema: JsonDict) -> None:
    """Put the names and values of the wire into the schema of a request: :func:`_common` translates them."""
    fields = schema["properties"]
    assert isinstance(fields, dict)
    for name in ("structured_output", "logit_processors", "continuous_usage"):
        fields.pop(name)
    fields |= {
        "stream_options": {
            "type": ["object", "null"],
            "description": "Options of a stream; only with streaming.",
            "properties": {
                "include_usage": {"type": ["boolean", "null"], "description": "End the stream with a usage chunk."},
                "continuous_usage_stats": {
                    "type": ["boolean", "null"],
                    "description": "With include_usage: tell the usage so far of a choice in each of its chunks.",
                },
            },
        },
        "structured_outputs": {
            "type": ["object", "null"],
            "description": "Constrains the output by exactly one of these.",
            "properties": {
                "json": {"type": ["object", "string"]},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "grammar": {"type": "string"},
                "json_object": {"type": "boolean"},
            },
        },
        "allowed_token_ids": {
            "type": ["array", "null"],
            "description": "The only ids that are sampled.",
            "items": {"type": "integer", "minimum": 0},
        },
        "priority": {"type": ["integer", "null"], "description": "Requests with a lower priority start sooner."},
        "top_k": {"type": ["integer", "null"], "description": "Number of candidate tokens; -1 and 0 are off."},
    }


def _of_completions(schema: JsonDict) -> None:
    _by_wire_names(schema)
    fields = schema["properties"]
    assert isinstance(fields, dict)
    fields["logprobs"] = {
        "type": ["integer", "boolean", "null"],
        "description": "Return logprobs of the sampled and of the k most likely tokens; true: as 1.",
    }


class CompletionRequest(_Extras, CompletionPayload):
    """A request to ``/v1/completions``."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_of_completions)
    other_names: ClassVar[Mapping[str, str]] = {}


class ChatRequest(_Extras, ChatPayload):
    """A request to ``/v1/chat/completions``."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_by_wire_names)
    other_names: ClassVar[Mapping[str, str]] = {}


def read_completion(body: Mapping[str, object], *, stream: bool) -> CompletionRequest:
    """Read a request to ``/v1/completions``.

    Raises:
        InvalidRequest: a field is wrong, or cannot be honoured.
    """
    fields = _common(body)
    if fields.get("best_of") == fields.get("n", 1):
        fields.pop("best_of", None)
    logprobs = fields.get("logprobs")
    if isinstance(logprobs, bool):
        fields["logprobs"] = 1 if logprobs else None
    return _parsed(CompletionRequest, fields, stream)


def read_chat(body: Mapping[str, object], template: str, *, stream: bool) -> ChatRequest:
    """Read a request to ``/v1/chat/completions``.

    Args:
        body: The request.
        template: The model's chat template. It gets ``reasoning_effort``, and ``enable_thinking`` which is false for
            an effort of ``none``, if it reads them.
        stream: True if the response will be streamed.

    Raises:
        InvalidRequest: a field is wrong, or cannot be honoured.
    """
    _refuse(body, _REFUSED_OF_CHATS)
    fields = _common(body)
    if not fields.get("tools"):
        fields.pop("tools", None)
        if fields.get("tool_choice") == "auto":
            del fields["tool_choice"]
    elif isinstance(fields["tools"], list):
        fields["tools"] = [_plain_tool(tool) for tool in fields["tools"]]
    if fields.get("logprobs") is None or fields["logprobs"] is False:
        fields.pop("logprobs", None)
        if not fields.get("top_logprobs"):
            fields.pop("top_logprobs", None)
    if fields.get("continue_final_message") and fields.get("add_generation_prompt"):
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; leave one of them out",
            field="continue_final_message",
        )
    effort, variables = fields.pop("reasoning_effort", None), fields.get("chat_template_kwargs") or {}
    if isinstance(effort, bool) or not isinstance(effort, str | float | int | None):
        raise InvalidRequest(f"reasoning_effort={shown(effort)}: expected a text", field="reasoning_effort")
    if effort is not None and isinstance(variables, Mapping):
        of_effort = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        read = {name: one for name, one in of_effort.items() if reads_variable(template, name)}
        fields["chat_template_kwargs"] = {**read, **variables}
    return _parsed(ChatRequest, fields, stream)


def _plain_tool(tool: object) -> object:
    """Leave nulls and ``strict`` out of a tool: OpenAI's helpers always send it, and check the arguments themselves."""
    match tool:
        case {"function": dict(function), **more}:
            given = {name: value for name, value in function.items() if value is not None}
            if given.get("strict") is True:
                del given["strict"]
            return {**more, "function": given}
    return tool


def _parsed(kind: type[_A], fields: dict[str, object], stream: bool) -> _A:
    known = kind.model_fields.keys() | kind.refused.keys()
    fields = {name: value for name, value in fields.items() if name in known}
    fields.setdefault("request_id", uuid.uuid4().hex)
    asked = parse(kind, fields, stream=stream)
    if stream and asked.prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs are not available in a stream; leave them out, or do not stream", field="prompt_logprobs"
        )
    return asked


def is_one_of(value: object, these: Iterable[object]) -> bool:
    """Return whether a value of a request is one of these, and of the same type: 0 is not False."""
    return any(type(value) is type(one) and value == one for one in these)


def _refuse(body: Mapping[str, object], names: Iterable[str] = _REFUSED) -> None:
    """Refuse a field that would change the answer and is not honoured."""
    for name in names:
        if not is_one_of(body.get(name), EMPTY):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported; leave it out", field=name)


def _common(body: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are given, in the engine's words."""
    _refuse(body)
    ignored = {*_REFUSED, *_LABELS}
    fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
    if not fields.get("suffix"):
        fields.pop("suffix", None)
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    priority = fields.get("priority")
    if isinstance(priority, int):
        fields["priority"] = -priority
    seed = fields.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        fields["seed"] = seed_of(seed)
    _join_masks(fields)
    _join_grammars(fields)
    fields.pop("continuous_usage", None)
    _read_stream_options(fields)
    if isinstance(fields.get("include_stop_str_in_output"), bool) and not (
        fields.get("stop") or fields.get("stop_regex")
    ):
        del fields["include_stop_str_in_output"]
    return fields


def _read_stream_options(fields: dict[str, object]) -> None:
    """Translate ``stream_options``. Those of an answer that is no stream are refused, as by vLLM and OpenAI."""
    options = fields.pop("stream_options", None)
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"stream_options={shown(options)}: expected an object", field="stream_options")
    include, continuous = (
        flag_of(options.get(name), f"stream_options.{name}") for name in ("include_usage", "continuous_usage_stats")
    )
    if fields.get("stream"):
        fields |= {"stream_options": {"include_usage": include}, "continuous_usage": include and continuous}
    elif options:
        raise InvalidRequest(
            f"stream_options={shown(options)}: only a stream has options; set stream, or leave them out",
            field="stream_options",
        )


def _join_masks(fields: dict[str, object]) -> None:
    allowed = fields.pop("allowed_token_ids", None)
    if allowed == []:
        raise InvalidRequest("allowed_token_ids is empty; give the ids, or leave it out", field="allowed_token_ids")
    if allowed is not None:
        fields["logit_processors"] = [{"kind": "action_mask", "allowed_token_ids": allowed}]


def _join_grammars(fields: dict[str, object]) -> None:
    given = fields.pop("structured_outputs", None)
    if given is not None:
        fields["structured_output"] = grammar_of(given).model_dump()


_GRAMMAR_VALUES: Final = {
    "json_object": "true",
    "regex": "a text",
    "choice": "a list of texts that is not empty",
    "grammar": "a text",
}
"""Kind of a grammar → the values that it takes."""


def grammar_of(given: object) -> StructuredOutput:
    """Return the grammar of vLLM's ``structured_outputs``.

    Raises:
        InvalidRequest: it names none, several, or one that no engine here has.
    """
    named = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    kinds = [key for key in ("json", "regex", "choice", "grammar", "json_object") if key in named]
    if len(kinds) != 1 or "structural_tag" in named:
        raise InvalidRequest(
            f"structured_outputs={shown(given)}: expected exactly one of json, regex, choice, grammar and json_object",
            field="structured_outputs",
        )
    kind, value = kinds[0], named[kinds[0]]
    field = f"structured_outputs.{kind}"
    try:
        match kind, value:
            case "json", _:
                return JsonSchema(json_schema=value if isinstance(value, str) else json.dumps(value))
            case "json_object", True:
                return JsonSchema(json_schema='{"type": "object"}')
            case "regex", str():
                return RegexGrammar(regex=value)
            case "choice", list() if texts := [one for one in value if isinstance(one, str)]:
                if len(texts) == len(value):
                    return RegexGrammar(regex=regex_of_choices(texts))
            case "grammar", str():
                return EbnfGrammar(ebnf=value)
    except ValidationError as error:
        raise InvalidRequest(f"{field}: {reason_of(error)}", field=field) from None
    raise InvalidRequest(f"{field}={shown(value)}: expected {_GRAMMAR_VALUES[kind]}", field=field)


def _with_sampling_params(schema: JsonDict) -> None:
    """Describe the sampling parameters, which are fields of completions."""
    fields = CompletionRequest.model_json_schema()["properties"]
    params = {name: fields[name] for name in (*_SAMPLING, *_SAME, *_ON_THE_WIRE) if name in fields}
    properties = schema["properties"]
    assert isinstance(properties, dict)
    of_the_prompt: JsonDict = {
        "prompt_logprob_token_ids": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": -1}},
            "description": "Ids to score at each of the prompt's tokens after the first ones; -1 pads.",
        },
        "prompt_logprob_start": {
            "type": "integer",
            "minimum": 0,
            "description": "Number of the prompt's tokens, beside the first, that are not scored.",
        },
    }
    properties["sampling_params"] = {
        "type": "object",
        "description": "Sampling parameters by vLLM's names.",
        "properties": {**params, **of_the_prompt},
    }


class GenerateStreamOptions(BaseModel):
    """Options of a stream of ``/inference/v1/generate``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: StrictBool | None = Field(default=None, description="End the stream with a usage chunk.")
    continuous_usage_stats: StrictBool | None = Field(
        default=None, description="With include_usage: tell the usage so far of a choice in each of its chunks."
    )


class GenerateRequest(BaseModel):
    """A request to ``/inference/v1/generate``: token ids in, token ids out."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_with_sampling_params)
    other_names: ClassVar[Mapping[str, str]] = {}

    token_ids: TokenIds = Field(min_length=1, description="The prompt.")
    sampling_params: dict[str, JsonValue] = Field(description="Sampling parameters by vLLM's names.")
    model: StrictStr | None = Field(default=None, description="Name of the model or of an adapter; null: the model.")
    request_id: StrictStr | None = Field(default=None, min_length=1, description="Id of the request and its answer.")
    stream: StrictBool | None = Field(default=None, description="Send tokens as they come.")
    stream_options: GenerateStreamOptions | None = Field(default=None, description="Options of a stream.")
    priority: StrictInt | None = Field(default=None, description="Lower is sooner.")
    return_token_ids: StrictBool | None = Field(default=None, description="Return the prompt's ids too.")

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk tells the usage of its choice so far."""
        options = self.stream_options
        return self.include_usage and options is not None and options.continuous_usage_stats is True


_OF_GENERATE: Final = MappingProxyType(
    {"features": "images come in content_parts or messages", "content_parts": "send messages to /v1/chat/completions"}
)
_SAMPLING: Final = MappingProxyType({"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"})
"""Sampling parameters that have other names here."""
_SAME: Final = (
    *("n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "skip_special_tokens"),
    *("include_stop_str_in_output", "logit_bias", "logit_processors", "structured_output"),
)


_ON_THE_WIRE: Final = ("structured_outputs", "allowed_token_ids")
"""Names of the two last ones in requests."""


def read_generate(body: Mapping[str, object]) -> tuple[GenerateRequest, Call]:
    """Read a request to ``/inference/v1/generate``, and translate it to a call of the engine.

    Raises:
        InvalidRequest: a field is wrong, or cannot be honoured.
    """
    _refuse(body)
    for name, remedy in _OF_GENERATE.items():
        if body.get(name) not in EMPTY:
            raise InvalidRequest(f"{name} is not supported: {remedy}", field=name)
    if body.get("output_mode") not in (None, "tokens"):
        raise InvalidRequest(f"output_mode={shown(body['output_mode'])} is not supported", field="output_mode")
    try:
        asked = GenerateRequest.model_validate({name: one for name, one in body.items() if one is not None})
    except ValidationError as error:
        raise InvalidRequest(describe_validation_error(error, GenerateRequest)[1]) from None
    if "temperature" in asked.sampling_params and asked.sampling_params["temperature"] is None:
        raise InvalidRequest("sampling_params.temperature is null; expected a number", field="temperature")
    _refuse(asked.sampling_params, _REFUSED_OF_GENERATE)
    fields = _common(asked.sampling_params)
    if isinstance(fields.get("logit_bias"), Mapping):
        fields["logit_bias"] = ids_from_json(fields["logit_bias"])
    params: dict[str, object] = {name: fields[name] for name in _SAME if name in fields}
    params |= {ours: fields[theirs] for theirs, ours in _SAMPLING.items() if theirs in fields}
    names = {"prompts": "token_ids", **{ours: theirs for theirs, ours in _SAMPLING.items()}}
    request_id = asked.request_id or uuid.uuid4().hex
    return asked.model_copy(update={"request_id": request_id}), Call(
        id=request_id,
        prompts=(TokenPrompt.model_construct(token_ids=asked.token_ids, media=()),),
        params=params,
        lora=None,
        priority=-(asked.priority or 0),
        names=names,
    )
