"""Run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from drivetrain_weight_sync.device_copies import ROWS, DeviceCopies, DeviceCopy
from drivetrain_weight_sync.digest import COLUMNS, digests

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


def look_for_strange_numbers(dtype: torch.dtype) -> None:
    """Of 8 bits every number there is, of others the ends: those that are not finite are each found among ones."""
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


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [4, 1020, 4 * COLUMNS, 4 * COLUMNS * ROWS, 4 * COLUMNS * ROWS + 8, 9 * COLUMNS * ROWS]
    sources = {
        f"{dtype}-{size}".replace("torch.", ""): torch.randn(size, generator=draw).to(dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for size in sizes
    }
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
