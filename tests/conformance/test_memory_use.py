"""Growth of memory is told from warm-up, noise and single blocks, and is not hidden by memory that was given back."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain, repeat
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_conformance.assertions.memory_use import (
    SERIES,
    check_steady,
    held_by_device,
    steady_growth,
    tells_processes_apart,
)

ROOM = 200
"""Allowed growth per piece of work, in KiB."""
MEASUREMENTS = 6
PIECES = SERIES * MEASUREMENTS

noise = st.lists(st.integers(0, ROOM // 4), min_size=PIECES, max_size=PIECES)
"""Memory that is there in one measurement and not in the next."""
places = st.integers(1, PIECES - 1)
blocks = st.integers(ROOM, 100 * ROOM)


def leaks(changes: Iterable[int], jitter: Iterable[int] = repeat(0)) -> bool:
    held = iter([base + extra for base, extra in zip(accumulate(changes, initial=10_000), jitter, strict=False)])

    async def measure() -> Mapping[str, int]:
        return {"KiB": next(held)}

    try:
        asyncio.run(check_steady(measure, {"KiB": ROOM}, "a piece of work", MEASUREMENTS))
    except AssertionError:
        return True
    return False


@given(noise, st.integers(2 * ROOM, 20 * ROOM))
def test_a_leak_is_found(jitter: list[int], leak: int) -> None:
    assert leaks(repeat(leak), jitter)


@given(noise, st.integers(2 * ROOM, 20 * ROOM), places, blocks)
def test_memory_that_is_given_back_hides_no_leak(jitter: list[int], leak: int, place: int, block: int) -> None:
    assert leaks((leak - block * (at == place) for at in range(1, PIECES)), jitter)


@given(noise, st.integers(2 * ROOM, 20 * ROOM), places, st.integers(1, 2))
def test_a_flat_stretch_hides_no_leak(jitter: list[int], leak: int, place: int, length: int) -> None:
    """The leak first fills what was free."""
    assert leaks((0 if place <= at < place + length else leak for at in range(1, PIECES)), jitter)


@given(st.integers(2 * ROOM, 20 * ROOM))
def test_a_leak_in_every_second_piece_is_found(leak: int) -> None:
    assert leaks(2 * leak * (at % 2) for at in range(1, PIECES))


@given(noise)
def test_noise_is_no_leak(jitter: list[int]) -> None:
    assert not leaks(repeat(0), jitter)


@given(noise, places, blocks)
def test_a_single_block_is_no_leak(jitter: list[int], place: int, block: int) -> None:
    assert not leaks((block * (at == place) for at in range(1, PIECES)), jitter)


@given(noise, places, st.integers(1, 5), blocks)
def test_memory_that_is_returned_is_no_leak(jitter: list[int], place: int, length: int, block: int) -> None:
    assert not leaks((block * ((at == place) - (at == place + length)) for at in range(1, PIECES)), jitter)


@given(noise, st.lists(blocks, max_size=PIECES - 2 * MEASUREMENTS))
def test_a_warm_up_is_no_leak(jitter: list[int], warm_up: list[int]) -> None:
    assert not leaks(chain(warm_up, repeat(0)), jitter)


@pytest.mark.parametrize(
    ("held", "grew"),
    [
        ([100, 100, 101, 100, 100, 100], 0),
        ([100, 110, 120, 130, 140, 150], 10),
        ([100, 110, 120, 30, 40, 50], 10),  # the largest rise is left out along with the fall
        ([100, 900, 900, 900, 900, 900], 0),
        ([100, 900, 100, 100, 100, 100], 0),
        ([5, 6, 7, 8, 9, 10], 1),
        ([100, 140, 100, 140, 180, 60, 100, 60, 100, 60, 100, 100], 0),  # up and down
    ],
)
def test_growth_is_that_of_most_pieces(held: list[int], grew: int) -> None:
    assert steady_growth(held, room=5) == grew


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 1,000 MiB, of which 800 are in use."""
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=RuntimeError))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200 * 2**20, 1000 * 2**20))


def _line(pid: int, held: float) -> str:
    return f"process {pid:>10d} uses {held:>12.3f} MB GPU memory"


@pytest.mark.usefixtures("one_gpu")
def test_memory_of_other_processes_on_the_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "\n".join(("GPU:0", _line(os.getpid(), 1.5), _line(os.getppid(), 700)))
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda _: listed)
    assert held_by_device() == [1.5 * 2**20]
    assert tells_processes_apart()


def _of_others(_: int) -> str:
    return f"GPU:0\n{_line(os.getppid(), 700)}"


def _without_sizes(_: int) -> str:
    raise TypeError("unsupported operand type(s) for /: 'NoneType' and 'int'")


def _not_supported(_: int) -> str:
    raise RuntimeError("Not Supported")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("listed", [_of_others, _without_sizes, _not_supported])
def test_where_the_driver_hides_processes_the_whole_gpu_is_measured(
    listed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", listed)
    assert held_by_device() == [800 * 2**20]
    assert not tells_processes_apart()
