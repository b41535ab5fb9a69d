"""Marks an engine as failed before its callers see EngineDied."""

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
    """Wrap the coroutines of ``backend``: call ``on_death`` with each EngineDied before it propagates.

    Streams are not wrapped, which would slow down every item: their reader calls ``on_death``.
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
