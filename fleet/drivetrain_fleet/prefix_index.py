"""Index of the prefixes that each engine has seen: hashes of blocks of tokens, bounded in number."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

BLOCK: Final = 32
"""Tokens per block; prefixes are compared in whole blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one prompt."""

    hashes: tuple[int, ...]
    """One per whole block; each covers all tokens up to the block's end."""
    rest: tuple[int, ...]
    """Tokens after the last whole block."""
    adapter: str | None = None
    """Name of the LoRA adapter, which has a cache of its own; None: no adapter."""

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def of(cls, token_ids: Sequence[int], adapter: str | None = None) -> Blocks:
        """Return the blocks of a prompt."""
        return cls((), (), adapter).followed_by(token_ids)

    def followed_by(self, token_ids: Sequence[int]) -> Blocks:
        """Return the blocks of this prompt with more tokens after it, such as its answer."""
        ids = [*self.rest, *token_ids] if self.rest else token_ids
        packed = array("q", ids).tobytes()
        size = BLOCK * 8
        hashes = [*self.hashes]
        last = hashes[-1] if hashes else hash(self.adapter)
        for end in range(size, len(packed) + 1, size):
            last = hash((last, packed[end - size : end]))
            hashes.append(last)
        return Blocks(tuple(hashes), tuple(ids[len(ids) - len(ids) % BLOCK :]), self.adapter)


class PrefixIndex:
    """The prefixes that one engine has probably cached: the last ones that it was sent.

    Args:
        capacity: Most blocks; the ones that were not used for longest are forgotten first, a prompt's end before its
            beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matched(self, blocks: Blocks, at_least: int = 0) -> int:
        """Return how many tokens of the prompt's beginning the engine has seen.

        Args:
            blocks: The prompt.
            at_least: A multiple of ``BLOCK``, at most the prompt's whole blocks. If the engine has seen fewer
                tokens, return 0 after a single look-up.
        """
        seen = self._seen
        count = at_least // BLOCK
        # A block is never remembered without those before it, so the last one stands for all.
        if count and blocks.hashes[count - 1] not in seen:
            return 0
        for one in islice(blocks.hashes, count, None):
            if one not in seen:
                break
            count += 1
        return count * BLOCK

    def add(self, blocks: Blocks) -> None:
        """Record a prompt that the engine is sent."""
        seen = self._seen
        # From the end on, so that the beginning is newest: a block is of no use without those before it.
        for one in reversed(blocks.hashes[: self._capacity]):
            seen[one] = None
            seen.move_to_end(one)
        while len(seen) > self._capacity:
            seen.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the engine's cache was dropped."""
        self._seen.clear()
