# pyright: reportMissingImports=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# mypy: ignore-errors
"""The kernel of :mod:`drivetrain_weight_sync.copying.device_copies`; importing this needs Triton."""

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
    PAIRS: tl.constexpr,
):
    """Make one item of the table's copies, and add its part of Σ c·(Σ a·x + b·(x >> 32)) to its tensor's sum.

    An item's rows are shared by SHARED_BY programs, which take them in turns. With LOOK, also count in ``strange`` the
    programs that came by a number that is not finite. With WINDOWS, of each ``stride`` words of the source those from
    ``begin`` on, ``width`` of them, are stored, one after another. With PAIRS, all addresses are multiples of 16 bytes,
    and all numbers of words even: only then does a thread read two words at once.
    """
    item = table + (tl.program_id(0) // SHARED_BY) * (10 if WINDOWS else 7)
    source = tl.load(item).to(tl.pointer_type(tl.int64))
    address = tl.load(item + 1)
    destination = address.to(tl.pointer_type(tl.int64))
    words = tl.load(item + 2)
    stored = tl.where(address == 0, 0, words)
    if PAIRS:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
        words, stored = tl.multiple_of(words, 2), tl.multiple_of(stored, 2)
    first_row = tl.load(item + 3)
    index = tl.load(item + 4)
    exponents, tops = tl.load(item + 5), tl.load(item + 6)
    lowest = tops - exponents
    if WINDOWS:
        # A division of 64 bits takes several times as long; tensors of 16 GiB and more are not copied here.
        stride, begin = tl.load(item + 7).to(tl.int32), tl.load(item + 8).to(tl.int32)
        width = tl.load(item + 9).to(tl.int32)
    # In lines, so that each thread adds up what it has of a row by itself.
    columns = tl.arange(0, COLUMNS // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    of_word, of_upper = tl.load(a + columns), tl.load(b + columns)
    total = tl.zeros((LINE,), dtype=tl.int64)
    seen = tl.zeros((COLUMNS // LINE, LINE), dtype=tl.int64)
    for turn in range(ROWS // SHARED_BY):
        row = turn * SHARED_BY + tl.program_id(0) % SHARED_BY
        places = row * COLUMNS + columns
        x = tl.load(source + places, mask=places < words, other=0)
        if WINDOWS:
            position = (first_row.to(tl.int32) + row) * COLUMNS + columns
            line = position // stride
            into = position - line * stride - begin
            wanted = (into >= 0) & (into < width) & (places < stored)
            tl.store(destination + line * width + into, x, mask=wanted)
        else:
            tl.store(destination + places, x, mask=places < stored)
        # Beyond the last row there are zeros, and weights for more rows than there are.
        total += tl.sum(of_word * x + of_upper * (x >> 32), axis=0) * tl.load(c + first_row + row)
        if LOOK:
            # Of several numbers in a word: the lowest bit of the exponent carries to the top bit if all bits are 1.
            seen |= (x & exponents) + lowest
    if index >= 0:
        tl.atomic_add(sums + index, tl.sum(total))
        if LOOK:
            if tl.max(((seen & tops) != 0).to(tl.int32)) > 0:
                tl.atomic_add(strange + index, 1)
