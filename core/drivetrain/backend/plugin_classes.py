"""Backend classes of one plugin: calls its hook and checks the result."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pluggy

from drivetrain.backend import hookspecs
from drivetrain.backend.base import Backend
from drivetrain.errors import BackendLoadError


def backend_classes(plugin: object, origin: str) -> list[type[Backend]]:
    """Return the classes from the hook of ``plugin``, called through a separate plugin manager.

    A separate manager keeps other plugins' errors out of the result.

    Args:
        plugin: A module or object with a ``drivetrain_backends`` hook.
        origin: Name of the plugin in errors: its module and distribution.

    Raises:
        BackendLoadError: The hook is missing, failed, or returned something other than concrete backend classes.
    """
    manager = pluggy.PluginManager(hookspecs.hookspec.project_name)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin)
        manager.check_pending()
        results: list[Iterable[object] | None] = manager.hook.drivetrain_backends()
        returned = [cls for result in results for cls in (result if result is not None else ())]
    except (Exception, SystemExit) as error:
        raise BackendLoadError(f"the drivetrain_backends hook of {origin} failed: {describe_error(error)}") from error
    if not results:
        raise BackendLoadError(
            f"{origin} has no drivetrain_backends function marked @drivetrain.hookimpl that returns backend classes"
        )
    return [_checked(cls, origin) for cls in returned]


def _checked(cls: object, origin: str) -> type[Backend]:
    if not isinstance(cls, type) or not issubclass(cls, Backend):
        raise BackendLoadError(f"the hook of {origin} returned {cls!r}; expected subclasses of drivetrain.Backend")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise BackendLoadError(f"{cls.__qualname__} of {origin} is abstract; it does not implement: {missing}")
    for attribute in ("name", "engine_distribution"):
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value:
            raise BackendLoadError(
                f"{cls.__qualname__}.{attribute} of {origin} is {value!r}; expected a string that is not empty"
            )
    return cls


def describe_error(error: BaseException) -> str:
    """Return class and message of a foreign error, such as ``"ImportError: no module named x"``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
