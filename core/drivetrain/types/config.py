"""Engine configuration: one set of names for every backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    StrictInt,
    ValidationError,
    field_validator,
)

from drivetrain.checks.enum_fields import BY_NAME
from drivetrain.checks.name_hints import CONFIG_NAMES
from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import HIDDEN, secrets_in, shown, without_secrets
from drivetrain.checks.simple_values import LONGEST_PATH, LONGEST_SECONDS, fault_of_name
from drivetrain.errors import InvalidConfig
from drivetrain.types.sampling import INT32_MAX, LogprobsMode


def _no_flag(value: object) -> object:
    """Reject booleans, which pydantic would coerce to 1.0 or 0.0."""
    if isinstance(value, bool):
        raise ValueError("it is a bool; expected a number")
    return value


def _text(value: str) -> str:
    """Reject text that no path and no argument of a process can hold."""
    if fault := fault_of_name(value, LONGEST_PATH):
        raise ValueError(fault)
    return value


Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS), BeforeValidator(_no_flag)]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(_no_flag)]
Text = Annotated[str, AfterValidator(_text)]
Count = Annotated[StrictInt, Field(ge=1, le=INT32_MAX)]


class Isolation(Enum):
    """The process that an engine runs in."""

    INLINE = "inline"
    """The caller's own process."""
    PROCESS = "process"
    """A separate, supervised host process; the default."""


class Task(Enum):
    """The kind of model, and with it the calls that the engine answers."""

    GENERATE = "generate"
    EMBED = "embed"
    """Turn texts into vectors: ``encode``."""
    REWARD = "reward"
    """Score sequences with a reward model: ``score``."""


class Timeouts(BaseModel):
    """Deadlines, in seconds. Every wait on another process has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: Seconds = Field(default=600.0, description="For starting the engine.")
    generate: Seconds = Field(
        default=3600.0, description="For one generate call or stream, including its wait during a pause."
    )
    control: Seconds = Field(
        default=120.0, description="For a control call: pause, sleep, wake-up, cache, LoRA and others."
    )
    weight_update: Seconds = Field(
        default=600.0,
        description="For each step of a weight update, for all steps if taken in one call, and for saving a model.",
    )
    step: Seconds = Field(
        default=1200.0,
        description="For one step of an engine with requests; after it the engine counts as dead. If weight_update is "
        "longer, it applies instead.",
    )
    media: Seconds = Field(
        default=120.0,
        description="For fetching one image, video or sound, including redirects; and again for decoding it.",
    )
    close: Seconds = Field(default=20.0, description="For a clean shutdown, before the host process is killed.")
    heartbeat: Seconds = Field(
        default=10.0, description="For a sign of life from the host process; after it the host counts as dead."
    )
    event_loop: Seconds = Field(
        default=120.0,
        description="For one turn of a started host's event loop; if blocked longer, the host counts as dead.",
    )


class MediaLimits(BaseModel):
    """Limits on media that come with prompts. Each is checked before the memory or time is spent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_bytes: StrictInt = Field(
        default=1 << 28, ge=1, description="Maximum bytes of one file, and of all media of one prompt together."
    )
    max_pixels: StrictInt = Field(
        default=89_478_485,
        ge=1,
        le=178_956_970,
        description="Maximum pixels of an image. Pillow warns above the default and refuses above the largest value.",
    )
    max_video_seconds: Seconds = Field(default=3600.0, description="Maximum length of a video in seconds.")
    max_video_pixels: StrictInt = Field(
        default=1 << 28,
        ge=1,
        description="Maximum pixels of all kept frames of a video; each pixel temporarily takes nine bytes.",
    )
    max_audio_seconds: Seconds = Field(default=3600.0, description="Maximum length of a sound in seconds.")
    max_audio_samples: StrictInt = Field(
        default=1 << 28,
        ge=1,
        description="Maximum samples of a sound, of all its channels together; decoding takes four bytes for each.",
    )
    allow_private_hosts: bool = Field(
        default=True,
        description="Also fetch from loopback, link-local and private addresses, and through the environment's "
        "proxies.",
    )


class EngineConfig(BaseModel):
    """Configuration of one engine. Frozen; unknown fields are refused.

    If the chosen backend has no equivalent for a field that is set, creating the engine raises an error that names the
    field: none is ignored.
    """

    # Pydantic's errors would repeat the input, for example an API key under a mistyped name.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    other_names: ClassVar = CONFIG_NAMES
    hidden_fields: ClassVar = ("endpoint", "endpoint_api_key")
    """Fields whose value may hold a key or password; error messages leave it out."""

    backend: Text = Field(description="Name of the backend: transformers, or a plugin's.")
    model: Text = Field(description="Folder or hub id of the model.")
    tokenizer: Text | None = Field(default=None, description="Folder or hub id of the tokenizer; None: the model's.")
    revision: Text | None = Field(default=None, description="Revision of the model on the hub.")
    task: Annotated[Task, BY_NAME] = Field(
        default=Task.GENERATE, description="Kind of model: generate, embed or reward."
    )
    trust_remote_code: bool = Field(default=False, description="Allow running code that comes with the model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; auto: the checkpoint's."
    )
    device: Text | None = Field(default=None, description="cpu, cuda, cuda:1, …; None: a GPU if there is one.")
    tensor_parallel_size: Count = Field(default=1, description="Number of devices over which each layer is split.")
    pipeline_parallel_size: Count = Field(
        default=1, description="Number of devices over which the layers are distributed."
    )
    data_parallel_size: Count = Field(default=1, description="Number of replicas of the model.")
    expert_parallel_size: Count = Field(
        default=1, description="Number of devices over which the experts are distributed."
    )
    gpu_memory_utilization: Share | None = Field(
        default=None, description="Share of the GPU's memory for weights and KV cache; None: the engine's default."
    )
    max_num_batched_tokens: Count | None = Field(
        default=None, description="Maximum prompt tokens computed in one step; None: the engine's default."
    )
    max_num_seqs: Count | None = Field(
        default=None, description="Maximum requests that run at once; None: the engine's default."
    )
    context_length: Count | None = Field(
        default=None, description="Maximum tokens of prompt and output together; None: the model's limit."
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse the KV cache of prompts with a common prefix.")
    attention_backend: Text | None = Field(
        default=None, description="Attention implementation, by the engine's name for it; None: the engine's default."
    )
    enable_lora: bool = Field(default=False, description="Prepare for LoRA adapters.")
    max_loras: Count | None = Field(default=None, description="Maximum adapters loaded at once.")
    max_lora_rank: Count | None = Field(default=None, description="Maximum rank of an adapter.")
    seed: StrictInt | None = Field(
        default=None, ge=0, lt=2**63, description="Seed for requests without one; None: not repeatable."
    )
    logprobs_mode: Annotated[LogprobsMode, BY_NAME] = Field(
        default=LogprobsMode.TEMPERATURE,
        description="Default distribution that logprobs belong to; a request may name another.",
    )
    deterministic: bool = Field(
        default=False, description="Results that are bitwise the same, whatever else the engine computes."
    )
    enable_sleep: bool = Field(default=True, description="Prepare for sleep and wake-up.")
    sleep_keeps_weights: bool = Field(
        default=False,
        description="Keep a copy of the weights during sleep, so that no update is needed after waking up.",
    )
    weight_version: str = Field(default="initial", description="Version of the weights loaded at start.")
    tool_call_parser: str | None = Field(
        default=None,
        description="Tool-call syntax that chat_completion parses, by vLLM's or SGLang's name (hermes, mistral, …); "
        "None: detected from the chat template.",
    )
    engine_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments passed to the engine unchanged, under its own names."
    )
    isolation: Annotated[Isolation, BY_NAME] | None = Field(
        default=None, description="Where the engine runs; None: the backend's choice."
    )
    python: Text | None = Field(
        default=None,
        description="Python executable of the engine's environment; None: this one. Implies isolation 'process'.",
    )
    endpoint: Text | None = Field(
        default=None,
        description="http://host:port of a running server, for backends that connect to a server.",
    )
    endpoint_api_key: SecretStr | None = Field(
        default=None, min_length=1, description="API key of the server at endpoint; never shown."
    )
    media: MediaLimits = Field(
        default_factory=MediaLimits, description="Limits on images, videos and sounds in prompts."
    )
    timeouts: Timeouts = Field(default_factory=Timeouts, description="Deadlines.")

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # the port is not a number
            raise ValueError("expected http://host:port") from None
        if not fine or parts.query or parts.fragment:
            raise ValueError("expected http://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it holds a user or a password; a server's key belongs into endpoint_api_key")
        return value.rstrip("/")

    @field_validator("endpoint_api_key")
    @classmethod
    def _key_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value() if value is not None else ""
        if not (key.isascii() and key.isprintable()):
            raise ValueError("expected printable ASCII characters, which an HTTP header can hold")
        return value

    @field_validator("tool_call_parser")
    @classmethod
    def _parser_known(cls, value: str | None) -> str | None:
        from drivetrain.tool_calls import DIALECTS

        if value is not None and value not in DIALECTS:
            raise ValueError(f"there is no such parser; known: {', '.join(sorted(DIALECTS))}")
        return value

    @field_validator("engine_kwargs")
    @classmethod
    def _kwargs_can_be_sent(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            msgspec.msgpack.encode(value)
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no engine process can be sent it: {error}") from None
        return value

    @field_validator("weight_version")
    @classmethod
    def _version_is_a_name(cls, value: str) -> str:
        if fault := fault_of_name(value):
            raise ValueError(fault)
        return value

    @field_validator("model")
    @classmethod
    def _model_given(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the model is empty; give a folder or a hub id")
        return value

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        return ((name, without_secrets(value)) for name, value in super().__repr_args__())

    def described(self) -> dict[str, object]:
        """Return the fields that were set, as JSON values with secrets hidden."""
        fields = self.model_dump(mode="json", exclude_unset=True)
        return {name: without_secrets(value) for name, value in fields.items()}

    def redacted(self, text: str) -> str:
        """Return a text with every key and password of this configuration hidden, such as an engine's own error."""
        key = self.endpoint_api_key.get_secret_value() if self.endpoint_api_key else None
        for secret in sorted(secrets_in({"api_key": key, **self.engine_kwargs}), key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> EngineConfig:
        """Build a configuration from a mapping, such as one section of a trainer's own configuration.

        Raises:
            InvalidConfig: A field is wrong. The message names the first one, its value and what was expected.
        """
        if not isinstance(mapping, Mapping):
            raise InvalidConfig(f"the configuration is a {type(mapping).__name__}; expected a mapping of fields")
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise invalid_config(error, cls) from None
        except RecursionError as error:
            raise InvalidConfig("the configuration is nested too deeply to be read; flatten it") from error

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> EngineConfig:
        """Build a configuration from a YAML file that holds one mapping.

        Raises:
            InvalidConfig: The file cannot be read, is not a mapping, or has a wrong field.
        """
        return cls.from_mapping(read_yaml(path))


def read_yaml(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read the mapping that a YAML file holds.

    Raises:
        InvalidConfig: The file cannot be read, is not a mapping, or gives a field twice.
    """
    import yaml

    from drivetrain.checks.yaml_mappings import load_yaml

    try:
        loaded = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:  # not UTF-8; NUL in the path; not a path
        name = shown(os.fspath(path) if isinstance(path, os.PathLike) else path)
        raise InvalidConfig(f"cannot read {name}: {error}; give a YAML file") from error
    except yaml.YAMLError as error:
        # YAML's own message quotes the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        why = getattr(error, "problem", None) or type(error).__name__
        raise InvalidConfig(f"cannot read {os.fspath(path)!r}: {place}{why}") from None
    if not isinstance(loaded, dict):
        raise InvalidConfig(
            f"{os.fspath(path)!r} holds a {type(loaded).__name__}; expected a mapping such as 'backend: transformers'"
        )
    return {str(name): value for name, value in loaded.items()}


def invalid_config(error: ValidationError, model: type[BaseModel]) -> InvalidConfig:
    """Convert pydantic's first error about a configuration to an ``InvalidConfig``."""
    field, message = describe_validation_error(error, model)
    return InvalidConfig(message, field=field)
