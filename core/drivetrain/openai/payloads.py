"""Requests of the OpenAI REST API: chat completions and completions, with extra fields for RL.

Every field is honoured or refused; none is accepted and ignored. :class:`~drivetrain.types.sampling.SamplingParams`
checks ranges. As in the API itself, null means absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    JsonValue,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drivetrain.checks.enum_fields import BY_NAME
from drivetrain.checks.name_hints import PAYLOAD_NAMES
from drivetrain.checks.pydantic_errors import describe_validation_error, shown_name
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.prompts import Message, TextPrompt, TokenPrompt
from drivetrain.types.sampling import LogitProcessor, LogprobsMode, Number, StructuredOutput
from drivetrain.types.token_ids import TokenId

_T = TypeVar("_T")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StreamOptions(_Frozen):
    """Options of a streamed response."""

    include_usage: StrictBool = Field(default=False, description="End the stream with a usage chunk.")
    include_obfuscation: Literal[False] = Field(default=False, description="Only False: chunks are never padded.")


class NamedSchema(_Frozen):
    """A named JSON schema."""

    name: StrictStr = Field(default="", description="A label without effect.")
    json_schema: dict[str, JsonValue] = Field(alias="schema", description="The schema.")
    strict: StrictBool = Field(default=True, description="Accepted; output always follows the schema.")


class ResponseFormat(_Frozen):
    """Output format: ``text``, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="The output format.")
    json_schema: NamedSchema | None = Field(default=None, description="The schema, for ``json_schema``.")

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") is (self.json_schema is None):
            raise ValueError("json_schema goes with type='json_schema'; give both or neither")
        return self


def _one_is_a_tuple_of_one(value: object) -> object:
    return (value,) if isinstance(value, str | int) else value


_Texts = Annotated[
    tuple[StrictStr, ...],
    BeforeValidator(_one_is_a_tuple_of_one, json_schema_input_type=StrictStr | tuple[StrictStr, ...]),
]


def _ids_from_json(value: object) -> object:
    """Convert token ids to integers: JSON object keys are strings, as in ``{"42": 1.5}``."""
    if not isinstance(value, Mapping):
        return value
    biases = {int(key) if isinstance(key, str) and key.isdecimal() else key: bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("a token id is given twice")
    return biases


class NamedFunction(_Frozen):
    """The name of a function of ``tools``."""

    name: StrictStr = Field(min_length=1, description="The function's name.")


class NamedToolChoice(_Frozen):
    """A function that the answer calls."""

    type: Literal["function"] = Field(default="function", description="Only function.")
    function: NamedFunction = Field(description="The function.")


_ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")] | Annotated[NamedToolChoice, Tag("named")],
    Discriminator(lambda value: "named" if isinstance(value, Mapping | NamedToolChoice) else "word"),
]


JsonPrompts = StrictStr | list[TokenId] | list[StrictStr] | list[list[TokenId]]
"""One prompt or several, as JSON has them."""


def prompts_from_json(value: object) -> object:
    """Convert one prompt or a list of prompts, each text or token ids, to prompt objects."""
    if isinstance(value, str) or (isinstance(value, Sequence) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise ValueError("expected text, a list of token ids, or a list of those that is not empty")
    return tuple(_prompt(item) for item in value)


def _prompt(value: object) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(text=value)
    with suppress(ValidationError):
        return TokenPrompt.model_validate({"token_ids": value})
    raise ValueError(f"{shown(value)} is no prompt; expected text or a list of token ids")


def _tool(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Check a tool. It is returned unchanged, because the chat template writes out every key."""
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict) or len(value) > 2:
        raise ValueError("expected {'type': 'function', 'function': {'name': …, 'parameters': …}}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("the function has no name")
    if not isinstance(function.get("parameters", {}), dict):
        raise ValueError("parameters is no JSON schema")
    unknown = function.keys() - {"name", "description", "parameters", "strict"}
    if unknown:
        raise ValueError(f"a function has no {', '.join(sorted(unknown))}")
    if function.get("strict"):
        raise ValueError("strict: calls are not held to the schema; leave it out, or use response_format")
    return value


class _Payload(_Frozen):
    """Fields of both request types."""

    other_names: ClassVar = PAYLOAD_NAMES
    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """OpenAI fields that no engine here can honour, each with the remedy."""

    model: StrictStr | None = Field(default=None, description="Name of the served model; None: any.")
    n: StrictInt | None = Field(default=None, description="Choices per prompt; 1 if not given.")
    temperature: Number | None = Field(default=None, description="Divides the logits; 1 if not given; 0 is greedy.")
    top_p: Number | None = Field(default=None, description="Nucleus probability.")
    frequency_penalty: Number | None = Field(
        default=None, description="Subtracted from a logit for each time its token was generated."
    )
    presence_penalty: Number | None = Field(
        default=None, description="Subtracted from a logit once its token was generated."
    )
    logit_bias: Annotated[dict[TokenId, Number], BeforeValidator(_ids_from_json)] | None = Field(
        default=None, description="Token id → value added to its logit."
    )
    seed: StrictInt | None = Field(default=None, description="Choice i of a prompt uses seed + i.")
    stop: _Texts | None = Field(default=None, description="One or more strings that end generation.")
    max_tokens: StrictInt | None = Field(default=None, description="Maximum tokens to generate.")
    response_format: ResponseFormat | None = Field(default=None, description="Constrain the output to JSON.")
    stream: StrictBool | None = Field(default=None, description="Must match the called method.")
    stream_options: StreamOptions | None = Field(default=None, description="Options of a stream; only with streaming.")
    user: StrictStr | None = Field(default=None, description="A label of the caller's, without effect.")
    metadata: dict[str, str] | None = Field(default=None, description="Labels of the caller's, without effect.")
    # Not in the OpenAI API
    top_k: StrictInt | None = Field(default=None, description="Number of candidate tokens; 0 is off.")
    min_p: Number | None = Field(default=None, description="Minimum probability, as a share of the top token's.")
    repetition_penalty: Number | None = Field(
        default=None, description="Divides positive and multiplies negative logits of tokens seen; 1 is off."
    )
    min_tokens: StrictInt | None = Field(default=None, description="Minimum tokens before any stop.")
    stop_token_ids: tuple[TokenId, ...] | None = Field(default=None, description="Ids that end generation.")
    stop_regex: _Texts | None = Field(
        default=None, description="One or more regular expressions whose match ends generation."
    )
    include_stop_str_in_output: StrictBool | None = Field(
        default=None, description="Keep the matched stop in ids and text."
    )
    ignore_eos: StrictBool | None = Field(default=None, description="Continue past EOS.")
    skip_special_tokens: StrictBool | None = Field(default=None, description="Leave special tokens out of the text.")
    logprobs_mode: Annotated[LogprobsMode, BY_NAME] | None = Field(
        default=None, description="Distribution that the logprobs belong to; None: the engine's configured mode."
    )
    structured_output: StructuredOutput | None = Field(
        default=None, description="Grammar that constrains the output; see SamplingParams."
    )
    logit_processors: tuple[LogitProcessor, ...] | None = Field(default=None, description="See SamplingParams.")
    lora: StrictStr | None = Field(default=None, description="Name of a loaded adapter.")
    priority: StrictInt | None = Field(default=None, description="Requests with a higher priority start sooner.")
    request_id: StrictStr | None = Field(
        default=None, min_length=1, description="Id of the response; also used to abort the request."
    )

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatPayload(_Payload):
    """A request to ``/v1/chat/completions``."""

    refused = MappingProxyType(
        {
            "audio": "only text is generated",
            "function_call": "use tool_choice",
            "functions": "use tools",
            "prediction": "predicted output is not taken",
            "prompt_cache_key": "prompts that begin alike share their cache by themselves",
            "prompt_cache_retention": "prompts that begin alike share their cache by themselves",
            "reasoning_effort": "what a model's chat template knows goes into chat_template_kwargs",
            "verbosity": "what a model's chat template knows goes into chat_template_kwargs",
            "web_search_options": "nothing is searched",
        }
    )

    messages: tuple[Message, ...] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: StrictInt | None = Field(default=None, description="Newer name of max_tokens.")
    logprobs: StrictBool = Field(default=False, description="Return logprobs.")
    top_logprobs: StrictInt | None = Field(
        default=None, description="Also return the k most likely tokens; needs logprobs=True."
    )
    tools: tuple[Annotated[dict[str, JsonValue], AfterValidator(_tool)], ...] = Field(
        default=(), description="Functions that the model may call."
    )
    tool_choice: _ToolChoice | None = Field(
        default=None,
        description="auto: put the tools into the prompt and parse the model's calls; none: neither; required: the "
        "answer is one or more calls; a function: the answer calls it.",
    )
    parallel_tool_calls: StrictBool | None = Field(default=None, description="False: return at most one call.")
    safety_identifier: StrictStr | None = Field(default=None, description="A label of the caller's, without effect.")
    # Accepted with their default values only: no other value has an effect here.
    modalities: tuple[Literal["text"], ...] | None = Field(default=None, description="Only text.")
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description="Accepted; there is only one tier."
    )
    store: Literal[False] | None = Field(default=None, description="Only False: nothing is stored.")
    # Not in the OpenAI API
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Additional variables of the chat template."
    )
    add_generation_prompt: StrictBool = Field(default=True, description="End the prompt with the assistant's opening.")
    continue_final_message: StrictBool = Field(
        default=False, description="Continue the last message instead of beginning a new one."
    )

    @field_validator("max_completion_tokens", "top_logprobs", "tool_choice")
    @classmethod
    def _goes_with_others(cls, value: _T, info: ValidationInfo) -> _T:
        match info.field_name:
            case "max_completion_tokens" if info.data.get("max_tokens") not in (None, value):
                raise ValueError(f"max_tokens={info.data['max_tokens']} says otherwise; give one of them")
            case "top_logprobs" if not info.data.get("logprobs"):
                raise ValueError("it wants logprobs=True")
            case "tool_choice" if value != "none" and not info.data.get("tools"):
                raise ValueError("there are no tools to choose from; give tools, or leave it out")
            case "tool_choice" if isinstance(value, NamedToolChoice):
                _check_is_a_tool(value.function.name, info.data["tools"])
        return value

    @property
    def shows_tools(self) -> bool:
        """True if the prompt includes the tools and the output is parsed for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """True if the output is constrained to calls of the tools."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)


def _check_is_a_tool(name: str, tools: Sequence[Mapping[str, JsonValue]]) -> None:
    functions = [tool["function"] for tool in tools]
    names = [str(function["name"]) for function in functions if isinstance(function, dict)]
    if name not in names:
        raise ValueError(f"{shown(name)} is none of tools, which are {shown(names)}; name one of them")


class CompletionPayload(_Payload):
    """A request to ``/v1/completions``."""

    refused = MappingProxyType(
        {
            "best_of": "ask for n choices and take the one you want; each comes with its logprobs",
            "suffix": "text is generated only after the prompt",
        }
    )

    prompt: Annotated[
        # Made here, and valid: ids of a long prompt are not looked at twice.
        tuple[InstanceOf[TextPrompt] | InstanceOf[TokenPrompt], ...],
        BeforeValidator(prompts_from_json, json_schema_input_type=JsonPrompts),
    ] = Field(description="Text, token ids, or a list of either.")
    max_tokens: StrictInt | None = Field(default=16, description="Maximum tokens to generate.")
    logprobs: StrictInt | None = Field(
        default=None, description="Return logprobs of the sampled and of the k most likely tokens."
    )
    echo: StrictBool = Field(default=False, description="Prepend the prompt's text and logprobs to each choice.")
    # Not in the OpenAI API
    add_special_tokens: StrictBool = Field(
        default=True, description="Let the tokenizer add special tokens such as BOS."
    )


_P = TypeVar("_P", bound=_Payload)
Payload = ChatPayload | CompletionPayload


def parse(kind: type[_P], payload: object, *, stream: bool) -> _P:
    """Validate a request.

    Args:
        kind: The expected request type.
        payload: A mapping as parsed from JSON.
        stream: True if the response will be streamed.

    Raises:
        InvalidRequest: A field is wrong; the message names the field, its value and the remedy.
    """
    if not isinstance(payload, Mapping):
        raise InvalidRequest(f"the payload is a {type(payload).__name__}; expected a mapping, as the OpenAI API takes")
    known = kind.model_fields.keys() | kind.refused.keys()
    given = {name: value for name, value in payload.items() if value is not None or name not in known}
    for name, remedy in kind.refused.items():
        if name in given:
            raise InvalidRequest(f"{name}={shown(given[name])} is not supported: {remedy}", field=name)
    try:
        asked = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, kind, given) from None
    except RecursionError as error:
        raise InvalidRequest("the payload is nested too deeply to be read; flatten it") from error
    _check_stream(asked, stream)
    return asked


def _check_stream(asked: _Payload, stream: bool) -> None:
    if asked.stream is not None and asked.stream is not stream:
        here, there = ("streams", "the method without _stream") if stream else ("does not stream", "the _stream method")
        raise InvalidRequest(f"stream={asked.stream}: this call {here}; use {there}", field="stream")
    if asked.stream_options is not None and not stream:
        raise InvalidRequest("stream_options is only for a stream; leave it out", field="stream_options")


def _refusal(error: ValidationError, kind: type[_Payload], given: Mapping[str, object]) -> InvalidRequest:
    shown, message = describe_validation_error(error, kind)
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return InvalidRequest(message)
    path = _path(first["loc"], given, is_missing=first["type"] == "missing")
    field = ".".join(map(shown_name, path))
    return InvalidRequest(field + message.removeprefix(shown), field=field)


def _path(loc: tuple[int | str, ...], value: object, *, is_missing: bool) -> list[str]:
    """Return the path to an error in the payload, without union branches, which pydantic adds to its location."""
    path: list[str] = []
    for part in loc:
        if isinstance(value, Mapping) and (part in value or str(part) in value):
            value = value[part if part in value else str(part)]  # a token id is text in JSON
        elif isinstance(value, Sequence) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(str(part))
    return [*path, str(loc[-1])] if is_missing else path
