"""What the two sides tell each other before the first call: versions, and which engine."""

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
    """The host's first message."""
    return Hello(WIRE_VERSION, drivetrain_version(), platform.python_version(), os.getpid())


def open_for(config: EngineConfig, backend: str) -> Open:
    """The trainer's answer.

    A host of the same Python also looks where this process looks for modules, so that both find the same plugins.
    """
    path = () if config.python else tuple(os.path.abspath(folder) for folder in sys.path)
    return Open(
        WIRE_VERSION, drivetrain_version(), backend, msgspec.Raw(msgspec.msgpack.encode(portable(config))), path
    )


def opened_config(opened: Open) -> EngineConfig:
    """The configuration that :func:`open_for` packed.

    Raises:
        WireError: it is no configuration.
    """
    return cast(EngineConfig, _config.decode(opened.config))


def portable(config: EngineConfig) -> dict[str, object]:
    """The fields of a configuration that a host gets: those that were set, but where the engine runs.

    A backend may tell a field that was set from one that was left alone, so the others stay unset. A secret goes as it
    is: the host is this program's own, and hears of it through a pipe or a socket that nobody else has.
    """
    fields: dict[str, object] = config.model_dump(mode="json", exclude_unset=True, exclude={"python", "isolation"})
    if config.endpoint_api_key is not None:
        fields["endpoint_api_key"] = config.endpoint_api_key.get_secret_value()
    return fields


def check_version(who: str, wire_version: int, drivetrain: str) -> None:
    """Refuse another version of the protocol.

    Raises:
        WireError: naming both versions and the remedy.
    """
    if wire_version != WIRE_VERSION:
        raise WireError(
            f"{who} speaks wire version {wire_version} (drivetrain {drivetrain}), this side {WIRE_VERSION} "
            f"(drivetrain {drivetrain_version()}); install the same version of drivetrain in both environments"
        )


def drivetrain_version() -> str:
    """The version of drivetrain in this environment."""
    return installed("drivetrain")


def installed(distribution: str) -> str:
    """A distribution's version, or ``"not installed"``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


__all__ = ["check_version", "drivetrain_version", "hello", "installed", "open_for", "opened_config", "portable"]
