"""How an engine is configured: one set of names for every backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, StrictInt, ValidationError, field_validator
from pydantic import PositiveFloat as Seconds

from drivetrain.errors import InvalidConfig
from drivetrain.sampling import LogprobsMode


class Isolation(Enum):
    """Where an engine runs."""

    INLINE = "inline"
    """In this process."""
    PROCESS = "process"
    """In a host process of its own, which is watched; the default."""


class Task(Enum):
    """What the engine's model is for."""

    GENERATE = "generate"
    EMBED = "embed"
    """Turn texts into vectors: ``encode``."""
    REWARD = "reward"
    """Score sequences with a reward model: ``score``."""


class Timeouts(BaseModel):
    """Deadlines, in seconds. Every wait on another process has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: Seconds = Field(default=600.0, description="Until the engine is ready.")
    generate: Seconds = Field(
        default=3600.0, description="For one generate call or stream, its wait in a pause included."
    )
    control: Seconds = Field(default=120.0, description="For pause, sleep, wake, cache, LoRA and the like.")
    weight_update: Seconds = Field(
        default=600.0, description="For each step of a weight update, or those taken in one call; and for a save."
    )
    close: Seconds = Field(default=20.0, description="For a clean shutdown, before the host process is killed.")
    heartbeat: Seconds = Field(default=10.0, description="A host process silent for this long is dead.")
    event_loop: Seconds = Field(
        default=120.0, description="A started host whose event loop stands still so long is dead."
    )


class EngineConfig(BaseModel):
    """One engine's configuration. Frozen; unknown fields are refused.

    A field that is set but that the chosen backend has no equivalent for is refused when the engine is
    created, naming the field: nothing is dropped in silence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(description="Name of the backend: transformers, or a plugin's.")
    model: str = Field(description="Folder or hub id of the model.")
    tokenizer: str | None = Field(default=None, description="Folder or hub id of the tokenizer; None: the model's.")
    revision: str | None = Field(default=None, description="Revision on the hub.")
    task: Task = Field(default=Task.GENERATE, description="What the model is for.")
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; auto: the checkpoint's own."
    )
    device: str | None = Field(default=None, description="cpu, cuda, cuda:1, …; None: a GPU when there is one.")
    tensor_parallel_size: StrictInt = Field(default=1, ge=1, description="Devices that one layer is split over.")
    pipeline_parallel_size: StrictInt = Field(default=1, ge=1, description="Devices that the layers are split over.")
    data_parallel_size: StrictInt = Field(default=1, ge=1, description="Replicas of the model.")
    expert_parallel_size: StrictInt = Field(default=1, ge=1, description="Devices that the experts are split over.")
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the GPU's memory for weights and KV cache; None: the engine's own.",
    )
    max_num_batched_tokens: StrictInt | None = Field(
        default=None, ge=1, description="Most prompt tokens computed in one step; None: the engine's own."
    )
    max_num_seqs: StrictInt | None = Field(
        default=None, ge=1, description="Most requests that run at once; None: the engine's own."
    )
    context_length: StrictInt | None = Field(
        default=None, ge=1, description="Most tokens of prompt and output together; None: the model's own."
    )
    enable_prefix_caching: bool = Field(default=True, description="Use the cache of prompts that begin alike.")
    attention_backend: str | None = Field(default=None, description="The engine's own name of an implementation.")
    enable_lora: bool = Field(default=False, description="Make ready for LoRA adapters.")
    max_loras: StrictInt | None = Field(default=None, ge=1, description="Most adapters loaded at once.")
    max_lora_rank: StrictInt | None = Field(default=None, ge=1, description="Largest rank of an adapter.")
    seed: StrictInt | None = Field(
        default=None, ge=0, lt=2**63, description="Seeds requests that bring no seed; None: not repeatable."
    )
    logprobs_mode: LogprobsMode = Field(
        default=LogprobsMode.TEMPERATURE, description="Which distribution logprobs belong to unless a request says."
    )
    deterministic: bool = Field(default=False, description="Batch-invariant results.")
    enable_sleep: bool = Field(default=True, description="Make ready for sleep and wake-up.")
    sleep_keeps_weights: bool = Field(
        default=False, description="Keep a copy of the weights while they sleep, so that waking needs no update."
    )
    weight_version: str = Field(default="initial", min_length=1, description="Version of the weights loaded at start.")
    engine_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Passed to the engine as they are, under its own names."
    )
    isolation: Isolation | None = Field(default=None, description="Where the engine runs; None: the backend's choice.")
    python: str | None = Field(
        default=None, description="Python of the environment that holds the engine; None: this one. Implies process."
    )
    endpoint: str | None = Field(
        default=None,
        description="http://host:port of a running server, for backends that connect to one and start nothing.",
    )
    endpoint_api_key: SecretStr | None = Field(
        default=None, min_length=1, description="The key that the server at endpoint asks for; never shown."
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
        except ValueError:  # a port that is no number
            raise ValueError("expected http://host:port") from None
        if not fine or parts.query or parts.fragment:
            raise ValueError("expected http://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it holds a user or a password; a server's key belongs into endpoint_api_key")
        return value.rstrip("/")

    @field_validator("model")
    @classmethod
    def _model_given(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the model is empty; give a folder or a hub id")
        return value

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> EngineConfig:
        """Build from a mapping, such as one section of a trainer's configuration.

        Raises:
            InvalidConfig: naming the first wrong field, its value and what was expected.
        """
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise invalid_config(error, cls) from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> EngineConfig:
        """Build from a YAML file that holds one mapping.

        Raises:
            InvalidConfig: the file cannot be read, is not a mapping, or has a wrong field.
        """
        import yaml

        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise InvalidConfig(f"cannot read the engine configuration {os.fspath(path)!r}: {error}") from error
        if not isinstance(loaded, dict):
            raise InvalidConfig(
                f"{os.fspath(path)!r} holds a {type(loaded).__name__}; "
                "expected a mapping such as 'backend: transformers'"
            )
        return cls.from_mapping(loaded)


_SECRET: Final = ("endpoint", "endpoint_api_key")
"""Fields whose value may hold a key or a password, so that errors do not repeat it."""


def invalid_config(error: ValidationError, model: type[BaseModel]) -> InvalidConfig:
    """Turn pydantic's first complaint about a configuration into one typed sentence."""
    field, message = describe_validation_error(error, model)
    return InvalidConfig(message, field=field)


def describe_validation_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> tuple[str, str]:
    """Return (dotted field, sentence) for pydantic's first complaint: the field, the value, the remedy."""
    import difflib

    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    shown = f"{prefix}{where}" if where else (prefix.rstrip(".") or model.__name__)
    if first["type"] == "extra_forbidden":
        fields = _model_at(model, first["loc"][:-1]).model_fields
        known = [field.alias or name for name, field in fields.items()]
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
        return shown, f"{shown}={first['input']!r}: there is no such field; {hint}"
    if first["type"] == "missing":
        return shown, f"{shown} is missing; it is required"
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        return shown, f"{shown}: {message}"
    if where in _SECRET:
        return shown, f"{shown}: {message}"
    return shown, f"{shown}={first['input']!r}: {message}"


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that a complaint is about: ``model``, or one in its fields."""
    for part in loc:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model
