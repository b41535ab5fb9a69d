"""The digest detects every change of bits, positions, length and dtype, wherever the tensor lies."""

from __future__ import annotations

import threading
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_weight_sync import digest, digests
from drivetrain_weight_sync.copying.digest import fold_on_device, pseudo_random
from drivetrain_weight_sync.tensors.finite import non_finite

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]


def words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, generator=generator)


def by_the_formula(tensor: torch.Tensor) -> int:
    """Compute the formula of the module's docstring in Python's own integers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    rows = -(-len(raw) // 8192)
    raw_padded = raw.ljust(rows * 8192, b"\0")
    a, b = pseudo_random(1, 1024).tolist(), pseudo_random(2, 1024).tolist()
    c = pseudo_random(3, 1024).tolist()
    total = 0
    for row in range(rows):
        x = [
            int.from_bytes(raw_padded[i : i + 8], "little", signed=True)
            for i in range(row * 8192, row * 8192 + 8192, 8)
        ]
        total += c[row] * sum(a[i] * x[i] + b[i] * (x[i] >> 32) for i in range(1024))
    total += len(raw) * 0x9E3779B97F4A7C15
    total += zlib.crc32(str(tensor.dtype).removeprefix("torch.").encode()) * 0xC2B2AE3D27D4EB4F
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1023, 1024, 1025, 5000, 40_000, 65_536, 67_583, 67_584, 70_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_it_is_the_formula(count: int, dtype: torch.dtype) -> None:
    tensor = words(count // 8 + 1).view(dtype)[:count]
    assert digest(tensor) == by_the_formula(tensor)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tensors_of_all_sizes_have_the_digests_that_each_has_alone(threads: int) -> None:
    sizes = [*range(0, 9000, 1), 8191, 8192, 8193, 262_143, 262_144, 270_336, 270_337, 3_000_000]
    source = words(400_000).view(torch.uint8)
    tensors = {str(index): source[index : index + size] for index, size in enumerate(sizes)}
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = digests(tensors)
    finally:
        torch.set_num_threads(kept)
    chosen = [*range(0, 9000, 97), *range(9000, len(sizes))]
    assert {str(index): digest(tensors[str(index)]) for index in chosen} == {
        str(index): found[str(index)] for index in chosen
    }
    assert list(found) == list(tensors)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20_000), st.data())
def test_one_flipped_bit_is_always_seen(count: int, data: st.DataObject) -> None:
    raw = words(count // 8 + 1).view(torch.uint8)[:count].clone()
    before = digest(raw)
    raw[data.draw(st.integers(0, count - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(raw) != before


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 20_000), st.data())
def test_two_flipped_bits_are_seen(count: int, data: st.DataObject) -> None:
    raw = words(count // 8 + 1).view(torch.uint8)[:count].clone()
    before = digest(raw)
    first = data.draw(st.integers(0, count - 2))
    raw[first] ^= 128
    raw[data.draw(st.integers(first + 1, count - 1))] ^= 128
    assert digest(raw) != before


def test_two_flipped_signs_in_the_upper_halves_of_words_are_seen() -> None:
    values = words(2048)
    before = digest(values)
    values[5] ^= -(2**63)
    values[900] ^= -(2**63)
    assert digest(values) != before


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32, torch.int8]), st.data())
def test_two_exchanged_elements_are_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = words(4000).view(dtype).clone()
    one = data.draw(st.integers(0, len(tensor) - 1))
    other = data.draw(st.integers(0, len(tensor) - 1))
    before = digest(tensor)
    raw = tensor.view(torch.uint8).view(len(tensor), -1)
    changed = not torch.equal(raw[one], raw[other])
    raw[[one, other]] = raw[[other, one]]
    assert (digest(tensor) != before) == changed


@pytest.mark.parametrize("size", [8, 1024, 8192, 262_144])
def test_two_exchanged_chunks_are_seen(size: int) -> None:
    raw = words(1 << 17).view(torch.uint8)
    exchanged = torch.cat([raw[size : 2 * size], raw[:size], raw[2 * size :]])
    assert digest(exchanged) != digest(raw)


def test_a_permutation_of_rows_is_seen() -> None:
    rows = words(64 * 1024).view(64, 1024)
    assert digest(rows.flip(0)) != digest(rows)
    assert digest(rows.flip(1)) != digest(rows)


def test_length_and_dtype_are_seen_where_the_bits_are_alike() -> None:
    zeros = {f"{n} {dtype}": digest(torch.zeros(n, dtype=dtype)) for n in range(10) for dtype in DTYPES}
    assert len(set(zeros.values())) == len(zeros)


def test_minus_zero_and_different_nans_are_seen() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nans[:1]) != digest(nans[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_offsets_do_not_matter(dtype: torch.dtype) -> None:
    base = torch.randint(0, 2, (37, 53)).to(dtype)
    assert digest(base.t()) == digest(base.t().contiguous())
    shifted = torch.cat([torch.ones(3, dtype=dtype), base.reshape(-1)])[3:]
    assert digest(shifted) == digest(base.reshape(-1))
    assert digest(base[0, 0]) == digest(base[0, 0].clone())


@pytest.mark.parametrize("rows", [1, 31, 33, 5000])
def test_the_way_for_gpus_gives_the_same_sums(rows: int) -> None:
    x = words(rows * 1024, seed=rows).view(rows, 1024)
    a, b = pseudo_random(1, 1024), pseudo_random(2, 1024)
    out = torch.empty(rows, dtype=torch.int64)
    fold_on_device(x, a, b, out)
    assert torch.equal(out, (a * x + b * (x >> 32)).sum(1))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    named = {f"t{i}": words(300_000, seed=i).view(torch.bfloat16) for i in range(8)}
    assert sum(tensor.nbytes for tensor in named.values()) > 8 << 20
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = threading.active_count()
        assert digests(named) == {name: digest(tensor) for name, tensor in named.items()}
        assert threading.active_count() == threads
    finally:
        torch.set_num_threads(before)
    assert digests({}) == {}


@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_values_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    fine = torch.ones(5000).to(dtype)
    nan = fine.clone()
    nan[4321] = float("nan")
    named = {"fine": fine, "nan": nan, "empty": fine[:0], "0-dim": nan[4321]}
    expected = {"nan": "NaN", "0-dim": "NaN"}
    if dtype is not torch.float8_e4m3fn:  # it has no infinity
        infinite = fine.clone()
        infinite[17] = float("-inf")
        named["inf"] = infinite
        expected["inf"] = "infinite"
    assert non_finite(named) == expected


def test_large_but_finite_values_are_fine() -> None:
    largest = torch.full((100_000,), torch.finfo(torch.float32).max)
    assert non_finite({"large": largest, "int": torch.arange(5), "bool": torch.ones(3, dtype=torch.bool)}) == {}
