"""Prefix cache: caches of earlier sequences, looked up by the ids that a prompt begins with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from drivetrain_transformers.kv_cache import RowCache

BLOCK = 16
"""Tokens per block of keys and values, unless another number is given; only whole blocks are matched."""


@dataclass(slots=True, eq=False)
class _Entry:
    token_ids: list[int]
    adapter: int
    row: RowCache
    hashes: list[int]
    nbytes: int


class PrefixCache:
    """An LRU cache of whole sequences that finds the longest prefix in whole blocks.

    Args:
        capacity_bytes: Most memory of its entries.
        whole: True to find only sequences that a prompt begins with entirely, as recurrent states cannot be cut back.
        block: Tokens per block; None: 1 with ``whole``, else :data:`BLOCK`.
    """

    def __init__(self, capacity_bytes: int, *, whole: bool = False, block: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._whole = whole
        self.block = block or (1 if whole else BLOCK)
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_prefix: dict[int, _Entry] = {}
        self.nbytes = 0

    def find(self, token_ids: list[int], adapter: int = 0) -> tuple[int, RowCache | None]:
        """Return (length, cache) of the longest cached prefix; (0, None) if there is none.

        Only entries made with the same LoRA ``adapter`` match. At least one token of ``token_ids`` is left to be
        computed. The cache may hold more tokens than ``length``.
        """
        if not self._by_prefix:
            return 0, None
        for count, prefix in reversed(_prefixes(token_ids[: len(token_ids) - 1], adapter, self.block)):
            entry = self._by_prefix.get(prefix)
            if entry is not None and entry.adapter == adapter and entry.token_ids[:count] == token_ids[:count]:
                self._entries.move_to_end(id(entry))
                return count, entry.row
        return 0, None

    def holds(self, token_ids: list[int], adapter: int = 0) -> bool:
        """Return whether every whole block of ``token_ids`` is cached already."""
        prefixes = _prefixes(token_ids, adapter, self.block)
        return bool(prefixes) and prefixes[-1][1] in self._by_prefix

    def insert(self, token_ids: list[int], row: RowCache, adapter: int = 0) -> None:
        """Keep the cache of a sequence."""
        nbytes = row.nbytes
        if nbytes > self._capacity:
            return
        while self.nbytes + nbytes > self._capacity:
            self._evict()
        hashes = [prefix for _, prefix in _prefixes(token_ids, adapter, self.block)]
        entry = _Entry(list(token_ids), adapter, row, hashes[-1:] if self._whole else hashes, nbytes)
        self._entries[id(entry)] = entry
        self.nbytes += nbytes
        for prefix in entry.hashes:
            self._by_prefix[prefix] = entry

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._by_prefix.clear()
        self.nbytes = 0

    def _evict(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.nbytes -= entry.nbytes
        for prefix in entry.hashes:
            if self._by_prefix.get(prefix) is entry:
                del self._by_prefix[prefix]


def _prefixes(token_ids: list[int], adapter: int, block: int) -> list[tuple[int, int]]:
    """Return (length, hash) of each prefix in whole blocks; each hash includes the one before."""
    found = []
    running = adapter
    for end in range(block, len(token_ids) + 1, block):
        running = hash((running, *token_ids[end - block : end]))
        found.append((end, running))
    return found
