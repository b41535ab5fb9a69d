"""The LoRA adapters that an engine serves, by name."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.controller import Controller
from drivetrain.errors import InvalidRequest, TooManyAdapters


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that the backend has loaded."""

    backend_name: str
    """The backend's name for it, which changes with each update of the adapter."""
    pinned: bool


class LoadedAdapters:
    """Maps the names that requests use to the adapters that the backend has loaded."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._by_name: dict[str, LoadedLora] = {}
        self._strays: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return tuple(self._by_name)

    def find(self, name: str) -> LoadedLora | None:
        """Return the adapter, or None if no adapter of this name is loaded."""
        return self._by_name.get(name)

    def backend_name(self, name: str) -> str:
        """Return the backend's current name for a loaded adapter."""
        return self._by_name[name].backend_name

    def put(self, name: str, adapter: LoadedLora) -> None:
        """Serve ``adapter`` under ``name`` from now on."""
        self._by_name[name] = adapter
        self.controller.notify()

    def pop(self, name: str) -> LoadedLora:
        """Stop serving ``name``; return its adapter."""
        adapter = self._by_name.pop(name)
        self.controller.notify()
        return adapter

    def require(self, name: str, field: str) -> None:
        """Raise :class:`InvalidRequest` unless an adapter of this name is loaded."""
        if name not in self._by_name:
            loaded = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidRequest(f"{field}={shown(name)} is not loaded; loaded: {loaded}", field=field)

    def require_room(self) -> None:
        """Raise :class:`TooManyAdapters` if ``max_loras`` adapters are loaded already."""
        most = self.controller.config.max_loras
        if most is not None and len(self._by_name) >= most:
            raise TooManyAdapters(
                f"{len(self._by_name)} LoRA adapters are loaded and max_loras={most}; unload one, or raise max_loras",
                field="lora_name",
            )

    def unused_backend_name(self, name: str) -> str:
        """Return ``name``, or ``name-2``, ``name-3`` and so on if the backend already has an adapter of that name."""
        taken = {loaded.backend_name for loaded in self._by_name.values()}
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(candidate for candidate in names if candidate not in taken)

    # Calls that were given up ------------------------------------------------------------------------------------

    @property
    def strays(self) -> Collection[str]:
        """Backend names of adapters whose load or unload failed or timed out; the backend may have them nonetheless."""
        return tuple(self._strays)

    def add_stray(self, backend_name: str) -> None:
        """Remember an adapter whose load or unload failed or timed out, so that the next load can unload it."""
        self._strays.add(backend_name)

    def discard_stray(self, backend_name: str) -> None:
        """Forget an adapter that the backend does not have any more."""
        self._strays.discard(backend_name)
