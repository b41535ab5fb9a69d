# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportArgumentType=false, reportCallIssue=false
"""Many copies within a GPU as one kernel, with the digest of each tensor computed on the way.

A push of a model is hundreds of copies of a few megabytes. Launched one by one they cost 20 µs each of the host's time,
more than the copying itself; and a digest that reads again what was written costs as much as the copy. Here one launch
makes all of them, from a table of addresses, and adds up the same digests as :mod:`drivetrain_weight_sync.digest`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch

from drivetrain_weight_sync.digest import COLUMNS, finished, weights_on

ROWS: Final = 16
"""Rows of 1024 words of 64 bits that one program of the kernel copies: 128 KiB."""
_ROW_BYTES: Final = 8 * COLUMNS
_WARPS: Final = 2
"""Threads of a program, in 32: fewest were fastest on an H200 (benchmarks/gpu/device_copies.py)."""

_EXPONENTS: Final = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # it has no infinity, and one NaN
}
"""The bits that all are 1 in a number that is not finite, and only there."""


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor to digest, and where to copy it to."""

    source: torch.Tensor
    destination: torch.Tensor | None = None
    """Of the same bytes; None: only the digest is wanted."""
    name: str | None = None
    """By which the digest of the source is given; None: it is not wanted."""


def is_available() -> bool:
    """Whether Triton is there, which the kernel is written in. Nothing is imported."""
    return find_spec("triton") is not None


def reaches(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read this tensor: it lies on a GPU."""
    return tensor.is_cuda and is_available()


def fits(copy: DeviceCopy) -> bool:
    """Whether the kernel makes this copy: between contiguous tensors of whole words of 64 bits, on one device."""
    tensors = [copy.source] if copy.destination is None else [copy.source, copy.destination]
    return (
        len({(tensor.dtype, tensor.nbytes, tensor.device) for tensor in tensors}) == 1
        and all(tensor.is_contiguous() and tensor.data_ptr() % 8 == 0 for tensor in tensors)
        and copy.source.nbytes % 8 == 0
        and copy.source.nbytes > 0
    )


def can_look(dtype: torch.dtype) -> bool:
    """Whether the kernel can tell numbers of this dtype that are not finite; of integers all are finite."""
    return dtype in _EXPONENTS or not (dtype.is_floating_point or dtype.is_complex)


class DeviceCopies:
    """Copies that are made together, again and again; the tensors stay where they are.

    Args:
        copies: Each of which :func:`fits`, on one device, no two of one name. A destination is not another's source.
        look: Look for numbers that are not finite as well.
    """

    def __init__(self, copies: Iterable[DeviceCopy], *, look: bool = False) -> None:
        made = list(copies)
        digested = [(copy.name, copy.source) for copy in made if copy.name is not None]
        self.names: tuple[str, ...] = tuple(name for name, _ in digested)
        """Of the tensors that are digested."""
        self.device = made[0].source.device
        self.nbytes = sum(copy.destination.nbytes for copy in made if copy.destination is not None)
        """Bytes that are copied."""
        self._look = look
        self._ends = np.array([finished(0, source) for _, source in digested], dtype=np.int64)
        self._table = torch.from_numpy(_table(made, look)).to(self.device)
        # The kernel reads the weights of all rows of its last item, also of those that are not there.
        self._most_rows = max(-(-copy.source.nbytes // _ROW_BYTES) for copy in made) + ROWS

    @torch.no_grad()
    def launch(self) -> Launched:
        """Make the copies. The work goes on after this returns."""
        from drivetrain_weight_sync.device_kernel import copy_and_fold

        weights = weights_on(self.device)
        found = torch.zeros(2, max(len(self.names), 1), dtype=torch.int64, device=self.device)
        copy_and_fold[(len(self._table),)](
            self._table,
            weights.a,
            weights.b,
            weights.per_row(self._most_rows),
            found[0],
            found[1],
            COLUMNS=COLUMNS,
            ROWS=ROWS,
            LOOK=self._look,
            num_warps=_WARPS,
        )
        return Launched(self.names, self._ends, found)


class Launched:
    """What a launch finds; asking waits for it."""

    def __init__(self, names: tuple[str, ...], ends: np.ndarray, found: torch.Tensor) -> None:
        self._names = names
        self._ends = ends
        self._found = found

    def read(self) -> tuple[dict[str, int], list[str]]:
        """The digest of each tensor, as :func:`drivetrain_weight_sync.digest.digests` gives it; who is not finite."""
        sums, strange = self._found.cpu().numpy()
        count = len(self._names)
        values = (sums[:count] + self._ends).tolist()  # modulo 2**64, as torch's
        return dict(zip(self._names, values, strict=True)), [self._names[i] for i in np.flatnonzero(strange[:count])]


class Looks:
    """Launches that look at tensors and copy them, by one kernel for each GPU; tables are kept while tensors stay."""

    def __init__(self) -> None:
        self._batches: dict[torch.device, tuple[Hashable, DeviceCopies]] = {}

    def __call__(self, copies: Iterable[DeviceCopy]) -> tuple[dict[str, int], list[str]]:
        """Make copies, each of which :func:`fits` and has a name; return digests by name, and who is not finite."""
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        self._batches = {device: self._batch(device, of_device) for device, of_device in by_device.items()}
        return self.again()

    def again(self) -> tuple[dict[str, int], list[str]]:
        """Make the copies of the last call again."""
        for device in self._batches:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # whoever writes the tensors may do so in another stream
        launched = [batch.launch() for _, batch in self._batches.values()]
        values: dict[str, int] = {}
        strange: list[str] = []
        for digests, names in (one.read() for one in launched):
            values.update(digests)
            strange += names
        return values, strange

    def _batch(self, device: torch.device, copies: list[DeviceCopy]) -> tuple[Hashable, DeviceCopies]:
        key = tuple(
            (copy.name, copy.source.dtype, copy.source.nbytes, copy.source.data_ptr(), _address(copy.destination))
            for copy in copies
        )
        found = self._batches.get(device)
        return found if found is not None and found[0] == key else (key, DeviceCopies(copies, look=True))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _table(copies: Sequence[DeviceCopy], look: bool) -> np.ndarray:
    """One row for each program, ``[programs, 7]`` int64.

    Addresses of source and destination, number of words, first row, whose digest, and the bits of the exponents and
    above them in a word.
    """
    indices = np.cumsum([copy.name is not None for copy in copies]) - 1
    tensors = np.array(
        [
            (
                copy.source.data_ptr(),
                _address(copy.destination),
                copy.source.nbytes // 8,
                0,
                index if copy.name is not None else -1,
                *(_masks(copy.source.dtype) if look else (0, 0)),
            )
            for copy, index in zip(copies, indices, strict=True)
        ],
        dtype=np.int64,
    )
    programs = -(-tensors[:, 2] // (COLUMNS * ROWS))
    table = np.repeat(tensors, programs, axis=0)
    begins = np.cumsum(programs) - programs
    rows = (np.arange(len(table)) - np.repeat(begins, programs)) * ROWS
    table[:, 0] += rows * _ROW_BYTES
    table[:, 1] += np.where(table[:, 1] == 0, 0, rows * _ROW_BYTES)
    table[:, 2] = np.minimum(table[:, 2] - rows * COLUMNS, ROWS * COLUMNS)
    table[:, 3] = rows
    return table


def _masks(dtype: torch.dtype) -> tuple[int, int]:
    """Bits of the exponents, and the bits above them, of all numbers in a word; 0 where every value is finite."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return 0, 0
    bits = 8 * dtype.itemsize
    ones = sum(1 << shift for shift in range(0, 64, bits))
    tops = ones << (bits - 1)
    return exponent * ones, tops - (1 << 64) if tops >> 63 else tops
