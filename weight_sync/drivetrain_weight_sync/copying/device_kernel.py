# pyright: reportMissingImports=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# mypy: ignore-errors
"""The Triton kernel of :mod:`drivetrain_weight_sync.copying.device_copies`; importing this needs Triton."""

# No "from __future__ import annotations" here: Triton reads annotations as values.

import triton
import triton.language as tl


@triton.jit
def copy_and_fold(
    table,
    a,
    b,
    c,
    sums,
    strange,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    LOOK: tl.constexpr,
    WINDOWS: tl.constexpr,
    SHIFTED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Copy one item of the table, and add its part of Σ c·(Σ a·x + b·(x >> 32)) to its tensor's sum.

    SHARED_BY programs share an item's rows, in turns. With LOOK, ``strange`` counts the programs that met a NaN or an
    infinity. With WINDOWS, of every ``stride`` words of the source only the ``width`` words from ``begin`` on are
    stored, densely. With SHIFTED, the first words of an item may be another part's and are passed over. PAIRS states
    that all addresses are multiples of 16 bytes and all word counts even, so that a thread can read two words at once.
    """
    item = table + (tl.program_id(0) // SHARED_BY) * (10 if WINDOWS else 8 if SHIFTED else 7)
    source = tl.load(item).to(tl.pointer_type(tl.int64))
    address = tl.load(item + 1)
    destination = address.to(tl.pointer_type(tl.int64))
    words = tl.load(item + 2)
    stored = tl.where(address == 0, 0, words)
    if PAIRS:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
        words, stored = tl.multiple_of(words, 2), tl.multiple_of(stored, 2)
    if SHIFTED:
        skipped = tl.load(item + 7)
        if PAIRS:
            skipped = tl.multiple_of(skipped, 2)
    first_row = tl.load(item + 3)
    index = tl.load(item + 4)
    exponents, tops = tl.load(item + 5), tl.load(item + 6)
    lowest = tops - exponents
    if WINDOWS:
        # A 64-bit division takes several times as long; windows of tensors from 16 GiB on are not copied here.
        stride, begin = tl.load(item + 7).to(tl.int32), tl.load(item + 8).to(tl.int32)
        width = tl.load(item + 9).to(tl.int32)
    # In lines, so that each thread sums its words of a row by itself.
    columns = tl.arange(0, COLUMNS // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    of_word, of_upper = tl.load(a + columns), tl.load(b + columns)
    total = tl.zeros((LINE,), dtype=tl.int64)
    seen = tl.zeros((COLUMNS // LINE, LINE), dtype=tl.int64)
    for turn in range(ROWS // SHARED_BY):
        row = turn * SHARED_BY + tl.program_id(0) % SHARED_BY
        places = row * COLUMNS + columns
        if SHIFTED:
            x = tl.load(source + places, mask=(places >= skipped) & (places < words), other=0)
        else:
            x = tl.load(source + places, mask=places < words, other=0)
        if WINDOWS:
            position = (first_row.to(tl.int32) + row) * COLUMNS + columns
            line = position // stride
            into = position - line * stride - begin
            wanted = (into >= 0) & (into < width) & (places < stored)
            tl.store(destination + line * width + into, x, mask=wanted)
        elif SHIFTED:
            tl.store(destination + places, x, mask=(places >= skipped) & (places < stored))
        else:
            tl.store(destination + places, x, mask=places < stored)
        # The weights extend beyond the last row, where all words are zero.
        total += tl.sum(of_word * x + of_upper * (x >> 32), axis=0) * tl.load(c + first_row + row)
        if LOOK:
            # For each number in a word: if all exponent bits are 1, adding its lowest one carries into the top bit.
            seen |= (x & exponents) + lowest
    if index >= 0:
        tl.atomic_add(sums + index, tl.sum(total))
        if LOOK:
            if tl.max(((seen & tops) != 0).to(tl.int32)) > 0:
                tl.atomic_add(strange + index, 1)
