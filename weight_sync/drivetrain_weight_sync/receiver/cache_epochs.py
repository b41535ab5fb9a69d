"""Prefix-cache keys that an engine's own process renews, in step with the steps of its batch."""

from __future__ import annotations

from typing import Final

OF_EXPERTS: Final = "-experts"
"""Part of the keys of requests that ask for their prompt's experts."""


class CacheEpochs:
    """Marks prefix-cache keys with the number of the reset that they follow.

    Keys of requests for their prompt's experts also bear the number of the weights: a prefix of other weights has other
    experts, also if the cache is kept.

    The backend cannot do this alone. A request may wait in the engine, or be on its way to it, when a reset or new
    weights overtake it. Prefixes that frozen requests hold outlast the reset, and the request would find them by its
    old key.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._weights = 0

    def renew(self) -> None:
        """Let the keys that are marked from now on match no earlier prefix."""
        self._epoch += 1

    def renew_experts(self) -> None:
        """Let keys of requests for their prompt's experts match no earlier prefix: the weights have changed."""
        self._weights += 1

    def _mark(self, key: str) -> str:
        return f"{self._epoch}.{self._weights}" if OF_EXPERTS in key else f"{self._epoch}"

    def marked(self, key: str | None) -> str:
        """Return a backend's key with the mark of now."""
        key = key or ""
        return f"{self._mark(key)}:{key}"

    def marked_again(self, key: str | None) -> str:
        """Return a marked key with the mark of now, in place of its own."""
        return self.marked((key or "").partition(":")[2])

    def is_current(self, key: str | None) -> bool:
        """Return True if a key has the mark of now."""
        mark, colon, own = (key or "").partition(":")
        return bool(colon) and mark == self._mark(own)
