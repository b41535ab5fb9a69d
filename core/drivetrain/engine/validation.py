"""Checks of a request against its schema, the model and the engine's capabilities, before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from drivetrain.backend.base import ModelInfo
from drivetrain.backend.toolkit.capability_sets import STRUCTURED_OUTPUT
from drivetrain.checks import simple_values
from drivetrain.checks.limits import MOST_SAMPLES_OF_A_CALL
from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import (
    AudioInput,
    ChatPrompt,
    ImageInput,
    MediaInput,
    Prompt,
    PromptLike,
    TextPrompt,
    TokenPrompt,
    VideoInput,
)
from drivetrain.types.sampling import (
    ActionMask,
    DisallowedTokens,
    EbnfGrammar,
    JsonSchema,
    LogprobsMode,
    RegexGrammar,
    SamplingParams,
    TemperatureSchedule,
)
from drivetrain.types.token_ids import highest

MODE_CAPABILITY: Final[Mapping[LogprobsMode, Capability]] = {
    LogprobsMode.RAW: Capability.LOGPROBS_RAW,
    LogprobsMode.TEMPERATURE: Capability.LOGPROBS_TEMPERATURE,
    LogprobsMode.PROCESSED: Capability.LOGPROBS_PROCESSED,
}

_GRAMMAR_CAPABILITY: Final[Mapping[type[BaseModel], Capability]] = {
    JsonSchema: Capability.STRUCTURED_JSON,
    RegexGrammar: Capability.STRUCTURED_REGEX,
    EbnfGrammar: Capability.STRUCTURED_EBNF,
}

_NEEDS: Final[tuple[tuple[str, Callable[[SamplingParams], bool], Capability], ...]] = (
    ("stop", lambda p: bool(p.stop), Capability.STOP_STRINGS),
    ("stop_regex", lambda p: bool(p.stop_regex), Capability.STOP_REGEX),
    ("stop_token_ids", lambda p: bool(p.stop_token_ids), Capability.STOP_TOKEN_IDS),
    ("ignore_eos", lambda p: p.ignore_eos, Capability.IGNORE_EOS),
    ("min_new_tokens", lambda p: p.min_new_tokens > 0, Capability.MIN_NEW_TOKENS),
    ("max_new_tokens", lambda p: p.max_new_tokens == 0, Capability.SCORE_TOKENS),
    ("top_k", lambda p: p.top_k > 0, Capability.TOP_K),
    ("top_p", lambda p: p.top_p < 1, Capability.TOP_P),
    ("min_p", lambda p: p.min_p > 0, Capability.MIN_P),
    ("repetition_penalty", lambda p: p.repetition_penalty != 1, Capability.REPETITION_PENALTY),
    ("frequency_penalty", lambda p: p.frequency_penalty != 0, Capability.FREQUENCY_PENALTY),
    ("presence_penalty", lambda p: p.presence_penalty != 0, Capability.PRESENCE_PENALTY),
    ("logit_bias", lambda p: bool(p.logit_bias), Capability.LOGIT_BIAS),
    ("seed", lambda p: p.seed is not None, Capability.SEED),
    ("logprobs", lambda p: bool(p.logprobs), Capability.TOP_LOGPROBS),
    ("prompt_logprobs", lambda p: p.prompt_logprobs is not None, Capability.PROMPT_LOGPROBS),
    ("return_prompt_ranks", lambda p: p.return_prompt_ranks, Capability.PROMPT_RANKS),
    ("logit_processors", lambda p: bool(p.logit_processors), Capability.LOGIT_PROCESSORS),
    ("return_hidden_states", lambda p: p.return_hidden_states, Capability.HIDDEN_STATES),
    ("return_routed_experts", lambda p: p.return_routed_experts, Capability.ROUTED_EXPERTS),
    (
        "return_prompt_routed_experts",
        lambda p: p.return_prompt_routed_experts,
        Capability.PROMPT_ROUTED_EXPERTS,
    ),
    ("return_sampling_mask", lambda p: p.return_sampling_mask, Capability.SAMPLING_MASK),
)

MEDIA_CAPABILITY: Final[tuple[tuple[type[MediaInput], Capability], ...]] = (
    (ImageInput, Capability.IMAGES),
    (VideoInput, Capability.VIDEO),
    (AudioInput, Capability.AUDIO),
)

_TOKENS: Final = TypeAdapter(TokenPrompt)
_CHAT: Final = TypeAdapter(ChatPrompt)


def require(capabilities: frozenset[Capability], capability: Capability, what: str, backend: str) -> None:
    """Raise :class:`UnsupportedCapability` unless ``capability`` is claimed."""
    if capability not in capabilities:
        raise UnsupportedCapability(
            f"{what} needs the capability {capability.value!r}, which this {backend} engine does not claim "
            f"({capability.meaning} 'engine.capabilities' lists what it can do.)",
            capability=capability.value,
        )


def check_seconds(value: float | None, default: float) -> float:
    """Return ``value``, or ``default`` if it is None.

    Raises:
        InvalidRequest: it is not a number above 0.
    """
    return default if value is None else simple_values.check_seconds("timeout", value)


def absolute_path(value: object) -> str:
    """Return an absolute path: ``~`` is expanded, and a relative path starts at this process's working directory.

    Raises:
        InvalidRequest: it is not a path.
    """
    text = simple_values.check_path("path", value)
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError as error:  # ``~name`` of an unknown user
        raise InvalidRequest(f"path={shown(value)}: {error}", field="path") from error


def check_url(value: object) -> str:
    """Return the URL if it names a protocol.

    Raises:
        InvalidRequest: it names none.
    """
    if not isinstance(value, str) or not all(value.partition("://")):
        raise InvalidRequest(f"url={shown(value)}: expected a URL such as 's3://bucket/folder'", field="url")
    return value


def check_sampling_params(value: object) -> SamplingParams:
    """Return validated params, from params or a mapping; None means the defaults.

    Raises:
        InvalidRequest: naming the field, the value and the remedy.
    """
    if value is None:
        return SamplingParams()
    if not isinstance(value, SamplingParams | Mapping):
        raise InvalidRequest(
            f"sampling_params is a {type(value).__name__}; expected SamplingParams or a mapping of its fields",
            field="sampling_params",
        )
    try:
        return SamplingParams.model_validate(value if isinstance(value, SamplingParams) else dict(value))
    except ValidationError as error:
        field, message = describe_validation_error(error, SamplingParams, prefix="sampling_params.")
        raise InvalidRequest(message, field=field) from None
    except RecursionError as error:
        raise InvalidRequest(
            "sampling_params is nested too deeply to be read; flatten the schema", field="sampling_params"
        ) from error


def check_params_supported(params: SamplingParams, config: EngineConfig, capabilities: frozenset[Capability]) -> None:
    """Raise :class:`UnsupportedCapability` for the first field that this engine cannot honour."""
    for field, is_used, capability in _NEEDS:
        if is_used(params):
            require(
                capabilities, capability, f"sampling_params.{field}={shown(getattr(params, field))}", config.backend
            )
    if params.logprobs is not None:
        mode = params.logprobs_mode or config.logprobs_mode
        require(capabilities, MODE_CAPABILITY[mode], f"logprobs in mode {mode.value!r}", config.backend)
    if params.structured_output is not None:
        capability = _GRAMMAR_CAPABILITY[type(params.structured_output)]
        what = f"sampling_params.structured_output{_lacking(capability)}"
        require(capabilities, capability, what, config.backend)


def check_params_fit(params: SamplingParams, model: ModelInfo, special_tokens: frozenset[str]) -> None:
    """Raise :class:`InvalidRequest` for ids outside the vocabulary and stop strings that can never match."""
    vocabulary = model.vocab_size
    _check_ids("sampling_params.stop_token_ids", params.stop_token_ids, vocabulary)
    _check_ids("sampling_params.logit_bias", params.logit_bias, vocabulary)
    for processor in params.logit_processors:
        match processor:
            case ActionMask():
                _check_ids("sampling_params.logit_processors", processor.allowed_token_ids, vocabulary)
            case DisallowedTokens():
                _check_ids("sampling_params.logit_processors", processor.token_ids, vocabulary)
            case TemperatureSchedule():
                pass
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocabulary:
            raise InvalidRequest(
                f"sampling_params.{field}={count} is more than the vocabulary's {vocabulary} tokens",
                field=f"sampling_params.{field}",
            )
    if params.skip_special_tokens:
        for stop in params.stop:
            if stop in special_tokens:
                raise InvalidRequest(
                    f"sampling_params.stop={shown(stop)} is a special token, which skip_special_tokens=True leaves out "
                    "of the text, so it could never match; give its id in stop_token_ids",
                    field="sampling_params.stop",
                )


def check_some_token_is_left(params: SamplingParams, stop_token_ids: Sequence[int], model: ModelInfo) -> None:
    """Raise :class:`InvalidRequest` if masks and ``min_new_tokens`` together forbid every token."""
    if not params.logit_processors:
        return
    allowed, banned = params.allowed_token_ids, params.disallowed_token_ids
    left = set(allowed) if allowed is not None else None
    if left is None and len(banned) + len(stop_token_ids) >= model.vocab_size:
        left = set(range(model.vocab_size)) - banned
    if left is None:
        return
    if not left:
        raise InvalidRequest(
            "sampling_params.logit_processors: disallowed_tokens hold the whole vocabulary, which leaves no token",
            field="sampling_params.logit_processors",
        )
    if params.min_new_tokens and left <= set(stop_token_ids):
        raise InvalidRequest(
            f"sampling_params.logit_processors leave only tokens that end generation ({shown(sorted(left))}), and "
            f"sampling_params.min_new_tokens={params.min_new_tokens} forbids those at first; allow others, or leave "
            "min_new_tokens out",
            field="sampling_params.logit_processors",
        )


def _check_ids(field: str, ids: Iterable[int], vocabulary: int) -> None:
    greatest = max(ids, default=0)
    if greatest >= vocabulary:
        raise InvalidRequest(
            f"{field}: token id {greatest} is outside the vocabulary of {vocabulary} ids (0 to {vocabulary - 1})",
            field=field,
        )


def as_prompts(value: PromptLike | Sequence[PromptLike], context_length: int | None = None) -> tuple[Prompt, ...]:
    """Return the prompts that ``value`` stands for: one prompt, or a sequence of them.

    A string, a list of integers and a list of messages are one prompt each; a list of those is several.

    Args:
        value: The prompts.
        context_length: Most token ids of a prompt. Longer prompts are refused before their ids are checked.

    Raises:
        InvalidRequest: naming the prompt and its fault.
    """
    return tuple(as_prompt(one, where, context_length) for where, one in given_prompts(value))


def given_prompts(value: PromptLike | Sequence[PromptLike]) -> list[tuple[str, object]]:
    """Return the prompts as they were given, each with the name that errors use for it; validate none of them.

    Raises:
        InvalidRequest: there are no prompts, too many, or the value is of another type.
    """
    if _is_one(value):
        return [("prompts", value)]
    if not isinstance(value, Sequence):
        raise InvalidRequest(
            f"prompts is a {type(value).__name__}; expected text, token ids, chat messages, or a list of those",
            field="prompts",
        )
    if not value:
        raise InvalidRequest("prompts is empty; give at least one prompt", field="prompts")
    if len(value) > MOST_SAMPLES_OF_A_CALL:
        raise InvalidRequest(
            f"prompts has {len(value)} entries; expected at most {MOST_SAMPLES_OF_A_CALL} in one call, so make several",
            field="prompts",
        )
    return [(f"prompts[{index}]", item) for index, item in enumerate(value)]


def _is_one(value: object) -> bool:
    if isinstance(value, str | TokenPrompt | TextPrompt | ChatPrompt):
        return True
    if not isinstance(value, Sequence) or not value:
        return False
    first = value[0]
    return isinstance(first, int) or hasattr(first, "role") or (isinstance(first, Mapping) and "role" in first)


def as_prompt(value: object, where: str, context_length: int | None = None) -> Prompt:
    """Return one prompt; see :func:`as_prompts`."""
    match value:
        case TokenPrompt() | TextPrompt() | ChatPrompt():
            return _checked_again(value, where, context_length)
        case str():
            return TextPrompt(text=value)
        case Sequence() if not value:
            raise InvalidRequest(f"{where} is empty; a prompt needs at least one token", field=where)
        case Sequence() if isinstance(value[0], int):
            check_prompt_length(len(value), where, context_length)
            try:
                return _TOKENS.validate_python({"token_ids": value})
            except ValidationError as error:
                bad = error.errors(include_url=False)[0]["input"]
                raise InvalidRequest(
                    f"{where}: {shown(bad)} is no token id; expected integers of at least 0", field=where
                ) from None
        case Sequence() if not isinstance(value, bytes | bytearray):
            try:
                return _CHAT.validate_python({"messages": value})
            except ValidationError as error:
                field, message = describe_validation_error(error, ChatPrompt, prefix=f"{where}.")
                raise InvalidRequest(message, field=field) from None
        case _:
            raise InvalidRequest(
                f"{where} is a {type(value).__name__}; expected text, token ids or chat messages", field=where
            )


def _checked_again(prompt: Prompt, where: str, context_length: int | None) -> Prompt:
    """Return a prompt whose fields are valid, even if it was made by ``model_copy(update=…)``, which checks none."""
    if isinstance(prompt, TokenPrompt) and isinstance(prompt.token_ids, tuple):
        check_prompt_length(len(prompt.token_ids), where, context_length)
    try:
        return type(prompt).model_validate(prompt)
    except ValidationError as error:
        field, message = describe_validation_error(error, type(prompt), prefix=f"{where}.")
        raise InvalidRequest(message, field=field) from None


def check_prompt_ids(ids: list[int], where: str, model: ModelInfo) -> None:
    """Raise :class:`InvalidRequest` for a prompt that is empty, out of vocabulary or too long."""
    check_prompt_length(len(ids), where, model.context_length)
    if not ids:
        raise InvalidRequest(f"{where} is empty; a prompt needs at least one token", field=where)
    if (last := highest(ids)) >= model.vocab_size:
        raise InvalidRequest(
            f"{where}: token id {last} is outside the vocabulary of {model.vocab_size} ids "
            f"(0 to {model.vocab_size - 1})",
            field=where,
        )


def check_prompt_length(tokens: int, where: str, context_length: int | None) -> None:
    """Raise :class:`InvalidRequest` for a prompt of more tokens than the context holds."""
    if context_length is not None and tokens > context_length:
        raise InvalidRequest(
            f"{where} has {tokens} tokens, more than the context length of {context_length}; shorten it", field=where
        )


def resolve_max_new_tokens(params: SamplingParams, prompt_length: int, where: str, model: ModelInfo) -> int:
    """Return how many tokens may be generated.

    Raises:
        InvalidRequest: prompt and ``max_new_tokens`` do not fit the context together.
    """
    room = model.context_length - prompt_length
    if params.max_new_tokens is None:
        if room < max(1, params.min_new_tokens):
            raise InvalidRequest(
                f"{where} has {prompt_length} tokens and leaves room for {room} in the context length of "
                f"{model.context_length}; shorten it",
                field=where,
            )
        return room
    if params.max_new_tokens > room:
        raise InvalidRequest(
            f"sampling_params.max_new_tokens={params.max_new_tokens} and the {prompt_length} tokens of {where} are "
            f"more than the context length of {model.context_length}; ask for at most {room}, or None for what fits",
            field="sampling_params.max_new_tokens",
        )
    return params.max_new_tokens


def check_media(prompt: Prompt, where: str, config: EngineConfig, capabilities: frozenset[Capability]) -> None:
    """Check the images, videos and sounds of a prompt before any of them is read.

    Raises:
        UnsupportedCapability: the engine does not claim media of that kind.
        InvalidRequest: they hold more bytes than the configuration allows.
    """
    most = config.media.max_bytes
    size = sum(len(item.data) for item in prompt.media if item.data is not None)
    if size > most:
        raise InvalidRequest(
            f"{where} holds {size} bytes of images, videos and sounds; expected at most {most} (media.max_bytes of the "
            "engine's configuration); give fewer or smaller ones, or raise the bound",
            field="prompts",
        )
    for item in prompt.media:
        for kind, capability in MEDIA_CAPABILITY:
            if isinstance(item, kind):
                what = f"{where} with {capability.value}{_lacking(capability)}"
                require(capabilities, capability, what, config.backend)


def _lacking(capability: Capability) -> str:
    if capability in (Capability.VIDEO, Capability.AUDIO) and importlib.util.find_spec("av") is None:
        return f" (PyAV, which reads it, is not installed here: pip install 'drivetrain[{capability.value}]')"
    if capability in STRUCTURED_OUTPUT and importlib.util.find_spec("xgrammar") is None:
        return " (xgrammar, which compiles it, is not installed here: pip install 'drivetrain[transformers]')"
    return ""
