"""Backend classes of the registered plugins: registers a plugin, calls its hook and checks the result."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import cast

import pluggy

from drivetrain.backend import hookspecs
from drivetrain.backend.base import Backend
from drivetrain.errors import BackendLoadError


def plugin_manager() -> pluggy.PluginManager:
    """Return a plugin manager that knows drivetrain's hook and has no plugins yet."""
    manager = pluggy.PluginManager(hookspecs.hookspec.project_name)
    manager.add_hookspecs(hookspecs)
    return manager


def backend_classes(manager: pluggy.PluginManager, plugin: object, origin: str) -> list[type[Backend]]:
    """Register ``plugin`` unless it is registered already, and return the classes from its hook.

    Other plugins' hooks are not called. A plugin that fails is unregistered again.

    Args:
        manager: The plugin manager.
        plugin: A module or object with a ``drivetrain_backends`` hook.
        origin: Name of the plugin in errors: its module and distribution.

    Raises:
        BackendLoadError: The hook is missing, failed, or returned something other than concrete backend classes.
    """
    was_registered = manager.is_registered(plugin)
    try:
        return [_checked(cls, origin) for cls in _returned(manager, plugin, origin)]
    except BackendLoadError:
        if not was_registered and manager.is_registered(plugin):
            manager.unregister(plugin)
        raise


def _returned(manager: pluggy.PluginManager, plugin: object, origin: str) -> list[object]:
    try:
        if not manager.is_registered(plugin):
            # By its id: two plugins may have the same ``__name__``, and pluggy would refuse the second.
            manager.register(plugin, name=str(id(plugin)))
            manager.check_pending()
        hook = manager.hook.drivetrain_backends
        functions = [one.function for one in hook.get_hookimpls() if one.plugin is plugin]
        results = [cast("Iterable[object] | None", function()) for function in functions]
        returned = [cls for result in results if result is not None for cls in result]
    except (Exception, SystemExit) as error:
        raise BackendLoadError(f"the drivetrain_backends hook of {origin} failed: {describe_error(error)}") from error
    if all(result is None for result in results):
        raise BackendLoadError(
            f"{origin} has no drivetrain_backends function marked @drivetrain.hookimpl that returns backend classes"
        )
    return returned


def _checked(cls: object, origin: str) -> type[Backend]:
    if not isinstance(cls, type) or not issubclass(cls, Backend):
        raise BackendLoadError(f"the hook of {origin} returned {cls!r}; expected subclasses of drivetrain.Backend")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise BackendLoadError(f"{cls.__qualname__} of {origin} is abstract; it does not implement: {missing}")
    if cls.generate is Backend.generate and cls.stream is Backend.stream:
        raise BackendLoadError(f"{cls.__qualname__} of {origin} generates nothing; implement stream or generate")
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
