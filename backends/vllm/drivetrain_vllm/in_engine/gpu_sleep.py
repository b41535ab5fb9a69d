# pyright: reportMissingImports=false
"""Sleep on a GPU by tag: memory of vLLM's allocator is freed, and allocated again at the same addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from drivetrain.types.modes import MemoryTag


class DeviceMemory:
    """Memory of vLLM's ``CuMemAllocator``, whose own sleep always covers all tags.

    Args:
        model: The model. Those of its tensors that an update does not bring are kept.
        updated: Storages that an update brings.
        cache: Storages of keys and values. Other memory of that tag is kept: the second model runner has its block
            tables there.
        keeps_weights: True to copy the weights to the host, and back.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        updated: Iterable[torch.UntypedStorage],
        cache: Iterable[torch.UntypedStorage],
        *,
        keeps_weights: bool,
    ) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator

        self._allocations: dict[int, Any] = CuMemAllocator.get_instance().pointer_to_data
        self._keeps_weights = keeps_weights
        self._host: dict[int, torch.Tensor] = {}
        """Pinned copies of weights, by address; kept for the next sleep."""
        brought = {storage.data_ptr() for storage in updated}
        self._others = [
            held
            for held in _tensors_of(model)
            if held.data_ptr() not in brought and self._is_of_weights(held.data_ptr())
        ]
        self._saved: list[torch.Tensor] = []
        caches = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in cache]
        of_cache = [
            (pointer, pointer + allocation.handle[1])
            for pointer, allocation in self._allocations.items()
            if allocation.tag == MemoryTag.KV_CACHE.value
        ]
        # Looked up once: vLLM allocates memory of that tag only while it starts.
        self._beside_cache = [
            (begin, end)
            for begin, end in used(torch.cuda.memory_snapshot(), of_cache)  # type: ignore[no-untyped-call]
            for begin, end in gaps(begin, end, caches)
        ]
        self._saved_beside: list[torch.Tensor] = []
        """Saved contents of these ranges."""

    def _is_of_weights(self, address: int) -> bool:
        return any(
            pointer <= address < pointer + allocation.handle[1]
            for pointer, allocation in self._allocations.items()
            if allocation.tag == MemoryTag.WEIGHTS.value
        )

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags."""
        from vllm.device_allocator.cumem import unmap_and_release

        torch.cuda.synchronize()
        if MemoryTag.WEIGHTS in tags and not self._keeps_weights:
            self._saved = [held.cpu() for held in self._others]
        if MemoryTag.KV_CACHE in tags:
            self._saved_beside = [_read(begin, end) for begin, end in self._beside_cache]
        for pointer, allocation in self._of(tags, asleep=False):
            if allocation.tag == MemoryTag.WEIGHTS.value and self._keeps_weights:
                self._copy_weights(pointer, allocation, wakes=False)
            unmap_and_release(allocation.handle)
            allocation.is_asleep = True
        torch.cuda.synchronize()

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of these tags again; after a failure, a later call allocates the rest."""
        from vllm.device_allocator.cumem import create_and_map

        for pointer, allocation in self._of(tags, asleep=True):
            create_and_map(allocation.handle)
            allocation.is_asleep = False
            if allocation.tag == MemoryTag.WEIGHTS.value and self._keeps_weights:
                self._copy_weights(pointer, allocation, wakes=True)
        if MemoryTag.WEIGHTS in tags:
            for held, saved in zip(self._others, self._saved, strict=bool(self._saved)):
                held.copy_(saved)
            self._saved = []
        if MemoryTag.KV_CACHE in tags:
            for (begin, _), saved in zip(self._beside_cache, self._saved_beside, strict=bool(self._saved_beside)):
                _copy(begin, saved.data_ptr(), saved.nbytes)
            self._saved_beside = []
        torch.cuda.synchronize()

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


def _tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers and other tensor attributes of modules, as bytes, each storage once."""
    seen: set[int] = set()
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
