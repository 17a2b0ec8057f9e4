"""Triton kernels for 8-bit operands: the arithmetic of docs/precision.md. Launch with enable_fp_fusion=False."""

# Triton's conventions: constants are upper case, and every branch of a compile-time choice returns.
# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(7.888609052210118e-31)  # 2^-100


@triton.jit(do_not_specialize=["base"])
def quantize_rows(values, codes, scales, factor, calls, base: tl.int64, columns, padded,
                  OPERAND: tl.constexpr, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr,
                  FACTOR: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """One program per row of CHUNKS · BLOCK values: its largest magnitude, then its codes. One chunk is read once."""
    row = tl.program_id(0).to(tl.int64)
    values += row * columns
    codes += row * padded
    i = tl.arange(0, BLOCK)
    pair = tl.arange(0, BLOCK // 2)
    key = _row_key(calls, base, row, OPERAND)
    if CHUNKS == 1:
        x = _loaded(values, factor, i, columns, FACTOR)
        inverse, scale = _inverse_and_scale(tl.max(_size_bits(x), 0), FORMAT)
        even, odd = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
        even, odd = _codes(even * inverse, odd * inverse, key, pair, FORMAT, STOCHASTIC)
        tl.store(codes + i, tl.reshape(tl.join(even, odd), [BLOCK]), mask=i < padded)
    else:
        most = tl.zeros([BLOCK], tl.int32)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + i
            most = tl.maximum(most, _size_bits(_loaded(values, factor, at, columns, FACTOR)))
        inverse, scale = _inverse_and_scale(tl.max(most, 0), FORMAT)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + i
            x = _loaded(values, factor, at, columns, FACTOR)
            even, odd = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
            at_pair = chunk * (BLOCK // 2) + pair
            even, odd = _codes(even * inverse, odd * inverse, key, at_pair, FORMAT, STOCHASTIC)
            tl.store(codes + at, tl.reshape(tl.join(even, odd), [BLOCK]), mask=at < padded)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["base"])
def find_largest(values, largest, keys, calls, base: tl.int64, numel, rows, OPERAND: tl.constexpr,
           STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Raise `largest` (the bits of an fp32, initially 0) to the largest magnitude; Inf and NaN are largest.

    With stochastic rounding also write the key of each row, ROWS of them per program.
    """
    if STOCHASTIC:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        key = _row_key(calls, base, row, OPERAND)
        tl.store(keys + row, key.to(tl.int64, bitcast=True), mask=row < rows)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    while start < numel:
        # Compare in 32 bits: 64 would cost registers for every element.
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        x = tl.load(values + start + i, mask=i < left, other=0.0).to(tl.float32)
        most = tl.maximum(most, _size_bits(x))
        start += step
    tl.atomic_max(largest, tl.max(most, 0))


@triton.jit(do_not_specialize=["base"])
def find_largest_of_columns(values, factor, largest, keys, totals, calls, base: tl.int64, rows, columns,
                            OPERAND: tl.constexpr, STOCHASTIC: tl.constexpr, FACTOR: tl.constexpr,
                            WHOLE: tl.constexpr, TOTALS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                            CHUNKS: tl.constexpr):  # fmt: skip
    """Raise `largest` of BN columns as `find_largest` does, from CHUNKS · BM rows; a FACTOR multiplies each row.

    With WHOLE there is one `largest` for all columns. With TOTALS also write the sums of these rows, without the
    factor, as one row of `totals`: the same rows are added in the same order each time.
    """
    top = tl.program_id(1).to(tl.int64) * (CHUNKS * BM)
    left = tl.program_id(0) * BN
    i = tl.arange(0, BM)
    j = tl.arange(0, BN)[None, :]
    most = tl.zeros([BM, BN], tl.int32)
    total = tl.zeros([BM, BN], tl.float32)
    for _ in range(CHUNKS):
        at = top + i
        if STOCHASTIC:  # noqa: SIM102 (only what is known when compiling may be left out)
            if left == 0:
                key = _row_key(calls, base, at, OPERAND)
                tl.store(keys + at, key.to(tl.int64, bitcast=True), mask=at < rows)
        inside = (at[:, None] < rows) & (left + j < columns)
        x = tl.load(values + (top * columns + left) + (i[:, None] * columns + j), mask=inside, other=0.0)
        x = x.to(tl.float32)
        if TOTALS:
            total += x
        if FACTOR:
            x *= tl.load(factor + at, mask=at < rows, other=0.0)[:, None]
        most = tl.maximum(most, _size_bits(x))
        top += BM
    j = left + tl.arange(0, BN)
    if TOTALS:
        tl.store(totals + tl.program_id(1).to(tl.int64) * columns + j, tl.sum(total, 0), mask=j < columns)
    if WHOLE:
        tl.atomic_max(largest, tl.max(tl.max(most, 0), 0))
    else:
        tl.atomic_max(largest + j, tl.max(most, 0), mask=j < columns)


@triton.jit
def quantize_tiles(values, factor, largest, keys, codes, transposed, scales, rows, columns, padded_rows,
                   padded_columns, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, FACTOR: tl.constexpr,
                   BY_COLUMN: tl.constexpr, DIRECT: tl.constexpr, TRANSPOSED: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """Codes in the order of the values (DIRECT), and transposed (TRANSPOSED).

    There is one scale for each column (BY_COLUMN), or one for the whole matrix. A FACTOR multiplies each row.
    Begins with the last rows: they were read last, when the largest was searched, and may still be in the cache.
    """
    tiles = tl.cdiv(padded_columns, BN)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    top = (program // tiles).to(tl.int64) * BM
    left = (program % tiles) * BN
    # Offsets inside the tile take 32 bits, the tile's corner 64.
    i = tl.arange(0, BM)[:, None]
    j = tl.arange(0, BN)[None, :]
    inside = (top + i < rows) & (left + j < columns)
    x = tl.load(values + (top * columns + left) + (i * columns + j), mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, [BM, BN // 2, 2]))
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    if FACTOR:
        row_factor = tl.load(factor + top + i, mask=top + i < rows, other=0.0)
        even, odd = even * row_factor, odd * row_factor
    pair = left // 2 + tl.arange(0, BN // 2)[None, :]
    if BY_COLUMN:
        inverse, scale = _inverse_and_scale(
            tl.load(largest + 2 * pair, mask=2 * pair < columns, other=0), FORMAT
        )
        even *= inverse
        tl.store(scales + 2 * pair, scale, mask=(2 * pair < columns) & (top == 0))
        second = 2 * pair + 1
        inverse, scale = _inverse_and_scale(tl.load(largest + second, mask=second < columns, other=0), FORMAT)
        odd *= inverse
        tl.store(scales + second, scale, mask=(second < columns) & (top == 0))
    else:
        inverse, scale = _inverse_and_scale(tl.load(largest), FORMAT)
        even, odd = even * inverse, odd * inverse
        if program == 0:
            tl.store(scales, scale)
    key = tl.load(keys + top + i, mask=(top + i < rows) & STOCHASTIC, other=0).to(tl.uint64, bitcast=True)
    even, odd = _codes(even, odd, key, pair, FORMAT, STOCHASTIC)
    code = tl.reshape(tl.join(even, odd), [BM, BN])
    room = (top + i < padded_rows) & (left + j < padded_columns)
    if DIRECT:
        tl.store(codes + (top * padded_columns + left) + (i * padded_columns + j), code, mask=room)
    if TRANSPOSED:
        at = transposed + (left.to(tl.int64) * padded_rows + top) + (tl.trans(j) * padded_rows + tl.trans(i))
        tl.store(at, tl.trans(code), mask=tl.trans(room))


@triton.jit
def _loaded(values, factor, i, columns, FACTOR: tl.constexpr):
    x = tl.load(values + i, mask=i < columns, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor + i, mask=i < columns, other=0.0)
    return x


@triton.jit
def _size_bits(x):
    """The bits of |x|: as integers they have the order of the numbers, with Inf and then NaN at the top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _inverse_and_scale(bits, FORMAT: tl.constexpr):
    """The factor to multiply by (0: every code is 0) and the scale that reverses it (NaN: not finite)."""
    largest = bits.to(tl.float32, bitcast=True)
    top: tl.constexpr = 127.0 if FORMAT == 0 else (448.0 if FORMAT == 1 else 57344.0)
    some = (largest >= _LEAST) & (bits < 0x7F800000)
    inverse = tl.where(some, tl.math.div_rn(top, tl.where(some, largest, 1.0)), 0.0)
    scale = tl.where(some, largest * (1.0 / top), 0.0)
    return inverse, tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _codes(even, odd, key, pair, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes, as bytes, of scaled elements 2 · pair and 2 · pair + 1, which share one random number."""
    if STOCHASTIC:
        drawn = _uniform32(key, pair)
        return _code(even, drawn & 0xFFFF, FORMAT, True), _code(odd, drawn >> 16, FORMAT, True)
    else:
        return _code(even, 0, FORMAT, False), _code(odd, 0, FORMAT, False)


@triton.jit
def _code(v, u, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code of a scaled value. For NaN the code does not matter: its scale is NaN."""
    if FORMAT == 0:
        if STOCHASTIC:
            # 1 + (u + ½) · 2^-16 from its bits: converting an integer would take several operations.
            v += ((u << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.0
        else:
            v += 0.5
        return tl.minimum(tl.maximum(tl.floor(v), -127.0), 127.0).to(tl.int8)
    elif FORMAT == 1:
        return _fp8(v, u, 3, -6, 0x7E, STOCHASTIC)
    else:
        return _fp8(v, u, 2, -14, 0x7B, STOCHASTIC)


@triton.jit
def _fp8(v, u, MANTISSA: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The bits of v rounded to MANTISSA bits, or below 2^LEAST to a multiple of the step there; at most TOP.

    Integer arithmetic: the fp32's bits above the dropped ones, minus the difference of the exponents' biases.
    """
    bits = v.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - MANTISSA
    offset: tl.constexpr = (127 + LEAST - 1) << MANTISSA
    small = size < ((127 + LEAST) << 23)
    if STOCHASTIC:
        # With 2^LEAST added, a small number has the bits of a normal one, one exponent higher.
        lifted = size.to(tl.float32, bitcast=True) + (2.0**LEAST)
        lifted = tl.where(small, lifted.to(tl.uint32, bitcast=True) - (1 << 23), size)
        # The 16 random bits and half of their unit, at the top of the bits to be dropped.
        code = ((lifted + (((u << 1) | 1) << (dropped - 17))) >> dropped) - offset
    else:
        # Adding a number whose last bit is the step rounds to a multiple of the step.
        magic: tl.constexpr = 2.0 ** (LEAST + dropped)
        lifted = (size.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True)
        normal = ((size + ((1 << (dropped - 1)) - 1) + ((size >> dropped) & 1)) >> dropped) - offset
        code = tl.where(small, lifted - ((127 + LEAST + dropped) << 23), normal)
    return (tl.minimum(code, TOP) | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def _uniform32(key, pair):
    """The 16 bits of `trimtab-lb32` of elements 2 · pair (low half) and 2 · pair + 1 (high half)."""
    x = pair.to(tl.uint32) + key.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= (key >> 32).to(tl.uint32)
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _row_key(calls, base, row, OPERAND: tl.constexpr):
    key = _absorb(base.to(tl.uint64), tl.load(calls).to(tl.uint64))
    key = _absorb(key, tl.full([], OPERAND, tl.uint64))
    return _absorb(key, row.to(tl.uint64))


@triton.jit
def _absorb(h, v):
    z = (h ^ v) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
