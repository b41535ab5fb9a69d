"""Run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from drivetrain_weight_sync.device_copies import ROWS, DeviceCopies, DeviceCopy
from drivetrain_weight_sync.digest import COLUMNS, digests


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
    made = DeviceCopies(copies)
    for _ in range(2):
        found = made.digests(made.launch())
        assert found == digests({**sources, "only digested": only_digested}), "the digests differ"
        for name, source in sources.items():
            assert torch.equal(destinations[name], source), name
        assert torch.equal(twice, sources["float32-1020"])
        for source in sources.values():
            source.mul_(-1.5)
    assert made.nbytes == sum(source.nbytes for source in sources.values()) + twice.nbytes
    print("all equal")


if __name__ == "__main__":
    main()
