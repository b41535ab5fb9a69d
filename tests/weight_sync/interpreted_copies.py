"""The copy kernel; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from drivetrain_weight_sync.copying import device_copies, device_kernel
from drivetrain_weight_sync.copying.device_copies import (
    ROWS,
    DeviceCopies,
    DeviceCopy,
    Window,
    compile_kernels,
    digests_at_once,
    fits,
    window_of,
)
from drivetrain_weight_sync.copying.device_kernel import copy_and_fold
from drivetrain_weight_sync.copying.digest import COLUMNS, digests, finished, part_sum

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


def look_for_strange_numbers(dtype: torch.dtype) -> None:
    """Find each non-finite number among ones: of all numbers of 8-bit dtypes, and of the extreme ones of others."""
    if dtype.itemsize == 1:
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        ends = torch.finfo(dtype)
        values = [
            ends.max,
            ends.min,
            ends.tiny,
            ends.smallest_normal / 2,
            0.0,
            -0.0,
            1.0,
            torch.inf,
            -torch.inf,
            torch.nan,
        ]
        numbers = torch.tensor(values, dtype=dtype)
    finite = torch.isfinite(numbers.double())
    tensors = {"finite": numbers[finite].repeat(8)}
    for index in (~finite).nonzero().flatten().tolist():
        tensors[f"strange {index}"] = torch.ones(72).to(dtype)
        tensors[f"strange {index}"][index % 72] = numbers[index]
    copies = [DeviceCopy(tensor, name=name) for name, tensor in tensors.items()]
    _, strange = DeviceCopies(copies, look=True).launch().read()
    assert strange == [name for name in tensors if name != "finite"], (dtype, strange)
    assert strange, dtype


def cut_windows() -> None:
    """Copy parts of tensors, beside whole ones: columns, rows, columns of each expert, and part of a vector."""
    draw = torch.Generator().manual_seed(1)
    wholes = {
        "columns": torch.randn(96, 512, generator=draw),
        "narrow": torch.randn(3000, 16, generator=draw).to(torch.bfloat16),
        "rows": torch.randn(768, 128, generator=draw),
        "experts": torch.randn(4, 24, 64, generator=draw).to(torch.bfloat16),
        "vector": torch.randn(4 * COLUMNS * ROWS, generator=draw).to(torch.bfloat16),
    }
    cuts = {"columns": 1, "narrow": 1, "rows": 0, "experts": 2, "vector": 0}
    plain = torch.randn(5000, generator=draw)
    for half in (0, 1):
        parts = {name: whole.chunk(2, cuts[name])[half] for name, whole in wholes.items()}
        held = {name: torch.zeros(part.shape, dtype=part.dtype) for name, part in parts.items()}
        more = torch.zeros(96, 256)
        copies = [DeviceCopy(plain, copied := torch.zeros(5000), "plain")]
        for name, whole in wholes.items():
            part = parts[name]
            window = window_of(whole, part.shape, part.stride(), int(part.storage_offset()))
            assert window is not None, name
            copies.append(DeviceCopy(whole, held[name], name, window))
        copies.append(replace(copies[1], destination=more, name=None))
        assert all(map(fits, copies))
        made = DeviceCopies(copies)
        for _ in range(2):
            assert made.launch().read()[0] == digests({"plain": plain, **wholes})
        assert torch.equal(copied, plain)
        assert torch.equal(more, held["columns"])
        for name, part in parts.items():
            assert torch.equal(held[name], part), (half, name)


def copy_parts() -> None:
    """Copy tensors part by part, wherever they are cut; the sums of the parts make the digest of the whole."""
    draw = torch.Generator().manual_seed(2)
    cuts = [0, 8, 448, 1024, 4 * COLUMNS - 2, 5000, 4 * COLUMNS * ROWS + 1000, 9 * COLUMNS * ROWS]
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.randn(cuts[-1], generator=draw).to(dtype)
        arrived = torch.zeros_like(whole)
        size = whole.element_size()
        bounds = [cut for cut in cuts if cut * size % 8 == 0]
        parts = {f"{a}": (a, whole[a:b].clone()) for a, b in itertools.pairwise(bounds)}
        copies = [
            DeviceCopy(part, arrived[begin : begin + len(part)], name, begin=begin * size)
            for name, (begin, part) in parts.items()
        ]
        assert all(map(fits, copies))
        made = DeviceCopies([*copies, DeviceCopy(whole, name="whole")], look=True)
        for _ in range(2):
            sums, strange = made.launch().read()
            assert not strange
            assert sums.pop("whole") == digests({"": whole})[""]
            assert sums == {name: part_sum(part, begin * size) for name, (begin, part) in parts.items()}
            assert finished(sum(sums.values()), whole) == digests({"": whole})[""]
            assert torch.equal(arrived, whole)
            for _, part in parts.values():
                part.mul_(-1.5)
            whole.mul_(-1.5)
        parts["1024"][1][7] = torch.nan
        assert made.launch().read()[1] == ["1024"]


class Launches:
    """Notes what the kernel is launched with."""

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.variants: set[Hashable] = set()
        """Alignment of the addresses and compiled-in arguments, for each of which Triton compiles a variant."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*tensors: torch.Tensor, **compiled_in: Hashable) -> None:
            self.grids += grid
            self.variants.add((*(tensor.data_ptr() % 16 for tensor in tensors), *compiled_in.items()))
            kernel: Any = copy_and_fold
            kernel[grid](*tensors, **compiled_in)

        return launch


def compile_before_copies() -> None:
    """Copies launch only what was compiled before, also if the number of digests is odd."""
    sources = {name: torch.randn(64, 64) for name in "abc"}
    with mock.patch.object(device_kernel, "copy_and_fold", Launches()) as before:
        compile_kernels(torch.device("cpu"), 64 * 64 * 4, windows=True)
    assert len(before.grids) == 3
    assert not any(before.grids), "nothing runs"
    with (
        mock.patch.object(device_kernel, "copy_and_fold", Launches()) as launched,
        mock.patch.object(device_copies, "reaches", return_value=True),
    ):
        copies = [DeviceCopy(source, torch.empty_like(source), name) for name, source in sources.items()]
        copies.append(DeviceCopy(sources["a"], torch.empty(32, 64), window=Window(2048, 0, 1024)))
        DeviceCopies(copies).launch()
        assert digests_at_once(sources | {"odd": torch.randn(3)}).keys() == {*sources, "odd"}
        assert digests_at_once(sources) == digests(sources)
    assert len(launched.grids) == 4
    assert launched.variants == before.variants


def main() -> None:
    cut_windows()
    copy_parts()
    compile_before_copies()
    draw = torch.Generator().manual_seed(0)
    sizes = [4, 1020, 4 * COLUMNS, 4 * COLUMNS * ROWS, 4 * COLUMNS * ROWS + 8, 9 * COLUMNS * ROWS]
    sources = {
        f"{dtype}-{size}".replace("torch.", ""): torch.randn(size, generator=draw).to(dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for size in sizes
    }
    # One source at an odd offset in words, and one with an odd number of elements.
    sources["odd-place"] = torch.randn(3002, generator=draw)[2:]
    sources["odd-number"] = torch.randn(3002, generator=draw)
    destinations = {name: torch.zeros_like(source) for name, source in sources.items()}
    copies = [DeviceCopy(source, destinations[name], name) for name, source in sources.items()]
    twice = torch.zeros_like(sources["float32-1020"])
    copies.append(DeviceCopy(sources["float32-1020"], twice))
    only_digested = torch.randn(5000, generator=draw)
    copies.append(DeviceCopy(only_digested, name="only digested"))
    made = DeviceCopies(copies, look=True)
    for _ in range(2):
        found, strange = made.launch().read()
        assert not strange
        assert found == digests({**sources, "only digested": only_digested}), "the digests differ"
        for name, source in sources.items():
            assert torch.equal(destinations[name], source), name
        assert torch.equal(twice, sources["float32-1020"])
        for source in sources.values():
            source.mul_(-1.5)
    assert made.nbytes == sum(source.nbytes for source in sources.values()) + twice.nbytes
    for dtype in DTYPES:
        look_for_strange_numbers(dtype)
    integers = torch.full((64,), -1, dtype=torch.int32)
    assert DeviceCopies([DeviceCopy(integers, name="integers")], look=True).launch().read()[1] == []
    print("all equal")


if __name__ == "__main__":
    main()
