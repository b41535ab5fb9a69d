# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportArgumentType=false, reportCallIssue=false
"""Many copies within a GPU as one kernel, with the digest of each tensor computed on the way.

A push of a model is hundreds of copies of a few megabytes. Launched one by one they cost 20 µs each of the host's time,
more than the copying itself; and a digest that reads again what was written costs as much as the copy. Here one
launch makes all of them, from a table of addresses, and adds up the same digests as
:mod:`drivetrain_weight_sync.copying.digest`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, NamedTuple, Self

import numpy as np
import torch

from drivetrain_weight_sync.copying.digest import COLUMNS, finished, weights_on

ROWS: Final = 16
"""Rows of 1024 words of 64 bits in one item of the kernel's table: 128 KiB."""
_WORD: Final = 8
_ROW_BYTES: Final = _WORD * COLUMNS
_LARGEST_WITH_WINDOW: Final = _WORD << 31
"""Bytes of a tensor whose words can no longer be counted with 32 bits."""
_WARPS: Final = 2
"""Threads of a program, in 32. This, the line and who shares an item: what was fastest on an H200
(benchmarks/results/2026-11-23-h200-copy-kernel.txt)."""
_LINE: Final = 64 * _WARPS
"""Words that a program's threads have at once, two each."""
_COPIES_SHARED_BY: Final = 4
"""Programs that share an item which is copied; one that is only read has a program of its own."""

_EXPONENTS: Final = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # it has no infinity, and one NaN
}
"""The bits that all are 1 in a number that is not finite, and only there."""


_PACED_ITEMS: Final = 4096
"""How many are copied at a time where the GPU is shared: half a gigabyte, which takes a third of a millisecond."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a tensor: of each ``stride`` words those from ``begin`` on, ``width`` of them."""

    stride: int
    begin: int
    width: int


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor to digest, and where to copy it to."""

    source: torch.Tensor
    destination: torch.Tensor | None = None
    """Of the same bytes, or of those in the window; None: only the digest is wanted."""
    name: str | None = None
    """By which the digest of the whole source is given; None: it is not wanted."""
    window: Window | None = None
    """What of the source is copied; None: all of it."""


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
        len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        and all(tensor.is_contiguous() and tensor.data_ptr() % _WORD == 0 for tensor in tensors)
        and copy.source.nbytes % _WORD == 0
        and copy.source.nbytes > 0
        and (copy.destination is None or copy.destination.nbytes == _copied_nbytes(copy))
        and (copy.window is None or copy.source.nbytes < _LARGEST_WITH_WINDOW)
    )


def _copied_nbytes(copy: DeviceCopy) -> int:
    if copy.window is None:
        return copy.source.nbytes
    return copy.source.nbytes // copy.window.stride * copy.window.width


def window_of(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Window | None:
    """The window that ``tensor.as_strided(size, stride, offset)`` is of a contiguous tensor; None: it is not one."""
    # What lies without a gap is one dimension.
    sizes, strides = [1], [1]
    for count, step in zip(reversed(size), reversed(stride), strict=True):
        if count == 1:
            continue
        if step == sizes[-1] * strides[-1]:
            sizes[-1] *= count
        else:
            sizes.append(count)
            strides.append(step)
    if len(sizes) > 2 or strides[0] != 1:
        return None
    width, lines = sizes[0], sizes[1] if len(sizes) == 2 else 1
    between = strides[1] if len(sizes) == 2 else tensor.numel()
    if offset + width > between or lines * between != tensor.numel():
        return None
    numbers = [between, offset, width]
    if any(number * tensor.element_size() % _WORD for number in numbers):
        return None
    return Window(*(number * tensor.element_size() // _WORD for number in numbers))


def can_look(dtype: torch.dtype) -> bool:
    """Whether the kernel can tell numbers of this dtype that are not finite; of integers all are finite."""
    return dtype in _EXPONENTS or not (dtype.is_floating_point or dtype.is_complex)


class Pace:
    """Makes work on a GPU leave time to others: a part of it, then a rest.

    Args:
        share: Of the time that passes, how much the work takes, above 0 and at most 1.
        reached: Called after each part with how much is done, from 0 to 1; what it raises ends the work.
    """

    def __init__(self, share: float, reached: Callable[[float], None]) -> None:
        self._share = share
        self._reached = reached

    def run(self, parts: int, work: Callable[[int], None]) -> None:
        """Do ``work`` with each number below ``parts``, which all take as long."""
        taken = math.inf
        for part in range(parts):
            if part > 0:
                time.sleep(taken * (1 / self._share - 1))
            begun = time.perf_counter()
            work(part)
            # The quickest so far: the others had to wait for whom the GPU is shared with.
            taken = min(taken, time.perf_counter() - begun)
            self._reached((part + 1) / parts)


class _Kind(NamedTuple):
    """What the kernel is compiled for."""

    stores: bool
    """Something is copied, not only looked at."""
    windows: bool
    """And of it only what is in a window."""
    pairs: bool
    """Words can be read two at a time."""

    @classmethod
    def of(cls, copy: DeviceCopy) -> Self:
        places = (copy.source.data_ptr(), _address(copy.destination), copy.source.nbytes)
        return cls(
            stores=copy.destination is not None,
            windows=copy.window is not None,
            pairs=not any(place % (2 * _WORD) for place in places),
        )


class DeviceCopies:
    """Copies that are made together, again and again; the tensors stay where they are.

    Args:
        copies: Each of which :func:`fits`, on one device, no two of one name. A destination is not another's source.
        look: Look for numbers that are not finite as well.
    """

    def __init__(self, copies: Iterable[DeviceCopy], *, look: bool = False) -> None:
        made = list(copies)
        digested = [(copy.name, copy.source) for copy in made if copy.name is not None]
        self._order = [name for name, _ in digested]
        self.names: frozenset[str] = frozenset(self._order)
        """Of the tensors that are digested."""
        self.device = made[0].source.device
        self.nbytes = sum(copy.destination.nbytes for copy in made if copy.destination is not None)
        """Bytes that are copied."""
        self._look = look
        indices = np.cumsum([copy.name is not None for copy in made]) - 1
        self._ends = np.array([finished(0, source) for _, source in digested], dtype=np.int64)
        self._tables: list[tuple[_Kind, torch.Tensor]] = []
        """The copies of each kind, as the kernel finds them."""
        kinds = [_Kind.of(copy) for copy in made]
        for kind in dict.fromkeys(kinds):
            some = [number for number, other in enumerate(kinds) if other == kind]
            table = _table([made[number] for number in some], indices[some], look, kind.windows)
            self._tables.append((kind, torch.from_numpy(table).to(self.device)))
        # The kernel reads the weights of all rows of its last item, also of those that are not there.
        most_rows = max(-(-copy.source.nbytes // _ROW_BYTES) for copy in made) + ROWS
        weights = weights_on(self.device)
        self._weights = weights.a, weights.b, weights.per_row(most_rows)
        self._found = torch.zeros(2, max(len(self._order), 1), dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._result = torch.empty(self._found.shape, dtype=torch.int64, pin_memory=True) if on_gpu else self._found
        self._launches = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def launch(self, pace: Pace | None = None) -> Launched:
        """Make the copies. The work goes on after this returns, unless it is paced; what an earlier launch found goes.

        From the second time on it is one CUDA graph, which is launched in a fraction of the time.
        """
        self._launches += 1
        if pace is not None:
            self._launch_paced(pace)
        elif self.device.type != "cuda" or self._launches == 1:
            self._launch_all()
        else:
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
        return Launched(self._order, self.names, self._ends, self._result, self.device)

    def _launch_all(self) -> None:
        self._found.zero_()
        for kind, table in self._tables:
            self._run(table, kind)
        self._take_result()

    def _launch_paced(self, pace: Pace) -> None:
        parts = [(kind, part) for kind, table in self._tables for part in torch.split(table, _PACED_ITEMS)]

        def copy(part: int) -> None:
            kind, table = parts[part]
            self._run(table, kind)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        self._found.zero_()
        pace.run(len(parts), copy)
        self._take_result()

    def _take_result(self) -> None:
        if self._result is not self._found:
            self._result.copy_(self._found, non_blocking=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph() would collect garbage and give memory back first, which takes longer than many updates.
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch_all()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(side)
        return graph

    def _run(self, table: torch.Tensor, kind: _Kind) -> None:
        from drivetrain_weight_sync.copying.device_kernel import copy_and_fold

        shared_by = _COPIES_SHARED_BY if kind.stores else 1
        copy_and_fold[(len(table) * shared_by,)](
            table,
            *self._weights,
            *self._found,
            COLUMNS=COLUMNS,
            LINE=_LINE,
            ROWS=ROWS,
            SHARED_BY=shared_by,
            LOOK=self._look,
            WINDOWS=kind.windows,
            PAIRS=kind.pairs,
            num_warps=_WARPS,
        )


class Launched:
    """What a launch finds; asking waits for it."""

    def __init__(
        self, order: Sequence[str], names: frozenset[str], ends: np.ndarray, found: torch.Tensor, device: torch.device
    ) -> None:
        self.names = names
        """Of the tensors that are digested."""
        self._order = order
        self._ends = ends
        self._found = found
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(device))
        self._expected = ends

    def read(self) -> tuple[dict[str, int], list[str]]:
        """The digests of the tensors, as :func:`~drivetrain_weight_sync.copying.digest.digests`; who is not finite."""
        bad: list[int] = np.flatnonzero(self._wait()[1, : len(self._order)]).tolist()
        return dict(zip(self._order, self._values().tolist(), strict=True)), [self._order[index] for index in bad]

    def expect(self, digests: Mapping[str, int]) -> None:
        """Say which digests there should be; this does not wait."""
        self._expected = np.array([digests[name] for name in self._order], dtype=np.int64)

    def differing(self) -> list[str]:
        """Names of the tensors whose digests are not as expected."""
        wrong: list[int] = np.flatnonzero(self._values() != self._expected).tolist()
        return [self._order[index] for index in wrong]

    def _values(self) -> np.ndarray:
        values: np.ndarray = self._wait()[0, : len(self._order)] + self._ends  # modulo 2**64, as torch's
        return values

    def _wait(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        found: np.ndarray = self._found.numpy()
        return found


class Looks:
    """Launches that look at tensors and copy them, by one kernel for each GPU; tables are kept while tensors stay."""

    def __init__(self) -> None:
        self._batches: dict[torch.device, tuple[Hashable, DeviceCopies]] = {}

    def __call__(self, copies: Iterable[DeviceCopy], pace: Pace | None = None) -> tuple[dict[str, int], list[str]]:
        """Make copies, each of which :func:`fits` and has a name; return digests by name, and who is not finite."""
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        self._batches = {device: self._batch(device, of_device) for device, of_device in by_device.items()}
        return self.again(pace)

    def again(self, pace: Pace | None = None) -> tuple[dict[str, int], list[str]]:
        """Make the copies of the last call again."""
        for device in self._batches:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # whoever writes the tensors may do so in another stream
        launched = [batch.launch(pace) for _, batch in self._batches.values()]
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


def _table(copies: Sequence[DeviceCopy], indices: np.ndarray, look: bool, windows: bool) -> np.ndarray:
    """One row for each item, int64 ``[items, 7]``, with windows ``[items, 10]``.

    Addresses of source and destination, number of words, first row, whose digest, the bits of the exponents and above
    them in a word, and the window. With one, the destination's address is that of its beginning.
    """
    tensors = np.array(
        [
            (
                copy.source.data_ptr(),
                _address(copy.destination),
                copy.source.nbytes // _WORD,
                0,
                index if copy.name is not None else -1,
                *(_masks(copy.source.dtype) if look else (0, 0)),
                *((copy.window.stride, copy.window.begin, copy.window.width) if copy.window is not None else ()),
            )
            for copy, index in zip(copies, indices, strict=True)
        ],
        dtype=np.int64,
    )
    items = -(-tensors[:, 2] // (COLUMNS * ROWS))
    table = np.repeat(tensors, items, axis=0)
    begins = np.cumsum(items) - items
    rows = (np.arange(len(table)) - np.repeat(begins, items)) * ROWS
    table[:, 0] += rows * _ROW_BYTES
    if not windows:
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
