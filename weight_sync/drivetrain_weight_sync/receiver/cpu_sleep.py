"""Sleep on a CPU, where engines have none: storages give their memory back and take it again, and stay who they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from drivetrain.types.modes import MemoryTag


def trim_heap() -> None:
    """Return freed heap pages to the operating system, where the C library can (glibc's ``malloc_trim``)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HostMemory:
    """Memory that can be given back, by tag.

    Args:
        storages: What sleeps under each tag. Of the weights all that an update brings; nothing else of the model.
    """

    def __init__(self, storages: Mapping[MemoryTag, Iterable[torch.UntypedStorage]]) -> None:
        self._storages = {tag: list(held) for tag, held in storages.items()}
        self._asleep: dict[MemoryTag, list[int]] = {}

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back, to the system too."""
        for tag in tags - self._asleep.keys():
            storages = self._storages.get(tag, [])
            self._asleep[tag] = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)
        trim_heap()

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take it again, filled with zeros."""
        for tag in tags & self._asleep.keys():
            for storage, nbytes in zip(self._storages.get(tag, []), self._asleep.pop(tag), strict=True):
                storage.resize_(nbytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
