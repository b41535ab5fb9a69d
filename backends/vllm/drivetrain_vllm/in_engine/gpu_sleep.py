# pyright: reportMissingImports=false
"""Sleep on a GPU by tag: memory of vLLM's allocator is freed, and allocated again at the same addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from drivetrain.types.modes import MemoryTag


class DeviceMemory:
    """Memory of vLLM's ``CuMemAllocator``, whose own sleep always covers all tags.

    Args:
        refilled: Storages of each tag that are written anew after a sleep, so that their contents may be lost. Whatever
            else vLLM holds of a tag is copied to the host and back: adapters and buffers among the weights, block
            tables of the second model runner in the cache.
        keeps_weights: True to copy the weights too.
    """

    def __init__(self, refilled: Mapping[MemoryTag, Iterable[torch.UntypedStorage]], *, keeps_weights: bool) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator

        self._allocations: dict[int, Any] = CuMemAllocator.get_instance().pointer_to_data
        self._keeps_weights = keeps_weights
        self._host: dict[int, torch.Tensor] = {}
        """Pinned copies of weights, by address; kept for the next sleep."""
        # Looked up once: vLLM allocates memory of these tags only while it starts.
        self._beside = {tag: self._ranges_beside(tag, storages) for tag, storages in refilled.items()}
        """Ranges of each tag that must be kept."""
        self._saved: dict[MemoryTag, list[torch.Tensor]] = {}
        """Contents of these ranges at the last sleep. If another rank cannot wake up, this one sleeps on with them."""
        self._asleep: frozenset[MemoryTag] = frozenset()

    def _ranges_beside(self, tag: MemoryTag, storages: Iterable[torch.UntypedStorage]) -> list[tuple[int, int]]:
        held = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        of_tag = [
            (pointer, pointer + allocation.handle[1])
            for pointer, allocation in self._allocations.items()
            if allocation.tag == tag.value
        ]
        return [
            (begin, end)
            for begin, end in used(torch.cuda.memory_snapshot(), of_tag)  # type: ignore[no-untyped-call]
            for begin, end in gaps(begin, end, held)
        ]

    def keep(self, tags: frozenset[MemoryTag]) -> None:
        """Copy what must be kept of these tags to the host, for tags that are awake."""
        torch.cuda.synchronize()
        for tag in tags - self._asleep:  # memory that sleeps cannot be read again
            if tag is MemoryTag.WEIGHTS and self._keeps_weights:
                for pointer, allocation in self._of(frozenset({tag}), asleep=False):
                    self._copy_weights(pointer, allocation, wakes=False)
            else:
                self._saved[tag] = [_read(begin, end) for begin, end in self._beside[tag]]

    def free(self, tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags."""
        self._release([allocation for _, allocation in self._of(tags, asleep=False)])
        self._asleep |= tags
        torch.cuda.synchronize()

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of these tags again and fill it with what was kept; if that fails, free it again."""
        from vllm.device_allocator.cumem import create_and_map

        waking, taken = self._of(tags, asleep=True), []
        try:
            for _, allocation in waking:
                create_and_map(allocation.handle)
                allocation.is_asleep = False
                taken.append(allocation)
            for pointer, allocation in waking:
                if allocation.tag == MemoryTag.WEIGHTS.value and self._keeps_weights:
                    self._copy_weights(pointer, allocation, wakes=True)
            for tag in tags & self._asleep & self._saved.keys():
                for (begin, _), saved in zip(self._beside[tag], self._saved[tag], strict=True):
                    _copy(begin, saved.data_ptr(), saved.nbytes)
            torch.cuda.synchronize()
        except BaseException:
            self._release(taken)
            raise
        self._asleep -= tags

    @staticmethod
    def _release(allocations: Iterable[Any]) -> None:
        from vllm.device_allocator.cumem import unmap_and_release

        for allocation in allocations:
            unmap_and_release(allocation.handle)
            allocation.is_asleep = True

    def _of(self, tags: frozenset[MemoryTag], *, asleep: bool) -> list[tuple[int, Any]]:
        return [
            (pointer, allocation)
            for pointer, allocation in self._allocations.items()
            if allocation.tag in {tag.value for tag in tags} and allocation.is_asleep is asleep
        ]

    def _copy_weights(self, pointer: int, allocation: Any, *, wakes: bool) -> None:
        nbytes: int = allocation.handle[1]
        host = self._host.get(pointer)
        if host is None:
            host = self._host[pointer] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        to, source = (pointer, host.data_ptr()) if wakes else (host.data_ptr(), pointer)
        _copy(to, source, nbytes)


def _copy(to: int, source: int, nbytes: int) -> None:
    from vllm.device_allocator.cumem import libcudart

    libcudart.cudaMemcpy(to, source, nbytes)


def _read(begin: int, end: int) -> torch.Tensor:
    read = torch.empty(end - begin, dtype=torch.uint8)
    _copy(read.data_ptr(), begin, read.nbytes)
    return read


def used(segments: Iterable[Mapping[str, Any]], within: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (begin, end) ranges that torch's allocator has handed out.

    Args:
        segments: As returned by ``torch.cuda.memory_snapshot``.
        within: Ranges of whole segments; other segments are left out.
    """
    wanted = list(within)
    found = []
    for segment in segments:
        begin = int(segment["address"])
        inside = any(low <= begin < high for low, high in wanted)
        for block in segment["blocks"]:
            if inside and block["state"].startswith("active"):
                found.append((begin, begin + int(block["requested_size"])))
            begin += int(block["size"])
    return found


def gaps(begin: int, end: int, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (begin, end) ranges between ``begin`` and ``end`` that none of ``held`` covers."""
    found = []
    for low, high in sorted(held):
        if high > begin and low < end:
            if low > begin:
                found.append((begin, low))
            begin = max(begin, high)
    if begin < end:
        found.append((begin, end))
    return found
