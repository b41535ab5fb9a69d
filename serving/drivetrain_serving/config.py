"""Configuration of the server."""

from __future__ import annotations

import importlib
import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from drivetrain_serving.host_names import AllowedHosts, is_loopback, require_host


class SessionConfig(BaseModel):
    """Bounds of the sessions that ``/sessions/{id}/v1`` records."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_answers: bool = Field(
        default=False,
        description="Extend an earlier answer's ids also where the chat template renders it differently by now, such "
        "as without its reasoning; False: begin a branch.",
    )
    timeout: PositiveFloat = Field(default=3600.0, description="Seconds without use after which a session expires.")
    most_sessions: PositiveInt = Field(default=10_000, description="Maximum number of sessions.")
    most_turns: PositiveInt = Field(default=4096, description="Maximum number of turns of a session.")
    memory_bytes: PositiveInt = Field(
        default=1 << 30,
        description="Memory for ids, logprobs, experts and masks; the least recently used beyond it go to disk.",
    )
    disk_bytes: int = Field(
        default=64 << 30, ge=0, description="Disk space for them; beyond it, new turns are refused."
    )
    folder: str | None = Field(
        default=None,
        description="Folder in which a temporary folder for them is made, and removed at the end; None: the system's.",
    )
    routed_experts: bool = Field(
        default=False,
        description="Record the experts that each sampled token was routed to; an engine that cannot refuses the "
        "turns. ``return_routed_experts`` of a request overrides it.",
    )
    sampling_mask: bool = Field(
        default=False,
        description="Record the ids that were left to draw each sampled token from; an engine that cannot refuses the "
        "turns. ``return_sampling_mask`` of a request overrides it.",
    )

    @field_validator("folder")
    @classmethod
    def _is_there(cls, folder: str | None) -> str | None:
        if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError("expected a folder that this process can write to; it is written to when memory is full")
        return folder


class ServerConfig(BaseModel):
    """The server's address, keys and limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    processes: PositiveInt = Field(
        default=1,
        description="1: the engine's process answers all requests. More: so many front-end processes accept on the "
        "port, tokenise, and read and write JSON. :class:`Server` reads it, and :func:`create_app` does not.",
    )
    served_model_name: tuple[str, ...] = Field(
        default=(), description="Names of the model in requests and answers; the first is the one in answers."
    )
    dialect: Literal["vllm", "sglang"] = Field(
        default="vllm", description="Server whose answers are given on paths that vLLM and SGLang both have."
    )
    api_key: str | None = Field(
        default=None, min_length=16, repr=False, description="Key of the routes that generate; None: anyone may."
    )
    control_key: str | None = Field(
        default=None,
        min_length=16,
        repr=False,
        description="Key of the routes that pause, sleep, and change weights or adapters; it opens all others too.",
    )
    open_control: bool = Field(
        default=False, description="Let anyone who reaches the port change the weights, also from other machines."
    )
    open_to_all: bool = Field(
        default=False,
        description="Take no keys, also from other machines: whoever reaches the port may generate and change the "
        "weights.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names and addresses by which clients may call routes that need no key, beside ``host``, localhost "
        "and loopback addresses; ``*.DOMAIN``: all below a domain; ``*``: any. If empty, a server that can be reached "
        "from other machines, or with ``open_to_all``, takes any.",
    )
    lora_folder: str | None = Field(
        default=None, description="Folder of adapters that are loaded when a request first names one."
    )
    log_requests: bool = Field(
        default=False,
        description="Log each request as a line of JSON, without prompts and keys, to the logger "
        "``drivetrain.serving.requests``.",
    )
    trace_requests: bool = Field(
        default=False,
        description="Make an OpenTelemetry span of each request, for the tracer provider of the process; needs the "
        "extra ``otel``.",
    )
    max_body_bytes: PositiveInt = Field(
        default=256 << 20, description="Largest request body: a trainer may send a whole batch in one."
    )
    keep_alive_timeout: PositiveInt = Field(
        default=75, description="Seconds that a connection stays open on which no request has begun."
    )
    header_timeout: PositiveFloat = Field(
        default=30.0, description="Seconds in which a request's headers must have come after their first byte."
    )
    body_timeout: PositiveFloat = Field(default=60.0, description="Seconds in which a request body must have come.")
    receive_timeout: PositiveFloat = Field(
        default=30.0, description="Seconds in which each next part of a request body must have come."
    )
    send_timeout: PositiveFloat = Field(
        default=60.0, description="Seconds in which a client must take a part of its answer; else its requests end."
    )
    sessions: SessionConfig = Field(default_factory=SessionConfig, description="Bounds of recorded sessions.")
    weight_group_timeout: PositiveFloat = Field(
        default=1800.0,
        description="Seconds in which a trainer's weight group must form, and each bucket must have been broadcast.",
    )
    cast_weights: bool = Field(
        default=True,
        description="Round floating-point tensors of a trainer's weight group to the engine's dtype, as vLLM and "
        "SGLang do; False: refuse a dtype that would be rounded. Conversions that keep every value are always made.",
    )
    shutdown_timeout: PositiveFloat = Field(
        default=30.0, description="Seconds that requests in flight get to end after SIGTERM."
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(require_host, names))

    @field_validator("trace_requests")
    @classmethod
    def _only_with_opentelemetry(cls, wanted: bool) -> bool:
        if wanted:
            try:
                importlib.import_module("opentelemetry.trace")
            except ImportError as error:
                raise ValueError(f"spans need OpenTelemetry; install drivetrain[otel] ({error})") from None
        return wanted

    @property
    def hosts(self) -> AllowedHosts | None:
        """The hosts by which clients may call routes that need no key; None: any."""
        if self.allowed_hosts or (is_loopback(self.host) and not self.open_to_all):
            return AllowedHosts(self.host, self.allowed_hosts)
        return None

    @model_validator(mode="after")
    def _keys_where_others_can_call(self) -> ServerConfig:
        if self.open_to_all and (self.api_key or self.control_key):
            raise ValueError("open_to_all=True takes no keys; leave out api_key and control_key")
        if self.open_to_all or is_loopback(self.host):
            return self
        if self.api_key is None:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines; give an api_key and a control_key, or "
                "open_to_all=True for trainers that send no key"
            )
        if self.control_key is None and not self.open_control:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and whoever reaches it could change the "
                "weights; give a control_key, or open_control=True"
            )
        return self
