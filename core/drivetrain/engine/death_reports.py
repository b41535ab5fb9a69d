"""Tell of an engine's death before whoever waited on the engine sees it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from drivetrain.backend.base import Backend
from drivetrain.errors import EngineDied
from drivetrain.process.rpc_methods import METHODS

P = ParamSpec("P")
R = TypeVar("R")


def report_death(backend: Backend, on_death: Callable[[EngineDied], None]) -> None:
    """Call ``on_death`` with each EngineDied that a coroutine of ``backend`` raises, before it goes on.

    Streams are left as they are, so that their items cost nothing more: whoever reads them calls ``on_death``.
    """
    for method in METHODS.values():
        if not method.streams:
            setattr(backend, method.name, _reporting(getattr(backend, method.name), on_death))


def _reporting(
    function: Callable[P, Awaitable[R]], on_death: Callable[[EngineDied], None]
) -> Callable[P, Awaitable[R]]:
    @functools.wraps(function)
    async def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return await function(*arguments, **named)
        except EngineDied as error:
            on_death(error)
            raise

    return call
