"""8-bit operands on a GPU: the arithmetic of docs/precision.md. Launch with enable_fp_fusion=False."""

# Constants are upper case, as Triton has them, and every branch of a compile-time choice returns.
# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

INT8 = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)

_LEAST = tl.constexpr(7.888609052210118e-31)  # 2^-100


@triton.jit(do_not_specialize=["base"])
def quantise_rows(
    values,
    codes,
    scales,
    factor,
    calls,
    base: tl.int64,
    columns,
    padded,
    OPERAND: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program a row of CHUNKS · BLOCK: its largest magnitude, then its codes. One chunk is read once."""
    row = tl.program_id(0).to(tl.int64)
    values += row * columns
    codes += row * padded
    i = tl.arange(0, BLOCK)
    key = _row_key(calls, base, row, OPERAND)
    if CHUNKS == 1:
        x = _loaded(values, factor, i, columns, FACTOR)
        inverse, scale = _inverse_and_scale(tl.max(_size_bits(x), 0), FORMAT)
        tl.store(codes + i, _code(x, inverse, key, i, FORMAT, STOCHASTIC), mask=i < padded)
    else:
        most = tl.zeros([BLOCK], tl.int32)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + i
            most = tl.maximum(most, _size_bits(_loaded(values, factor, at, columns, FACTOR)))
        inverse, scale = _inverse_and_scale(tl.max(most, 0), FORMAT)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + i
            x = _loaded(values, factor, at, columns, FACTOR)
            tl.store(codes + at, _code(x, inverse, key, at, FORMAT, STOCHASTIC), mask=at < padded)
    tl.store(scales + row, scale)


@triton.jit
def magnitude(values, largest, numel, BLOCK: tl.constexpr):
    """Raise `largest` (the bits of an fp32, 0 before) to the largest magnitude; Inf and NaN are above all."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    while start < numel:
        # Compared in 32 bits: 64 would cost registers for every element.
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        x = tl.load(values + start + i, mask=i < left, other=0.0).to(tl.float32)
        most = tl.maximum(most, _size_bits(x))
        start += step
    tl.atomic_max(largest, tl.max(most, 0))


@triton.jit(do_not_specialize=["base"])
def quantise_tiles(
    values,
    largest,
    codes,
    turned,
    scales,
    calls,
    base: tl.int64,
    rows,
    columns,
    padded_rows,
    padded_columns,
    OPERAND: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """With one scale for all: codes as the values lie (STRAIGHT), and the transposed (TURNED)."""
    tiles = tl.cdiv(padded_columns, BN)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    column = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(values + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse, scale = _inverse_and_scale(tl.load(largest), FORMAT)
    key = _row_key(calls, base, row, OPERAND)
    code = _code(x, inverse, key, column, FORMAT, STOCHASTIC)
    room = (row < padded_rows) & (column < padded_columns)
    if STRAIGHT:
        tl.store(codes + row * padded_columns + column, code, mask=room)
    if TURNED:
        at = turned + tl.trans(column).to(tl.int64) * padded_rows + tl.trans(row)
        tl.store(at, tl.trans(code), mask=tl.trans(room))
    if tl.program_id(0) == 0:
        tl.store(scales, scale)


@triton.jit
def dequantise(sums, out, row_scale, column_scale, bias, columns, stride, ROW: tl.constexpr,
               COLUMN: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program a stretch of a row: sum · (row scale · column scale) + bias."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < columns
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if ROW:
        scale *= tl.load(row_scale + row)
    if COLUMN:
        scale *= tl.load(column_scale + i, mask=inside, other=0.0)
    value = tl.load(sums + row * stride + i, mask=inside, other=0).to(tl.float32) * scale
    if BIAS:
        value += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _loaded(values, factor, i, columns, FACTOR: tl.constexpr):
    x = tl.load(values + i, mask=i < columns, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor + i, mask=i < columns, other=0.0)
    return x


@triton.jit
def _size_bits(x):
    """The bits of |x|: as integers they order like the numbers, with Inf and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _inverse_and_scale(bits, FORMAT: tl.constexpr):
    """What to multiply by (0: every code is 0) and the scale that undoes it (NaN: not finite)."""
    largest = bits.to(tl.float32, bitcast=True)
    top: tl.constexpr = 127.0 if FORMAT == 0 else (448.0 if FORMAT == 1 else 57344.0)
    some = (largest >= _LEAST) & (bits < 0x7F800000)
    inverse = tl.where(some, tl.math.div_rn(top, tl.where(some, largest, 1.0)), 0.0)
    scale = tl.where(some, largest * (1.0 / top), 0.0)
    return inverse, tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _code(x, inverse, key, i, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    v = tl.where(inverse == 0.0, 0.0, x * inverse)
    if FORMAT == 0:
        if STOCHASTIC:
            v += _uniform16(key, i).to(tl.float32) * 1.52587890625e-05 + 7.62939453125e-06
        else:
            v += 0.5
        return tl.minimum(tl.maximum(tl.floor(v), -127.0), 127.0).to(tl.int8)
    elif FORMAT == 1:
        if STOCHASTIC:
            v = _stochastic(v, _uniform16(key, i), 3, -6)
        return tl.minimum(tl.maximum(v, -448.0), 448.0).to(tl.float8e4nv)
    else:
        if STOCHASTIC:
            v = _stochastic(v, _uniform16(key, i), 2, -14)
        return tl.minimum(tl.maximum(v, -57344.0), 57344.0).to(tl.float8e5)


@triton.jit
def _stochastic(v, u, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """v rounded at random to a neighbour with MANTISSA bits, or below 2^LEAST to a multiple of the step there."""
    bits = v.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    size = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - MANTISSA
    # The 16 random bits and a half of their unit, at the top of the bits to be dropped.
    noise = ((u << 1) | 1) << (dropped - 17)
    normal = ((size + noise) >> dropped) << dropped
    step: tl.constexpr = 2.0 ** (LEAST - MANTISSA)
    units = size.to(tl.float32, bitcast=True) * (1.0 / step)
    small = tl.floor(units + u.to(tl.float32) * 1.52587890625e-05 + 7.62939453125e-06) * step
    least_bits: tl.constexpr = (127 + LEAST) << 23
    rounded = tl.where(size < least_bits, small.to(tl.uint32, bitcast=True), normal)
    return (rounded | sign).to(tl.float32, bitcast=True)


@triton.jit
def _uniform16(key, i):
    """`trimtab-lb32`'s 16 bits of elements i of rows with these keys."""
    x = (i >> 1).to(tl.uint32) + key.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= (key >> 32).to(tl.uint32)
    x *= 0x846CA68B
    x ^= x >> 16
    return tl.where((i & 1) != 0, x >> 16, x & 0xFFFF)


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
