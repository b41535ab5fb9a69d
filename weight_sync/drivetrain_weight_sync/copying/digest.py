"""A position-dependent digest of a tensor's raw bits, computed on the tensor's device.

The bits are read as rows of 1024 signed 64-bit words ``x``, the last row padded with zeros. With fixed odd
pseudo-random weights ``a``, ``b`` (one pair per column) and ``c`` (one per row), modulo 2**64::

    row    = Σ a·x + b·(x >> 32)
    digest = Σ c·row + K1·nbytes + K2·crc32(dtype)

Any single changed bit changes the digest. A permutation of elements, words or rows goes unnoticed with a probability of
about 2**-31. The second term is needed because the first cannot see two sign flips in upper halves of words: odd
weights times 2**63 cancel.

Integer arithmetic makes a CPU and a GPU agree on every bit, in any order of additions.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain_weight_sync.tensors.dtypes import dtype_name

COLUMNS: Final = 1024
"""Words of 64 bits in a row."""
_ROW_BYTES: Final = 8 * COLUMNS
_CPU_ROWS: Final = 64
"""Rows folded at a time, few enough that intermediate results stay in a core's cache."""
_DEVICE_ROWS: Final = (1 << 22) // COLUMNS
_POOL_ROWS: Final = 1024
_SMALL_ROWS: Final = 32
"""Most rows of a tensor that is copied beside others rather than folded in place."""
_PART_ROWS: Final = 1024
_GROUP_ROWS: Final = 2048
_MASK: Final = (1 << 64) - 1
_LENGTH_FACTOR: Final = 0x9E3779B97F4A7C15
_DTYPE_FACTOR: Final = 0xC2B2AE3D27D4EB4F


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of ``tensor`` (any dtype, shape and device) as a signed 64-bit integer.

    It covers the bits in row-major order, their number and the dtype, but not the shape. A non-contiguous tensor is
    copied first.
    """
    return digests({"": tensor})[""]


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return :func:`digest` of each tensor by name, with several threads on a CPU and few synchronisations on a GPU."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():
        for group in _groups(names, tensors):
            sums = _weighted_sums([tensors[name] for name in group]).tolist()
            found.update((name, finished(value, tensors[name])) for name, value in zip(group, sums, strict=True))
    return {name: found[name] for name in tensors}


def part_sum(tensor: torch.Tensor, begin: int) -> int:
    """Return what a part adds to Σ c·row of the tensor in which it lies, from byte ``begin`` of its row-major bits on.

    The sums of parts that cover a tensor make, with :func:`finished`, its digest, wherever it is cut: the sum is linear
    in bits that do not overlap.
    """
    device = tensor.device
    fold = _fold_on_cpu if device.type == "cpu" else fold_on_device
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    row, before = divmod(begin, _ROW_BYTES)
    weights, total = weights_on(device), torch.zeros((), dtype=torch.int64, device=device)
    taken = 0
    while taken < len(raw):
        some = raw[taken : taken + _DEVICE_ROWS * _ROW_BYTES - before]
        rows = -(-(before + len(some)) // _ROW_BYTES)
        padded = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, device=device)
        padded[before : before + len(some)] = some
        folded = torch.empty(rows, dtype=torch.int64, device=device)
        fold(padded.view(torch.int64).view(rows, COLUMNS), weights.a, weights.b, folded)
        total += (folded * weights.per_row(row + rows)[row:]).sum()
        row, before, taken = row + rows, 0, taken + len(some)
    return int(total)


def _groups(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Cut names into groups that take a bounded amount of memory when folded together."""
    group: list[str] = []
    rows = 0
    for name in names:
        group.append(name)
        whole = tensors[name].nbytes // _ROW_BYTES
        rows += 1 + (whole if whole <= _SMALL_ROWS else 0)
        if rows >= _GROUP_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def finished(weighted_sum: int, tensor: torch.Tensor) -> int:
    """Return the digest of a tensor whose Σ c·row is ``weighted_sum``."""
    return _signed(weighted_sum + tensor.nbytes * _LENGTH_FACTOR + _of_dtype(tensor.dtype))


@cache
def _of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(dtype_name(dtype).encode()) * _DTYPE_FACTOR


@torch.no_grad()
def _weighted_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return Σ c·row of each tensor, int64 ``[len(tensors)]``; all tensors are on one device."""
    device = tensors[0].device
    fold = _fold_on_cpu if device.type == "cpu" else fold_on_device
    whole_rows = [tensor.nbytes // _ROW_BYTES for tensor in tensors]
    weights = weights_on(device)
    c = weights.per_row(max(whole_rows) + 1)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    # Whole rows of large tensors are folded in place. Their remainders, and small tensors, of which most models have
    # many, are copied into one buffer and folded together.
    in_place = [count if count > _SMALL_ROWS else 0 for count in whole_rows]
    counts = [whole + 1 - before for whole, before in zip(whole_rows, in_place, strict=True)]
    begins = list(itertools.accumulate(counts, initial=0))
    together = torch.zeros(begins[-1], _ROW_BYTES, dtype=torch.uint8, device=device)
    flat = together.view(-1)

    @torch.no_grad()  # grad mode is per thread
    def take(index: int) -> None:
        raw, count, begin = _raw(tensors[index]), in_place[index], begins[index] * _ROW_BYTES
        rest = raw[count * _ROW_BYTES :]
        flat[begin : begin + len(rest)] = rest
        if count:
            rows = torch.empty(count, dtype=torch.int64, device=device)
            fold(raw[: count * _ROW_BYTES].view(torch.int64).view(count, COLUMNS), weights.a, weights.b, rows)
            torch.sum(rows * c[:count], 0, out=sums[index])

    folded = torch.empty(len(together), dtype=torch.int64, device=device)
    words = together.view(torch.int64)

    @torch.no_grad()
    def fold_together(part: int) -> None:
        own = slice(part * _PART_ROWS, (part + 1) * _PART_ROWS)
        fold(words[own], weights.a, weights.b, folded[own])

    large = [index for index, count in enumerate(in_place) if count]
    for index, count in enumerate(in_place):
        if not count:
            take(index)  # here threads would mostly wait for each other
    parts = range(-(-len(together) // _PART_ROWS))
    threads = min(torch.get_num_threads(), len(large) + len(parts)) if device.type == "cpu" else 1
    if threads > 1 and sum(in_place) + len(together) >= _POOL_ROWS:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(take, large))
            list(pool.map(fold_together, parts))
    else:
        for index in large:
            take(index)
        for part in parts:
            fold_together(part)
    size = torch.tensor(counts, device=device)
    owner = torch.repeat_interleave(torch.arange(len(tensors), device=device), size)
    begin_of = torch.tensor(begins[:-1], device=device) - torch.tensor(in_place, device=device)
    row = torch.arange(len(together), device=device) - begin_of[owner]
    return sums.index_add_(0, owner, folded * c[row])


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # 64-bit words must be aligned to 8 bytes
    return flat.view(torch.uint8)


def _fold_on_cpu(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    # numpy sums integer products two to three times as fast as torch.
    values, of_word, of_upper, sums = _array_over(words), a.numpy(), b.numpy(), out.numpy()
    upper = np.empty((min(_CPU_ROWS, len(values)), COLUMNS), dtype=np.int64)
    part = np.empty(len(upper), dtype=np.int64)
    for begin in range(0, len(values), _CPU_ROWS):
        block, folded = values[begin : begin + _CPU_ROWS], sums[begin : begin + _CPU_ROWS]
        n = len(block)
        np.einsum("ij,j->i", block, of_word, out=folded)
        np.right_shift(block, 32, out=upper[:n])
        np.einsum("ij,j->i", upper[:n], of_upper, out=part[:n])
        folded += part[:n]


def _array_over(words: torch.Tensor) -> NDArray[np.int64]:
    """Return an array over the memory of a tensor, which must outlive the array.

    ``tensor.numpy()`` would pin the storage, so that an engine could no longer free the memory of its weights.
    """
    memory = (ctypes.c_int64 * words.numel()).from_address(words.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(words.shape)


def fold_on_device(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write Σ a·x + b·(x >> 32) of each row to ``out``; torch has no integer matrix product on GPUs.

    Args:
        words: int64 ``[rows, 1024]``.
        a: int64 ``[1024]``.
        b: int64 ``[1024]``.
        out: int64 ``[rows]``.
    """
    # The upper half of a little-endian word, as a signed 32-bit integer, is the word shifted right by 32.
    upper = words.view(torch.int32).view(-1, COLUMNS, 2)[..., 1]
    for block, block_upper, block_out in zip(
        torch.split(words, _DEVICE_ROWS), torch.split(upper, _DEVICE_ROWS), torch.split(out, _DEVICE_ROWS), strict=True
    ):
        product = torch.mul(block_upper, b).addcmul_(block, a)
        torch.sum(product, 1, out=block_out)


class _Weights:
    """The factors of the digest's weighted sum, on one device; those of rows grow with the largest tensor seen."""

    def __init__(self, device: torch.device) -> None:
        self.a = pseudo_random(1, COLUMNS).to(device)
        self.b = pseudo_random(2, COLUMNS).to(device)
        self._c = pseudo_random(3, 1024).to(device)

    def per_row(self, count: int) -> torch.Tensor:
        """Return ``c`` for ``count`` rows."""
        c = self._c
        if len(c) < count:
            c = self._c = pseudo_random(3, 1 << (count - 1).bit_length()).to(c.device)
        return c[:count]


_weights: dict[torch.device, _Weights] = {}
_weights_lock = threading.Lock()


def weights_on(device: torch.device) -> _Weights:
    """Return the digest's weights on a device; made once per device."""
    with _weights_lock:
        if device not in _weights:
            _weights[device] = _Weights(device)
        return _weights[device]


def pseudo_random(stream: int, count: int) -> torch.Tensor:
    """Return ``count`` odd int64 from SplitMix64 (Steele, Lea, Flood 2014), seeded by ``stream``."""
    z = torch.arange(1, count + 1, dtype=torch.int64) * _signed(_LENGTH_FACTOR) + _signed(stream << 56)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _logical_shift(z, shift)) * _signed(factor)
    return (z ^ _logical_shift(z, 31)) | 1


def _logical_shift(z: torch.Tensor, shift: int) -> torch.Tensor:
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
