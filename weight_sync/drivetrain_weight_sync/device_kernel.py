# pyright: reportMissingImports=false, reportOperatorIssue=false
# mypy: ignore-errors
"""The kernel of :mod:`drivetrain_weight_sync.device_copies`; importing this needs Triton."""

# No "from __future__ import annotations" here: Triton reads annotations as values.

import triton
import triton.language as tl


@triton.jit
def copy_and_fold(table, a, b, c, sums, strange, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOOK: tl.constexpr):
    """Make one item of the table's copies, and add its part of Σ c·(Σ a·x + b·(x >> 32)) to its tensor's sum.

    With LOOK, also count in ``strange`` the programs that came by a number that is not finite.
    """
    item = table + tl.program_id(0) * 7
    source = tl.load(item).to(tl.pointer_type(tl.int64))
    address = tl.load(item + 1)
    destination = address.to(tl.pointer_type(tl.int64))
    words = tl.load(item + 2)
    stored = tl.where(address == 0, 0, words)
    first_row = tl.load(item + 3)
    index = tl.load(item + 4)
    exponents, tops = tl.load(item + 5), tl.load(item + 6)
    columns = tl.arange(0, COLUMNS)
    of_word, of_upper = tl.load(a + columns), tl.load(b + columns)
    total = tl.zeros((), dtype=tl.int64)
    seen = tl.zeros((COLUMNS,), dtype=tl.int64)
    for row in range(ROWS):
        places = row * COLUMNS + columns
        inside = places < words
        x = tl.load(source + places, mask=inside, other=0)
        tl.store(destination + places, x, mask=places < stored)
        folded = tl.sum(of_word * x + of_upper * (x >> 32))
        # Beyond the last row there are zeros, and weights for more rows than there are.
        total += folded * tl.load(c + first_row + row)
        if LOOK:
            # Of several numbers in a word: adding the bits of the exponent to those of them that are 0 reaches the
            # top bit, unless none is 0.
            seen |= ~((~x & exponents) + exponents) & tops
    if index >= 0:
        tl.atomic_add(sums + index, total)
        if LOOK:
            if tl.max((seen != 0).to(tl.int32)) > 0:
                tl.atomic_add(strange + index, 1)
