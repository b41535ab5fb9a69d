"""Prefix-cache keys that an engine's own process renews, in step with the steps of its batch."""

from __future__ import annotations


class CacheEpochs:
    """Marks prefix-cache keys with the number of the reset that they follow.

    The backend cannot do this alone. A request may wait in the engine, or be on its way to it, when a reset or new
    weights overtake it. Prefixes that frozen requests hold outlast the reset, and the request would find them by its
    old key.
    """

    def __init__(self) -> None:
        self._epoch = 0

    def renew(self) -> None:
        """Let the keys that are marked from now on match no earlier prefix."""
        self._epoch += 1

    def marked(self, key: str | None) -> str:
        """Return a backend's key with the mark of now."""
        return f"{self._epoch}:{key or ''}"

    def marked_again(self, key: str | None) -> str:
        """Return a marked key with the mark of now, in place of its own."""
        return self.marked((key or "").partition(":")[2])

    def is_current(self, key: str | None) -> bool:
        """Return True if a key has the mark of now."""
        return key is not None and key.startswith(f"{self._epoch}:")
