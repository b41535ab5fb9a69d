"""Sleep on a CPU, which engines do not offer: storages give up and regain their memory, and keep their identity."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from drivetrain.types.modes import MemoryTag


def trim_heap() -> None:
    """Return freed heap pages to the operating system, if the C library can (glibc's ``malloc_trim``)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HostMemory:
    """Storages whose memory can be freed and taken again, by tag.

    Args:
        storages: Storages of each tag; for the weights, exactly those that an update fills.
    """

    def __init__(self, storages: Mapping[MemoryTag, Iterable[torch.UntypedStorage]]) -> None:
        self._storages = {tag: list(held) for tag, held in storages.items()}
        self._asleep: dict[MemoryTag, list[int]] = {}
        """Sizes in bytes of the storages of each tag that sleeps."""

    def keep(self, tags: frozenset[MemoryTag]) -> None:
        """Check that these tags can be freed; no contents are kept."""
        for tag in tags:
            fixed = sum(not storage.resizable() for storage in self._storages.get(tag, []))
            if fixed:
                raise RuntimeError(f"{fixed} storages of {tag.value} cannot be resized, and nothing was freed")

    def free(self, tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags and return it to the system."""
        for tag in tags:
            storages = self._storages.get(tag, [])
            if tag not in self._asleep:
                self._asleep[tag] = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)
        trim_heap()

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of these tags again, filled with zeros; if that fails, free it again."""
        waking = tags & self._asleep.keys()
        try:
            for tag in waking:
                for storage, nbytes in zip(self._storages.get(tag, []), self._asleep[tag], strict=True):
                    storage.resize_(nbytes)
                    torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        except BaseException:
            self.free(waking)
            raise
        for tag in waking:
            del self._asleep[tag]
