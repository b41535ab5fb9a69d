"""Plugin transports, found by name in the entry-point group ``drivetrain.weight_transports``."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain_weight_sync.transports.base import Reader, Sender

GROUP: Final = "drivetrain.weight_transports"
"""The entry-point group. An entry's name is the transport's name, its value the class."""


class Transport(ABC):
    """A transport with both of its ends.

    The trainer's process creates an instance and asks it for the sender. Each worker of the engine finds the class by
    its name and asks it for a reader, so the plugin must be installed on both sides. The sender's ``source()`` is a
    ``PluginSource`` of that name. With every transport, tensors are verified against the sender's digests before the
    update is committed.

    Args:
        directory: a folder that trainer and engine both reach, if the transport needs one; None: the temporary folder.
    """

    name: ClassVar[str]
    """The name by which a trainer chooses the transport; its entry point has the same name."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory

    @abstractmethod
    def sender(self) -> Sender:
        """Return the trainer's end of the transport."""

    @classmethod
    @abstractmethod
    def reader(cls) -> Reader:
        """Return an engine worker's end of the transport."""


def transport_names() -> list[str]:
    """Return the names of the installed transports; nothing is imported."""
    return sorted(importlib.metadata.entry_points(group=GROUP).names)


def find_transport(name: str) -> type[Transport]:
    """Import a transport's class.

    Raises:
        InvalidRequest: no transport of that name is installed here.
        WeightSyncError: two plugins have the name, or the class does not load.
    """
    entries = importlib.metadata.entry_points(group=GROUP, name=name)
    distributions = {entry.dist.name if entry.dist else entry.value: entry for entry in entries}
    if not distributions:
        raise InvalidRequest(
            f"there is no weight transport {name!r} here; installed: {', '.join(transport_names()) or 'none'}. Install "
            "its plugin in the environments of both trainer and engine",
            field="source.transport",
        )
    if len(distributions) > 1:
        raise WeightSyncError(
            f"the distributions {' and '.join(sorted(distributions))} both register the weight transport {name!r}; "
            "uninstall one"
        )
    (entry,) = distributions.values()
    try:
        found = entry.load()
    except Exception as error:
        raise WeightSyncError(
            f"the weight transport {name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise WeightSyncError(f"the weight transport {name!r} ({entry.value}) is not a subclass of Transport")
    if found.name != name:
        raise WeightSyncError(
            f"the weight transport {name!r} ({entry.value}) has the name {found.name!r}; give both the same"
        )
    return found
