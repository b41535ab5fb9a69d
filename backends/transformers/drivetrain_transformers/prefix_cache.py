"""Prefix cache: keys and values of earlier sequences, looked up by the ids that a prompt begins with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

BLOCK = 16
"""Tokens per block; only whole blocks are matched."""


@dataclass(slots=True, eq=False)
class _Entry:
    token_ids: list[int]
    adapter: int
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    hashes: list[int]
    nbytes: int


class PrefixCache:
    """An LRU cache of whole sequences that finds the longest prefix in whole blocks."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_prefix: dict[int, _Entry] = {}
        self.nbytes = 0

    def find(self, token_ids: list[int], adapter: int = 0) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return (length, keys and values per layer) of the longest cached prefix; (0, []) if there is none.

        Only entries made with the same LoRA ``adapter`` match. At least one token of ``token_ids`` is left to be
        computed. Tensors have shape (1, heads, length, head size).
        """
        best: _Entry | None = None
        length = 0
        for count, prefix in _prefixes(token_ids[: len(token_ids) - 1], adapter):
            entry = self._by_prefix.get(prefix)
            if entry is None or entry.adapter != adapter or entry.token_ids[:count] != token_ids[:count]:
                break
            best, length = entry, count
        if best is None:
            return 0, []
        self._entries.move_to_end(id(best))
        return length, [(keys[:, :, :length], values[:, :, :length]) for keys, values in best.layers]

    def holds(self, token_ids: list[int], adapter: int = 0) -> bool:
        """Return whether every whole block of ``token_ids`` is cached already."""
        prefixes = _prefixes(token_ids, adapter)
        return bool(prefixes) and prefixes[-1][1] in self._by_prefix

    def insert(self, token_ids: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]], adapter: int = 0) -> None:
        """Keep a sequence's keys and values; shape (1, heads, len(token_ids), head size) per layer."""
        nbytes = sum(keys.nbytes + values.nbytes for keys, values in layers)
        if nbytes > self._capacity:
            return
        while self.nbytes + nbytes > self._capacity:
            self._evict()
        entry = _Entry(
            list(token_ids), adapter, layers, [prefix for _, prefix in _prefixes(token_ids, adapter)], nbytes
        )
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


def _prefixes(token_ids: list[int], adapter: int) -> list[tuple[int, int]]:
    """Return (length, hash) of each prefix in whole blocks; each hash includes the one before."""
    found = []
    running = adapter
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        running = hash((running, tuple(token_ids[end - BLOCK : end])))
        found.append((end, running))
    return found
