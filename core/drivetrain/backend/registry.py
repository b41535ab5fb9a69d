"""Plugin discovery: lists the installed backends and loads one by its name.

A plugin is an entry point of the group ``drivetrain``. Its name is the backend's; its value is a module with a
``drivetrain_backends`` hook (see ``drivetrain.backend.hookspecs``). Only the requested plugin is imported, so a broken
plugin affects no other; requesting it reports its import error.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Final

from drivetrain.backend.base import Backend
from drivetrain.backend.plugin_classes import backend_classes, describe_error, plugin_manager
from drivetrain.backend.toolkit.engine_versions import release
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import (
    BackendError,
    BackendLoadError,
    BackendUnavailable,
    DuplicateBackend,
    MissingDependency,
    UnknownBackend,
)
from drivetrain.types.arguments import checked

GROUP: Final = "drivetrain"
"""Entry-point group of plugins."""
DISABLE_VARIABLE: Final = "DRIVETRAIN_DISABLED_PLUGINS"
"""Environment variable that switches plugins off: names of backends or distributions, separated by commas."""


class BackendStatus(Enum):
    """Availability of a backend on this machine."""

    AVAILABLE = "available"
    BROKEN = "broken"
    """The plugin fails to load; ``reason`` holds the error."""
    DISABLED = "disabled"
    """The plugin is switched off by ``DRIVETRAIN_DISABLED_PLUGINS``."""
    ENGINE_MISSING = "engine missing"
    """The engine, or a package that the plugin imports, is not installed or is too old."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Description of one backend; starts nothing."""

    name: str
    distribution: str | None
    """Distribution that contains the plugin; None: registered by this program."""
    version: str | None
    """Version of that distribution."""
    engine_distribution: str | None
    """Distribution of the engine; None if the plugin does not load."""
    engine_version: str | None
    """Installed version of the engine; None if it is not installed."""
    status: BackendStatus
    reason: str = ""
    """Reason why the backend is unavailable, and the remedy; empty if it is available."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    backend: type[Backend]
    origin: _Origin
    plugin: object


@dataclass(frozen=True, slots=True)
class _Origin:
    """Origin of a backend: a distribution's entry point, or a call of :func:`register`."""

    module: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        if self.distribution is None:
            return f"{self.module} (registered by this program)"
        return f"{self.module} of the distribution {self.distribution!r} {self.version}"


_manager: Final = plugin_manager()
"""The plugins that were asked for or registered."""
_loaded: dict[str, _Loaded] = {}
"""Backends of those plugins, by name."""


@checked
def load_backend(name: str) -> type[Backend]:
    """Return the class of the backend ``name``, importing only its plugin.

    The engine that it adapts need not be installed; see :func:`require_engine`.

    Raises:
        UnknownBackend: No plugin provides it; the message lists the known backends and their status.
        DuplicateBackend: Two distributions provide it; the message names both.
        BackendLoadError: The plugin fails to load; the original error is the ``__cause__``.
        BackendUnavailable: The plugin imports a missing package, and its distribution has an extra for it.
        BackendError: The backend is switched off by ``DRIVETRAIN_DISABLED_PLUGINS``.
    """
    if name in _loaded:
        _refuse_disabled(name, [_loaded[name].origin])
        return _loaded[name].backend
    entries = _entry_points().get(name)
    if not entries:
        raise UnknownBackend(_unknown(name))
    entry = _only(name, entries)
    origin = _origin(entry)
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as error:  # a plugin that calls sys.exit() on import must not end this program
        extra = _extra_of(name, origin)
        if extra and isinstance(error, ModuleNotFoundError | MissingDependency) and not _is_own(error.name, entry):
            raise BackendUnavailable(_missing(name, str(error.name), extra)) from error
        raise BackendLoadError(
            f"cannot load the backend {name!r} from {origin}: {describe_error(error)}; "
            f"mend or uninstall the plugin, or switch it off with {DISABLE_VARIABLE}={name}"
        ) from error
    backends = {cls.name: cls for cls in backend_classes(_manager, plugin, str(origin))}
    if name not in backends:
        found = ", ".join(map(repr, backends)) or "none"
        raise BackendLoadError(
            f"the hook of {origin} returned no backend with name = {name!r} (it returned: {found}); "
            "the entry point's name must be the name of the class"
        )
    _loaded[name] = _Loaded(backends[name], origin, plugin)
    return backends[name]


def require_engine(backend: type[Backend]) -> str:
    """Return the installed version of the engine that ``backend`` adapts.

    Raises:
        BackendUnavailable: The engine is not installed in this environment, or is too old; the message says how to
            install it.
    """
    try:
        version = importlib.metadata.version(backend.engine_distribution)
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailable(_missing(backend.name, backend.engine_distribution, _requirement(backend))) from None
    check_engine_version(backend, version)
    return version


def check_engine_version(backend: type[Backend], version: str) -> None:
    """Refuse an installed engine that is older than :attr:`~drivetrain.backend.base.Backend.oldest_version`.

    Raises:
        BackendUnavailable: The engine is too old; the message names the environment.
    """
    numbers = release(version)  # empty if it is no version
    if backend.oldest_version is not None and () < numbers < release(backend.oldest_version):
        raise BackendUnavailable(
            f"the {backend.name} backend needs {backend.engine_distribution} {backend.oldest_version} or later, and "
            f"the environment of {sys.executable} has {version}; run there: pip install {_requirement(backend)}, or "
            "give python= the Python of an environment that has it"
        )


def list_backends() -> list[BackendInfo]:
    """Describe every backend, sorted by name. Loads each plugin that is not switched off; starts no engine."""
    names = sorted({*_entry_points(), *_registered()})
    return [_describe(name) for name in names]


def disabled_plugins() -> frozenset[str]:
    """Return the names listed in ``DRIVETRAIN_DISABLED_PLUGINS``."""
    return frozenset(part.strip() for part in os.environ.get(DISABLE_VARIABLE, "").split(",") if part.strip())


def register(plugin: object) -> None:
    """Register the backends of ``plugin``, a module or object with the hook, for this process only.

    A host process does not see them; it finds backends through their entry points.

    Raises:
        BackendLoadError: The plugin has no hook, or its hook returned something other than concrete backend classes.
        DuplicateBackend: A backend of that name exists already; nothing was registered.
    """
    origin = _Origin(getattr(plugin, "__name__", None) or type(plugin).__qualname__)
    was_registered = _manager.is_registered(plugin)
    backends = backend_classes(_manager, plugin, str(origin))
    try:
        _require_new(backends, origin)
    except BackendError:
        if not was_registered:
            _manager.unregister(plugin)
        raise
    _loaded.update({backend.name: _Loaded(backend, origin, plugin) for backend in backends})


def _require_new(backends: list[type[Backend]], origin: _Origin) -> None:
    if not backends:
        raise BackendLoadError(f"the hook of {origin} returned no backend")
    registered, installed = _registered(), _entry_points()
    for backend in backends:
        others = [registered[backend.name].origin] if backend.name in registered else []
        others += [_origin(entry) for entry in installed.get(backend.name, [])]
        if others:
            raise _duplicate(backend.name, [origin, *others])


def unregister(plugin: object) -> None:
    """Undo :func:`register`.

    Raises:
        BackendError: The plugin is not registered.
    """
    registered = _registered()
    names = [name for name, loaded in registered.items() if loaded.plugin is plugin]
    if not names:
        raise BackendError(f"{shown(plugin)} is not registered; registered backends: {', '.join(registered) or 'none'}")
    _manager.unregister(plugin)
    for name in names:
        del _loaded[name]


def _registered() -> dict[str, _Loaded]:
    """Return the backends that this program registered, by name."""
    return {name: loaded for name, loaded in _loaded.items() if loaded.origin.distribution is None}


# Finding -------------------------------------------------------------------------------------------------------------


def _entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Return plugin entry points by name; importlib reports a distribution once, even if it is on sys.path twice."""
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def _origin(entry: importlib.metadata.EntryPoint) -> _Origin:
    if entry.dist is None:
        return _Origin(entry.value, "unknown", "unknown")
    return _Origin(entry.value, entry.dist.name, entry.dist.version)


def _only(name: str, entries: list[importlib.metadata.EntryPoint]) -> importlib.metadata.EntryPoint:
    enabled = [entry for entry in entries if not _disabled_by(name, _origin(entry))]
    if not enabled:
        _refuse_disabled(name, [_origin(entry) for entry in entries])
    if len(enabled) > 1:
        raise _duplicate(name, [_origin(entry) for entry in enabled])
    return enabled[0]


def _duplicate(name: str, origins: list[_Origin]) -> DuplicateBackend:
    return DuplicateBackend(
        f"{len(origins)} plugins provide a backend named {name!r}: {'; '.join(map(str, origins))}. "
        f"Uninstall one, or switch it off by its distribution's name in {DISABLE_VARIABLE}"
    )


def _disabled_by(name: str, origin: _Origin) -> str | None:
    """Return the name in the environment variable that disables this plugin, or None."""
    if name in disabled_plugins():
        return name
    if origin.distribution is None:
        return None
    return next((word for word in disabled_plugins() if _normal(word) == _normal(origin.distribution)), None)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _refuse_disabled(name: str, origins: list[_Origin]) -> None:
    words = [word for origin in origins if (word := _disabled_by(name, origin)) is not None]
    if words and len(words) == len(origins):
        raise BackendError(
            f"the backend {name!r} is switched off by {DISABLE_VARIABLE}={os.environ[DISABLE_VARIABLE]!r}; "
            f"take {' and '.join(repr(word) for word in dict.fromkeys(words))} out of it to use this backend"
        )


# Describing ----------------------------------------------------------------------------------------------------------


def _describe(name: str) -> BackendInfo:
    origins = [_origin(entry) for entry in _entry_points().get(name, [])]
    if name in (registered := _registered()):
        origins = [registered[name].origin]
    one = origins[0] if len(origins) == 1 else None
    distribution = one.distribution if one else ", ".join(str(origin.distribution) for origin in origins)
    version = one.version if one else None
    try:
        backend = load_backend(name)
    except BackendUnavailable as error:
        return BackendInfo(name, distribution, version, None, None, BackendStatus.ENGINE_MISSING, str(error))
    except BackendError as error:
        off = all(_disabled_by(name, origin) for origin in origins)
        status = BackendStatus.DISABLED if off else BackendStatus.BROKEN
        return BackendInfo(name, distribution, version, None, None, status, str(error))
    try:
        engine_version = require_engine(backend)
    except BackendUnavailable as error:
        status, reason, engine_version = BackendStatus.ENGINE_MISSING, str(error), None
    else:
        status, reason = BackendStatus.AVAILABLE, ""
    return BackendInfo(name, distribution, version, backend.engine_distribution, engine_version, status, reason)


def _missing(backend: str, package: str, requirement: str) -> str:
    return (
        f"the {backend} backend needs the package {package!r}, which is not installed in the environment of "
        f"{sys.executable}; run there: pip install {requirement}"
    )


def _requirement(backend: type[Backend]) -> str:
    """Return the requirement to install: the plugin distribution's extra named like the backend, else the engine."""
    loaded = _loaded.get(backend.name)
    return (loaded and _extra_of(backend.name, loaded.origin)) or backend.engine_distribution


def _extra_of(backend: str, origin: _Origin) -> str:
    """The extra of the plugin's distribution that is named like the backend, as pip takes it; empty if it has none."""
    if origin.distribution is None:
        return ""
    try:
        extras = importlib.metadata.metadata(origin.distribution).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"'{origin.distribution}[{backend}]'" if backend in extras else ""


def _is_own(module: str | None, entry: importlib.metadata.EntryPoint) -> bool:
    """Return True if a module that could not be imported would be the plugin's own."""
    return module is None or module.partition(".")[0] == entry.module.partition(".")[0]


def _unknown(name: str) -> str:
    backends = list_backends()
    close = difflib.get_close_matches(name.lower(), [info.name for info in backends], n=1)
    lines = [f"there is no backend named {shown(name)}" + (f"; did you mean {close[0]!r}?" if close else "")]
    lines.append(
        "known backends; install a package to add others:"
        if backends
        else f"no plugin of the entry-point group {GROUP!r} is installed"
    )
    for info in backends:
        ready = f"{info.engine_distribution} {info.engine_version}" if not info.reason else info.reason
        lines.append(f"  {info.name}: {info.status.value} ({ready})")
    return "\n".join(lines)
