"""Configuration of the server."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class ServerConfig(BaseModel):
    """Where the server listens, who may call it, and what it bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
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
    lora_folder: str | None = Field(
        default=None, description="Folder of adapters that are loaded when a request first names one."
    )
    max_body_bytes: PositiveInt = Field(
        default=256 << 20, description="Largest request body: a trainer may send a whole batch in one."
    )
    body_timeout: PositiveFloat = Field(default=60.0, description="Seconds in which a request body must have come.")
    send_timeout: PositiveFloat = Field(
        default=60.0, description="Seconds in which a client must take a part of a stream; else its requests end."
    )
    weight_group_timeout: PositiveFloat = Field(
        default=1800.0,
        description="Seconds in which a trainer's weight group must form, and each bucket must have been broadcast.",
    )
    shutdown_timeout: PositiveFloat = Field(
        default=30.0, description="Seconds that requests in flight get to end after SIGTERM."
    )

    @model_validator(mode="after")
    def _keys_where_others_can_call(self) -> ServerConfig:
        if is_loopback(self.host):
            return self
        if self.api_key is None:
            raise ValueError(f"host={self.host!r} can be reached from other machines; give an api_key")
        if self.control_key is None and not self.open_control:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and whoever reaches it could change the "
                "weights; give a control_key, or open_control=True"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
