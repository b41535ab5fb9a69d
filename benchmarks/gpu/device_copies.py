"""How long the copies of one weight update take on a GPU, by the ways there are, beside one copy of the same bytes.

    python benchmarks/gpu/device_copies.py [--hidden-size 3584] [--layers 28] [--vocabulary 152064] [--json FILE]

The tensors are those of a Qwen2 in bfloat16, at random, by default of 7 billion parameters. Medians of the times from
the call until the GPU is done, in milliseconds and in times of C: one device-to-device copy of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drivetrain_weight_sync import digests
from drivetrain_weight_sync.copying.device_copies import DeviceCopies, DeviceCopy, fits, window_of


def shapes(hidden: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a Qwen2 checkpoint whose heads have 128 dimensions, four for keys and values."""
    found: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden), "head": (vocabulary, hidden), "norm": (hidden,)}
    wide = hidden * 18944 // 3584
    for layer in range(layers):
        found |= {f"{layer}.q": (hidden, hidden), f"{layer}.q_bias": (hidden,), f"{layer}.o": (hidden, hidden)}
        found |= {f"{layer}.{name}": (512, hidden) for name in ("k", "v")}
        found |= {f"{layer}.{name}_bias": (512,) for name in ("k", "v")}
        found |= {f"{layer}.gate": (wide, hidden), f"{layer}.up": (wide, hidden), f"{layer}.down": (hidden, wide)}
        found |= {f"{layer}.{name}": (hidden,) for name in ("before", "after")}
    # The last one at an odd word.
    return found | {"one word": (4,), "odd": (hidden,)}


def median(work: Callable[[], object], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=3584)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    named = shapes(args.hidden_size, args.layers, args.vocabulary)
    total = sum(torch.Size(shape).numel() for shape in named.values())
    arena = torch.randn(total, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(arena)
    sources: dict[str, torch.Tensor] = {}
    begin = 0
    for name, shape in named.items():
        count = torch.Size(shape).numel()
        sources[name] = arena[begin : begin + count].view(shape)
        begin += count
    held = {name: torch.zeros_like(source) for name, source in sources.items()}
    made = DeviceCopies([DeviceCopy(source, held[name], name) for name, source in sources.items()])
    looking = DeviceCopies([DeviceCopy(source, held[name], name) for name, source in sources.items()], look=True)
    only_looking = DeviceCopies([DeviceCopy(source, None, name) for name, source in sources.items()], look=True)

    # As the first of two ranks takes them: half of the columns of what joins again, else half of the rows.
    halves = {name: source.chunk(2, 1 if name.endswith((".o", ".down")) else 0)[0] for name, source in sources.items()}
    parts = {name: torch.zeros_like(half, memory_format=torch.contiguous_format) for name, half in halves.items()}
    windows = {
        name: window_of(source, half.shape, half.stride(), 0)
        for (name, source), half in zip(sources.items(), halves.values(), strict=True)
    }
    # Half of one word is none: of that tensor there is only the digest.
    in_halves = [
        DeviceCopy(source, parts[name] if windows[name] else None, name, windows[name])
        for name, source in sources.items()
    ]
    assert all(map(fits, in_halves))
    halving = DeviceCopies(in_halves)

    def one_by_one() -> None:
        for name, source in sources.items():
            held[name].copy_(source)

    c = median(lambda: other.copy_(arena), args.repeats)
    ways: dict[str, Callable[[], object]] = {
        "one copy_ for each tensor": one_by_one,
        "torch._foreach_copy_": lambda: torch._foreach_copy_(list(held.values()), list(sources.values())),
        "one kernel, digests on the way": made.launch,
        "one kernel, digests on the way and read": lambda: made.launch().read(),
        "the same, and a look for what is not finite": lambda: looking.launch().read(),
        "digests and that look, no copy": lambda: only_looking.launch().read(),
        "half of each by one kernel, digests of the whole": lambda: halving.launch().read(),
        "digests of torch alone": lambda: digests(held),
    }
    rows = {name: median(work, args.repeats) for name, work in ways.items()}
    for tensor in held.values():
        tensor.zero_()
    assert made.launch().read() == (digests(sources), []), "the kernel's digests are not torch's"
    assert all(torch.equal(held[name], source) for name, source in sources.items()), "the kernel copied otherwise"
    assert halving.launch().read() == (digests(sources), []), "with windows, the kernel's digests are not torch's"
    assert all(torch.equal(parts[name], half) for name, half in halves.items() if windows[name]), (
        "windows were copied otherwise"
    )
    gigabytes = arena.nbytes / 1e9
    print(f"{torch.cuda.get_device_name()}: {len(named)} tensors, {gigabytes:.2f} GB, C = {c:.2f} ms")
    for name, taken in rows.items():
        print(f"{taken:9.2f} ms  {taken / c:6.2f} C  {name}")
    if args.json:
        document = {
            "device": torch.cuda.get_device_name(),
            "tensors": len(named),
            "gb": gigabytes,
            "c_ms": c,
            "ms": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
