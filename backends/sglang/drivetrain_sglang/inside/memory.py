"""Sleep on a CPU, where SGLang has none: storages give their memory back and take it again, and stay who they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drivetrain.memory import MemoryTag


class HostMemory:
    """Memory of the weights and of the pool of keys and values.

    Args:
        weights: All that an update brings; nothing else of the model sleeps.
        cache: SGLang's pool.
    """

    def __init__(self, weights: Iterable[torch.UntypedStorage], cache: Any) -> None:
        from drivetrain_sglang.inside.worker import kv_tensors

        self._storages = {
            MemoryTag.WEIGHTS: list(weights),
            MemoryTag.KV_CACHE: [tensor.untyped_storage() for tensor in kv_tensors(cache)],
        }
        self._asleep: dict[MemoryTag, list[int]] = {}

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        for tag in tags - self._asleep.keys():
            storages = self._storages.get(tag, [])
            self._asleep[tag] = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take it again, filled with zeros."""
        for tag in tags & self._asleep.keys():
            for storage, nbytes in zip(self._storages.get(tag, []), self._asleep.pop(tag), strict=True):
                storage.resize_(nbytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
