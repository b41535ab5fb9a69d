# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportArgumentType=false, reportCallIssue=false
"""Copy many tensors within a GPU in one kernel launch, and digest each on the way.

A push of a model is hundreds of copies of a few megabytes. Launched one by one, each costs 20 µs of host time, more
than the copying itself; and a digest that reads the result again costs as much as the copy. Here a single launch makes
all copies from a table of addresses, and computes the digests of :mod:`drivetrain_weight_sync.copying.digest`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Final, NamedTuple, Self

import numpy as np
import torch

from drivetrain_weight_sync.copying.digest import COLUMNS, digests, finished, weights_on
from drivetrain_weight_sync.copying.waiting import WAITING, wait_for

ROWS: Final = 16
"""Rows of 1024 words of 64 bits in one item of the kernel's table: 128 KiB."""
_WORD: Final = 8
_ROW_BYTES: Final = _WORD * COLUMNS
_LARGEST_WITH_WINDOW: Final = _WORD << 31
"""Smallest size in bytes of a tensor whose words cannot be indexed with signed 32 bits."""
_WARPS: Final = 2
"""Warps of a program. This, ``_LINE`` and ``_COPIES_SHARED_BY`` were the fastest on an H200
(benchmarks/results/2026-11-23-h200-copy-kernel.txt)."""
_LINE: Final = 64 * _WARPS
"""Words that a program's threads hold at once, two each."""
_COPIES_SHARED_BY: Final = 4
"""Programs that share one copied item; an item that is only read has a single program."""

_EXPONENTS: Final = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # no infinity, and one NaN
}
"""Exponent bits, all of which are 1 only in numbers that are not finite."""


PACED_ITEMS: Final = 4096
"""Items per launch while the GPU is shared: half a gigabyte, which takes a third of a millisecond."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a tensor: of every ``stride`` words, the ``width`` words from ``begin`` on."""

    stride: int
    begin: int
    width: int


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A tensor to digest, and optionally its destination."""

    source: torch.Tensor
    destination: torch.Tensor | None = None
    """Same size as the source, or as its window; None: compute only the digest."""
    name: str | None = None
    """Key of the whole source's digest in the result; None: no digest."""
    window: Window | None = None
    """The part of the source to copy; None: all of it."""
    begin: int | None = None
    """Byte at which the source begins in the tensor of which it is a part: the result is then its
    :func:`~drivetrain_weight_sync.copying.digest.part_sum` there. None: the source is whole. Not with a window."""

    @property
    def words_before(self) -> int:
        """Words in the source's first row that are not its own."""
        return (self.begin or 0) // _WORD % COLUMNS

    @property
    def rows_before(self) -> int:
        """Rows of the tensor that lie wholly before the source."""
        return (self.begin or 0) // _ROW_BYTES


@cache
def is_available() -> bool:
    """Return whether Triton, which the kernel needs, is installed. Nothing is imported."""
    return find_spec("triton") is not None


def reaches(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can read this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and is_available()


def fits(copy: DeviceCopy) -> bool:
    """Return whether the kernel can make this copy: contiguous tensors of whole 64-bit words, on one device."""
    source, destination = copy.source, copy.destination
    nbytes = source.nbytes
    return (
        nbytes > 0
        and nbytes % _WORD == 0
        and _is_of_words(source)
        and (copy.begin or 0) % _WORD == 0
        and (copy.window is None or nbytes < _LARGEST_WITH_WINDOW)
        and (
            destination is None
            or (
                destination.dtype == source.dtype
                and destination.device == source.device
                and destination.nbytes == _copied_nbytes(copy)
                and _is_of_words(destination)
            )
        )
    )


def _is_of_words(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _WORD == 0


def _copied_nbytes(copy: DeviceCopy) -> int:
    if copy.window is None:
        return copy.source.nbytes
    return copy.source.nbytes // copy.window.stride * copy.window.width


def window_of(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Window | None:
    """Return the window that ``tensor.as_strided(size, stride, offset)`` selects; None if it is not a window."""
    # Merge dimensions that are contiguous with each other.
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
    """Return whether the kernel can find non-finite numbers of this dtype; integers are always finite."""
    return dtype in _EXPONENTS or not (dtype.is_floating_point or dtype.is_complex)


class Pace:
    """Runs GPU work in parts with pauses between them, to leave time to others.

    Args:
        share: Share of the elapsed time that the work takes, above 0 and at most 1.
        reached: Called after each part with the fraction done, from 0 to 1; an exception from it ends the work.
    """

    def __init__(self, share: float, reached: Callable[[float], None]) -> None:
        self._share = share
        self._reached = reached

    def run(self, parts: int, work: Callable[[int], None]) -> None:
        """Call ``work`` with each number below ``parts``; all parts must take equally long."""
        taken = math.inf
        for part in range(parts):
            if part > 0:
                time.sleep(taken * (1 / self._share - 1))
            begun = time.perf_counter()
            work(part)
            # The shortest part so far; longer ones waited for others on the GPU.
            taken = min(taken, time.perf_counter() - begun)
            self._reached((part + 1) / parts)


class _Kind(NamedTuple):
    """The flags that select a compiled variant of the kernel."""

    stores: bool
    """The tensors are copied, not only read."""
    windows: bool
    """Only a window of each is copied."""
    shifted: bool
    """They begin within a row of a larger tensor."""
    pairs: bool
    """Words can be read two at a time."""

    @classmethod
    def of(cls, copy: DeviceCopy) -> Self:
        places = copy.source.data_ptr() | _address(copy.destination) | copy.source.nbytes | (copy.begin or 0)
        return cls(
            copy.destination is not None,
            copy.window is not None,
            copy.begin is not None,
            places % (2 * _WORD) == 0,
        )


class DeviceCopies:
    """A batch of copies that can be launched repeatedly while the tensors keep their addresses.

    Args:
        copies: Copies that all pass :func:`fits`, on one device, with distinct names. No destination is another copy's
            source.
        look: Also look for numbers that are not finite.
        found: Memory to which the kernel adds its sums, ``[2, digests]`` of zeros; None: memory of its own.
    """

    def __init__(self, copies: Iterable[DeviceCopy], *, look: bool = False, found: torch.Tensor | None = None) -> None:
        made = list(copies)
        digested = [copy for copy in made if copy.name is not None]
        self.order: list[str] = [copy.name for copy in digested if copy.name is not None]
        """Names of the digested tensors, in the order of their sums."""
        self.names: frozenset[str] = frozenset(self.order)
        """Names of the tensors that are digested."""
        self.device = made[0].source.device
        self.nbytes = sum(copy.destination.nbytes for copy in made if copy.destination is not None)
        """Bytes that are copied."""
        self._look = look
        indices = np.cumsum([copy.name is not None for copy in made]) - 1
        ends = [finished(0, copy.source) if copy.begin is None else 0 for copy in digested]
        self.ends: np.ndarray = np.array(ends, dtype=np.int64)
        """Added to each sum to make it a digest."""
        self._tables: list[tuple[_Kind, torch.Tensor]] = []
        """The kernel's table for each kind of copy."""
        kinds = [_Kind.of(copy) for copy in made]
        for kind in dict.fromkeys(kinds):
            some = [number for number, other in enumerate(kinds) if other == kind]
            table = _table([made[number] for number in some], indices[some], look, kind)
            self._tables.append((kind, torch.from_numpy(table).to(self.device)))
        # The kernel reads weights for all rows of its last item, even beyond the tensor's end.
        most_rows = max(copy.rows_before - (-copy.source.nbytes // _ROW_BYTES) for copy in made) + 1 + ROWS
        weights = weights_on(self.device)
        self._weights = weights.a, weights.b, weights.per_row(most_rows)
        # Even rows: Triton compiles a variant of the kernel for addresses that are no multiples of 16 bytes.
        shape = 2, len(self.order) + len(self.order) % 2 or 2
        self._found = torch.zeros(shape, dtype=torch.int64, device=self.device) if found is None else found
        self._result = page_locked(self._found) if found is None else found
        self._launches = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def launch(self, pace: Pace | None = None) -> Launched:
        """Make the copies, and return without waiting unless paced. The next launch overwrites the results of this one.

        From the second launch on, a CUDA graph is replayed, which takes a fraction of the time.
        """
        self._launches += 1
        if pace is not None:
            self._launch_paced(pace)
        elif self.device.type != "cuda" or self._launches == 1:
            self._enqueue_all()
        else:
            if self._graph is None:
                self._graph = captured(self.device, self._enqueue_all)
            self._graph.replay()
        return Launched(self.order, self.names, self.ends, self._result, self.device)

    def enqueue(self) -> None:
        """Launch the kernels, which add to ``found``."""
        for kind, table in self._tables:
            self._run(table, kind)

    def compile(self) -> None:
        """Compile the kernels and load them to the GPU; nothing is copied."""
        for kind, table in self._tables:
            self._run(table[:0], kind)

    def _enqueue_all(self) -> None:
        self._found.zero_()
        self.enqueue()
        self._take_result()

    def _launch_paced(self, pace: Pace) -> None:
        parts = [(kind, part) for kind, table in self._tables for part in torch.split(table, PACED_ITEMS)]

        def copy(part: int) -> None:
            kind, table = parts[part]
            self._run(table, kind)
            if self.device.type == "cuda":
                wait_for(self.device)

        self._found.zero_()
        pace.run(len(parts), copy)
        self._take_result()

    def _take_result(self) -> None:
        if self._result is not self._found:
            self._result.copy_(self._found, non_blocking=True)

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
            SHIFTED=kind.shifted,
            PAIRS=kind.pairs,
            num_warps=_WARPS,
        )


def compile_kernels(device: torch.device, nbytes: int, *, windows: bool) -> None:
    """Compile and load the kernels of copies within a GPU, and make the digest's weights; nothing is copied.

    Tensors whose addresses or sizes are odd multiples of 8 bytes need further variants, which compile at their first
    launch.

    Args:
        device: The GPU.
        nbytes: Size of the largest tensor.
        windows: True if there will be copies of windows.
    """
    source, destination = torch.zeros(2, 2, 4, dtype=torch.int64, device=device)
    copies = [DeviceCopy(source, destination, "copied"), DeviceCopy(source, name="read")]
    if windows:
        copies.append(DeviceCopy(source, destination[:1], "part", Window(4, 0, 2)))
    DeviceCopies(copies).compile()
    weights_on(device).per_row(-(-nbytes // _ROW_BYTES) + 1 + ROWS)


def digests_at_once(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the same as :func:`~drivetrain_weight_sync.copying.digest.digests`, with one launch for each GPU."""
    by_device: dict[torch.device, list[DeviceCopy]] = {}
    for name, tensor in tensors.items():
        if reaches(tensor) and fits(copy := DeviceCopy(tensor, name=name)):
            by_device.setdefault(tensor.device, []).append(copy)
    launched = [DeviceCopies(copies).launch() for copies in by_device.values()]
    found = {name: value for one in launched for name, value in one.read()[0].items()}
    return found | digests({name: tensor for name, tensor in tensors.items() if name not in found})


def page_locked(found: torch.Tensor) -> torch.Tensor:
    """Return page-locked memory for the sums of a GPU's kernels; on a CPU, the sums themselves."""
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True) if found.is_cuda else found


def captured(device: torch.device, enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture the kernels that a function enqueues into a CUDA graph, without running them."""
    # torch.cuda.graph() would first collect garbage and free memory, which takes longer than many updates.
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with WAITING, torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            enqueue()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


class Launched:
    """Results of a launch; reading them waits for it."""

    def __init__(
        self, order: Sequence[str], names: frozenset[str], ends: np.ndarray, found: torch.Tensor, device: torch.device
    ) -> None:
        self.names = names
        """Names of the tensors that are digested."""
        self._order = order
        self._ends = ends
        self._found = found
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(device))
        self._expected = ends

    def read(self) -> tuple[dict[str, int], list[str]]:
        """Return digests as in :func:`~drivetrain_weight_sync.copying.digest.digests`; names of non-finite tensors."""
        bad: list[int] = np.flatnonzero(self._wait()[1, : len(self._order)]).tolist()
        return dict(zip(self._order, self._values().tolist(), strict=True)), [self._order[index] for index in bad]

    def expect(self, digests: Mapping[str, int]) -> None:
        """Set the expected digests; this does not wait."""
        self._expected = np.array([digests[name] for name in self._order], dtype=np.int64)

    def differing(self) -> list[str]:
        """Return the names of tensors whose digests differ from the expected ones."""
        wrong: list[int] = np.flatnonzero(self._values() != self._expected).tolist()
        return [self._order[index] for index in wrong]

    def _values(self) -> np.ndarray:
        values: np.ndarray = self._wait()[0, : len(self._order)] + self._ends  # modulo 2**64, like torch
        return values

    def _wait(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        found: np.ndarray = self._found.numpy()
        return found


class Looks:
    """Checks and copies tensors in one launch per GPU; tables are kept while the tensors do not move."""

    def __init__(self) -> None:
        self._batches: dict[torch.device, tuple[Hashable, DeviceCopies]] = {}

    def __call__(self, copies: Iterable[DeviceCopy], pace: Pace | None = None) -> tuple[dict[str, int], list[str]]:
        """Make named copies that pass :func:`fits`; return digests by name, and the names with non-finite values."""
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        self._batches = {device: self._batch(device, of_device) for device, of_device in by_device.items()}
        return self.again(pace)

    def again(self, pace: Pace | None = None) -> tuple[dict[str, int], list[str]]:
        """Repeat the copies of the last call."""
        for device in self._batches:
            if device.type == "cuda":
                wait_for(device)  # another stream may still be writing the tensors
        launched = [batch.launch(pace) for _, batch in self._batches.values()]
        values: dict[str, int] = {}
        strange: list[str] = []
        for of_batch, names in (one.read() for one in launched):
            values.update(of_batch)
            strange += names
        return values, strange

    def _batch(self, device: torch.device, copies: list[DeviceCopy]) -> tuple[Hashable, DeviceCopies]:
        key = tuple(
            (
                copy.name,
                copy.source.dtype,
                copy.source.nbytes,
                copy.source.data_ptr(),
                _address(copy.destination),
                copy.begin,
            )
            for copy in copies
        )
        found = self._batches.get(device)
        return found if found is not None and found[0] == key else (key, DeviceCopies(copies, look=True))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _table(copies: Sequence[DeviceCopy], indices: np.ndarray, look: bool, kind: _Kind) -> np.ndarray:
    """Return the kernel's table, int64 ``[items, 7]``, or ``[items, 8]`` of parts, or ``[items, 10]`` with windows.

    Columns: address of the source, address of the destination, number of words, first row, index of the digest (-1:
    none), exponent bits of a word, bits above the exponent.

    - A part of a tensor has one column more. Its addresses are those of the beginning of its first row, and the column
      counts the words of that row that belong to another part.
    - A copy with a window has three columns more: stride, begin and width. All its items have the address at which the
      destination begins; other items have that of their own first row.
    """
    tensors = np.array(
        [
            (
                copy.source.data_ptr() - _WORD * copy.words_before,
                _address(copy.destination) - (_WORD * copy.words_before if kind.stores else 0),
                copy.source.nbytes // _WORD + copy.words_before,
                copy.rows_before,
                index if copy.name is not None else -1,
                *(_masks(copy.source.dtype) if look else (0, 0)),
                *((copy.words_before,) if kind.shifted else ()),
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
    if not kind.windows:
        table[:, 1] += np.where(table[:, 1] == 0, 0, rows * _ROW_BYTES)
    table[:, 2] = np.minimum(table[:, 2] - rows * COLUMNS, ROWS * COLUMNS)
    table[:, 3] += rows
    if kind.shifted:
        table[rows > 0, 7] = 0
    return table


@cache
def _masks(dtype: torch.dtype) -> tuple[int, int]:
    """Return the exponent bits, and the bits above them, of all numbers in a word; 0 if every value is finite."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return 0, 0
    bits = 8 * dtype.itemsize
    ones = sum(1 << shift for shift in range(0, 64, bits))
    tops = ones << (bits - 1)
    return exponent * ones, tops - (1 << 64) if tops >> 63 else tops
