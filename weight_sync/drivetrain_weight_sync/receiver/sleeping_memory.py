"""Memory that sleeps and wakes up as a whole, or stays as it was."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from drivetrain.backend.toolkit.out_of_memory import naming_out_of_memory
from drivetrain.types.modes import MemoryTag


class SleepingMemory(Protocol):
    """Memory of one rank, by tag."""

    def keep(self, tags: frozenset[MemoryTag]) -> None:
        """Copy the contents of these tags that must outlast a sleep, for tags that are awake. Free nothing."""

    def free(self, tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags; that of a tag that sleeps is free already.

        Also called after a wake-up that another rank could not make: the contents that were kept are still needed.
        """

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of these tags again, with the contents that were kept; if it raises, all sleep on."""


def falling_asleep() -> AbstractContextManager[None]:
    """Name an error of copies that found no memory, before anything was freed."""
    return naming_out_of_memory("sleep()", "Nothing sleeps that was awake: free host memory, then call sleep() again")


def waking_up() -> AbstractContextManager[None]:
    """Name an error of allocations that found no memory; those made before it were freed again."""
    return naming_out_of_memory(
        "wake_up()", "All of it sleeps on: free memory, for instance the trainer's, then call wake_up() again"
    )
