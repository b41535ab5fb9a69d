"""Sleep by tag on a GPU, with the allocator's driver calls replaced: there is no GPU here."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drivetrain.types.modes import MemoryTag
from drivetrain_vllm.in_engine.gpu_sleep import DeviceMemory, gaps, used

WEIGHTS, CACHE = frozenset({MemoryTag.WEIGHTS}), frozenset({MemoryTag.KV_CACHE})
SIZE = 16
"""Bytes of an allocation."""
REFILLED = 12
"""Bytes of an allocation that an update fills."""


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([], [(100, 200)]),
        ([(100, 200)], []),
        ([(100, 180)], [(180, 200)]),
        ([(150, 160), (110, 120)], [(100, 110), (120, 150), (160, 200)]),
        ([(120, 150), (130, 140)], [(100, 120), (150, 200)]),
        ([(0, 100), (200, 300)], [(100, 200)]),
        ([(50, 120), (190, 250)], [(120, 190)]),
    ],
)
def test_gaps_are_what_no_storage_covers(held: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
    assert gaps(100, 200, held) == found


def test_what_torch_has_given_away_of_some_segments_is_used() -> None:
    def block(size: int, requested: int, state: str) -> dict[str, object]:
        return {"size": size, "requested_size": requested, "state": state}

    mixed = [
        block(512, 400, "active_allocated"),
        block(512, 0, "inactive"),
        block(1024, 1000, "active_pending_free"),
    ]
    segments = [
        {"address": 10_000, "blocks": mixed},
        {"address": 20_000, "blocks": mixed},
        {"address": 30_000, "blocks": [block(2048, 2048, "inactive")]},
    ]
    assert used(segments, [(10_000, 12_048), (30_000, 32_048)]) == [(10_000, 10_400), (11_024, 12_024)]
    assert used(segments, []) == []


@dataclass(eq=False)
class Device:
    """Allocations of a device that may run out of memory, each of one block."""

    allocations: dict[int, SimpleNamespace] = field(default_factory=dict)
    blocks: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)
    mapped: set[int] = field(default_factory=set)
    room: int = 100
    """Allocations that can still be mapped."""
    copies: int = 100
    """Copies that still succeed."""

    def allocate(self, tag: MemoryTag, contents: bytes) -> torch.UntypedStorage:
        """Make an allocation; return the storage of the part that an update fills."""
        block = ctypes.create_string_buffer(contents, SIZE)
        pointer = ctypes.addressof(block)
        self.blocks.append(block)
        self.mapped.add(pointer)
        self.allocations[pointer] = SimpleNamespace(handle=(0, SIZE, pointer, 0), tag=tag.value, is_asleep=False)
        return torch.frombuffer(block, dtype=torch.uint8, count=REFILLED).untyped_storage()

    def contents(self) -> list[bytes]:
        """Return the contents of all allocations; empty for one that is not mapped."""
        return [block.raw if ctypes.addressof(block) in self.mapped else b"" for block in self.blocks]

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        assert handle[2] not in self.mapped, "it is mapped already"
        if not self.room:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:138")
        self.room -= 1
        self.mapped.add(handle[2])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        self.mapped.remove(handle[2])
        ctypes.memset(handle[2], ord("?"), SIZE)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        for begin in self.allocations:
            touched = any(begin <= address < begin + SIZE for address in (to, source))
            assert begin in self.mapped or not touched, "memory that sleeps cannot be copied"
        if not self.copies:
            raise RuntimeError("CUDART error: unspecified launch failure")
        self.copies -= 1
        ctypes.memmove(to, source, nbytes)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device, module = Device(), ModuleType("vllm.device_allocator.cumem")
    vars(module).update(
        CuMemAllocator=SimpleNamespace(get_instance=lambda: SimpleNamespace(pointer_to_data=device.allocations)),
        create_and_map=device.create_and_map,
        unmap_and_release=device.unmap_and_release,
        libcudart=SimpleNamespace(cudaMemcpy=device.copy),
    )
    for name in ("vllm", "vllm.device_allocator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = [{"size": SIZE, "requested_size": SIZE, "state": "active_allocated"}]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"address": one, "blocks": blocks} for one in device.allocations]
    )
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **given: empty(*sizes, **given))
    return device


def memory_of(device: Device, *, keeps_weights: bool) -> DeviceMemory:
    """Return the memory of two allocations of weights and one of the cache."""
    weights = [device.allocate(MemoryTag.WEIGHTS, contents) for contents in (b"weights-1---abcd", b"weights-2---efgh")]
    cache = [device.allocate(MemoryTag.KV_CACHE, b"keys-values-ijkl")]
    refilled = {MemoryTag.WEIGHTS: weights, MemoryTag.KV_CACHE: cache}
    return DeviceMemory(refilled, keeps_weights=keeps_weights)


def slept(memory: DeviceMemory, tags: frozenset[MemoryTag]) -> None:
    memory.keep(tags)
    memory.free(tags)


@pytest.mark.parametrize("lacks", ["room", "copies"])
@pytest.mark.parametrize("keeps_weights", [False, True])
def test_a_wake_up_that_fails_half_way_frees_all_again_and_loses_nothing(
    device: Device, keeps_weights: bool, lacks: str
) -> None:
    memory, both = memory_of(device, keeps_weights=keeps_weights), WEIGHTS | CACHE
    before = device.contents()
    for again in range(2):  # the second time with copies that are kept from the first
        slept(memory, both)
        assert device.contents() == [b"", b"", b""]
        for succeed in (1, 2):
            setattr(device, lacks, succeed)
            with pytest.raises(RuntimeError, match=r"out of memory|launch failure"):
                memory.wake_up(both)
            assert device.contents() == [b"", b"", b""], "a part is awake"
            setattr(device, lacks, 100)
            if again:
                slept(memory, both)
        memory.wake_up(both)
        assert [one[REFILLED:] for one in device.contents()] == [b"abcd", b"efgh", b"ijkl"]
        assert not keeps_weights or device.contents()[:2] == before[:2]


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_a_sleep_whose_copies_fail_frees_nothing(device: Device, keeps_weights: bool) -> None:
    memory, both = memory_of(device, keeps_weights=keeps_weights), WEIGHTS | CACHE
    before = device.contents()
    device.copies = 2
    with pytest.raises(RuntimeError, match="launch failure"):
        memory.keep(both)
    assert device.contents() == before
    device.copies = 100
    slept(memory, both)
    slept(memory, both)  # as after a sleep that timed out
    memory.wake_up(both)
    assert [one[REFILLED:] for one in device.contents()] == [b"abcd", b"efgh", b"ijkl"]


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_a_rank_that_sleeps_on_because_another_does_loses_nothing(device: Device, keeps_weights: bool) -> None:
    memory, both = memory_of(device, keeps_weights=keeps_weights), WEIGHTS | CACHE
    before = device.contents()
    slept(memory, both)
    memory.wake_up(both)
    memory.free(both)  # as RankWeights.awaken
    assert device.contents() == [b"", b"", b""]
    memory.wake_up(both)
    assert [one[REFILLED:] for one in device.contents()] == [b"abcd", b"efgh", b"ijkl"]
    assert not keeps_weights or device.contents()[:2] == before[:2]
