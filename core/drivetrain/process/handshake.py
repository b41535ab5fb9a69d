"""Handshake before the first call: versions, and the engine to load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Final, cast

import msgspec

from drivetrain.errors import WireError
from drivetrain.process.codec import codec_for
from drivetrain.process.wire import WIRE_VERSION, Hello, Open
from drivetrain.types.config import EngineConfig

_config: Final = codec_for(EngineConfig)


def hello() -> Hello:
    """Make the host's first message."""
    return Hello(WIRE_VERSION, drivetrain_version(), platform.python_version(), os.getpid())


def open_for(config: EngineConfig, backend: str) -> Open:
    """Make the trainer's answer to ``Hello``.

    A host of the same Python gets this process's module search path, so that both find the same plugins.
    """
    path = () if config.python else tuple(os.path.abspath(folder) for folder in sys.path)
    return Open(
        WIRE_VERSION, drivetrain_version(), backend, msgspec.Raw(msgspec.msgpack.encode(portable(config))), path
    )


def opened_config(opened: Open) -> EngineConfig:
    """Decode the configuration that :func:`open_for` encoded.

    Raises:
        WireError: The bytes are not a configuration.
    """
    return cast(EngineConfig, _config.decode(opened.config))


def portable(config: EngineConfig) -> dict[str, object]:
    """Return the configuration fields to send to a host: those that are set, except ``python`` and ``isolation``.

    Other fields stay unset, because a backend may distinguish fields that were set. Secrets are sent in plain text: the
    pipe or socket to the host is private.
    """
    fields: dict[str, object] = config.model_dump(mode="json", exclude_unset=True, exclude={"python", "isolation"})
    if config.endpoint_api_key is not None:
        fields["endpoint_api_key"] = config.endpoint_api_key.get_secret_value()
    return fields


def check_version(who: str, wire_version: int, drivetrain: str) -> None:
    """Raise if the other side speaks another version of the protocol.

    Raises:
        WireError: The versions differ; the message names both and the remedy.
    """
    if wire_version != WIRE_VERSION:
        raise WireError(
            f"{who} speaks wire version {wire_version} (drivetrain {drivetrain}), this side {WIRE_VERSION} "
            f"(drivetrain {drivetrain_version()}); install the same version of drivetrain in both environments"
        )


def drivetrain_version() -> str:
    """Return the version of drivetrain in this environment."""
    return installed("drivetrain")


def installed(distribution: str) -> str:
    """Return a distribution's version, or ``"not installed"``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
