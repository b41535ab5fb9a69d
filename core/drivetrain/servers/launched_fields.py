"""Configuration fields that only the launch of a server can honour: compared with the server's own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig

_Says = TypeVar("_Says")

_ANY_WILL_DO: Final = (("dtype", "auto"), ("enable_sleep", False))
"""Fields and values that request nothing of a launch."""


def check_launched_fields(config: EngineConfig, says: _Says, own: Mapping[str, Callable[[_Says], object]]) -> None:
    """Compare the fields that the configuration sets with the server's.

    Args:
        config: The configuration.
        says: The server's answers.
        own: For each field that only a launch can honour, its value in these answers.

    Raises:
        InvalidConfig: naming the field, its value and the server's.
    """
    for field in sorted(own.keys() & config.model_fields_set):
        value, served = getattr(config, field), own[field](says)
        if value != served and (field, value) not in _ANY_WILL_DO:
            raise disagreement(config, field, served)


def disagreement(config: EngineConfig, field: str, served: object) -> InvalidConfig:
    """Return the error of a field with another value than the server was launched with."""
    return InvalidConfig(
        f"{field}={getattr(config, field)!r}, but the server at {config.endpoint} was launched with {served!r}; leave "
        "it out, or launch the server with the configured value",
        field=field,
    )


def not_launched_with(config: EngineConfig, name: str) -> InvalidConfig:
    """Return the error of an item of ``engine_kwargs`` that the server was not launched with."""
    return InvalidConfig(
        f"engine_kwargs={shown({name: config.engine_kwargs[name]})}: only the launch of a server can set it, and the "
        f"one at {config.endpoint} was not launched with it; leave it out",
        field="engine_kwargs",
    )
