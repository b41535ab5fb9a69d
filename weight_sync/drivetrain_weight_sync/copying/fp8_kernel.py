# pyright: reportMissingImports=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# mypy: ignore-errors
"""The Triton kernel of :mod:`drivetrain_weight_sync.copying.fp8_copies`; importing this needs Triton."""

# No "from __future__ import annotations" here: Triton reads annotations as values.

import triton
import triton.language as tl

from drivetrain_weight_sync.copying.fp8_formulas import Division

EXACT = tl.constexpr(Division.EXACT.value)
APPROXIMATE = tl.constexpr(Division.APPROXIMATE.value)
BY_APPROXIMATE_INVERSE = tl.constexpr(Division.BY_APPROXIMATE_INVERSE.value)


@triton.jit(do_not_specialize=["scale_by", "quotient_by"])
def quantise_groups(
    table,
    a,
    b,
    c,
    sums,
    largest,
    reciprocal,
    least,
    least_scale,
    zero,
    scale_by,
    quotient_by,
    GROUP_ROWS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    ONE: tl.constexpr,
    SHARED_BY: tl.constexpr,
    FINDS: tl.constexpr,
    STORES: tl.constexpr,
    FOLDS: tl.constexpr,
    PAIRS: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Quantise one item of the table to float8_e4m3fn, and add its part of the digest to its tensor's sum.

    A word is 64 bits: four bfloat16 numbers of the source. A group has GROUP_ROWS rows and GROUP_WORDS words of
    each, or whole rows if that is 0; an item's groups lie beside each other, or below each other if they are whole
    rows. SHARED_BY programs share the groups, in turns. A program holds ROWS rows and WORDS words at a time; ONE
    states that these are a whole group, which is then read only once. If FINDS and STORES are both true, a group is
    quantised in one go. Otherwise, a first launch (FINDS) leaves the largest magnitudes in the slots that a second
    one (STORES) reads. FOLDS: also digest. PAIRS: a thread can read two words at once. ``scale_by`` and
    ``quotient_by`` are the formula's divisions; DIVIDES, what each number takes of them, is compiled in.
    """
    item = table + (tl.program_id(0) // SHARED_BY) * 10
    source = tl.load(item).to(tl.pointer_type(tl.int64))
    destination = tl.load(item + 1).to(tl.pointer_type(tl.int32))
    scales = tl.load(item + 2).to(tl.pointer_type(tl.float32))
    rows, words = tl.load(item + 3), tl.load(item + 4)
    source_step, destination_step, scale_step = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    first, index = tl.load(item + 8), tl.load(item + 9)
    if PAIRS:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 8)
        words, source_step, destination_step = (
            tl.multiple_of(words, 2),
            tl.multiple_of(source_step, 2),
            tl.multiple_of(destination_step, 2),
        )
    across: tl.constexpr = GROUP_WORDS > 0
    groups = (words + GROUP_WORDS - 1) // GROUP_WORDS if across else rows
    parts = 1 if ONE else (tl.minimum(rows, GROUP_ROWS) + ROWS - 1) // ROWS if across else (words + WORDS - 1) // WORDS
    total = tl.zeros((), dtype=tl.int64)
    for group in range(tl.program_id(0) % SHARED_BY, groups, SHARED_BY):
        row = tl.arange(0, ROWS)[:, None] + (0 if across else group)
        word = tl.arange(0, WORDS)[None, :] + (group * GROUP_WORDS if across else 0)
        x = tl.zeros((ROWS, WORDS), dtype=tl.int64)
        if FINDS:
            found = tl.zeros((ROWS, WORDS), dtype=tl.float32)
            for part in range(parts):
                at_row, at_word = row + (part * ROWS if across else 0), word + (0 if across else part * WORDS)
                there = (at_row < rows) & (at_word < words)
                x = tl.load(source + at_row * source_step + at_word, mask=there, other=0)
                x0, x1, x2, x3 = _numbers(x)
                found = tl.maximum(found, tl.maximum(tl.abs(x0), tl.abs(x1)))
                found = tl.maximum(found, tl.maximum(tl.abs(x2), tl.abs(x3)))
                if FOLDS:
                    # A row of the tile lies in at most two rows of the digest.
                    begin = first + at_row * source_step + (group * GROUP_WORDS if across else part * WORDS)
                    line = begin >> 10
                    place = (begin & 1023).to(tl.int32) + tl.arange(0, WORDS)[None, :]
                    of_line = tl.load(c + line, mask=at_row < rows, other=0)
                    of_next = tl.load(c + line + 1, mask=at_row < rows, other=0)
                    column = place & 1023
                    folded = tl.load(a + column) * x + tl.load(b + column) * (x >> 32)
                    folded *= tl.where(place < 1024, of_line, of_next)
                    total += tl.sum(tl.sum(folded, axis=1), axis=0)
            most = tl.max(tl.max(found, axis=1), axis=0)
        if STORES:
            if not FINDS:
                most = tl.load(first.to(tl.pointer_type(tl.float32)))
            most = tl.maximum(most, least)
            if scale_by == EXACT:
                scale = tl.div_rn(most, tl.zeros_like(most) + largest)
            elif scale_by == APPROXIMATE:
                scale = most / largest
            else:
                scale = most * reciprocal
            scale = tl.maximum(scale, least_scale)
            if quotient_by == BY_APPROXIMATE_INVERSE:
                inverse = 1.0 / scale
            else:
                inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
            inverse = tl.where(scale == 0, 0.0, inverse)
            added = tl.where(scale == 0, zero, -0.0)  # adding -0.0 changes no number
            tl.store(scales + group * scale_step, scale)
            for part in range(parts):
                at_row, at_word = row + (part * ROWS if across else 0), word + (0 if across else part * WORDS)
                there = (at_row < rows) & (at_word < words)
                if not (ONE and FINDS):
                    x = tl.load(source + at_row * source_step + at_word, mask=there, other=0)
                x0, x1, x2, x3 = _numbers(x)
                packed = _quantised(x0, scale, inverse, added, DIVIDES)
                packed |= _quantised(x1, scale, inverse, added, DIVIDES) << 8
                packed |= _quantised(x2, scale, inverse, added, DIVIDES) << 16
                packed |= _quantised(x3, scale, inverse, added, DIVIDES) << 24
                tl.store(destination + at_row * destination_step + at_word, packed, mask=there)
        else:
            # As integers, floats that are not negative have the same order.
            tl.atomic_max(scales.to(tl.pointer_type(tl.int32), bitcast=True), most.to(tl.int32, bitcast=True))
    if FOLDS:
        if index >= 0:
            tl.atomic_add(sums + index, total)


@triton.jit
def _numbers(x):
    """Return the four numbers of each word as float32."""
    low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
    x0, x1 = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    x2, x3 = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    return x0, x1, x2, x3


@triton.jit
def _quantised(x, scale, inverse, added, DIVIDES: tl.constexpr):
    if DIVIDES == APPROXIMATE:
        y = x / scale
    elif DIVIDES == EXACT:
        # Rounded to nearest by a correction (Markstein 1990). Only this order of signs keeps that of a zero: in
        # Triton 3.6, -x is 0 - x, and so 0 for both zeros.
        y = x * inverse
        rest = tl.fma(y, tl.zeros_like(x) + scale, -x)
        y = tl.fma(rest, tl.zeros_like(x) - inverse, y)
    else:
        y = x * inverse + added
    # Nothing exceeds 448 by more than a rounding, and the conversion saturates.
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
