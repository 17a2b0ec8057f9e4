"""The block codec's GPU code. docs/wire-format.md defines the arithmetic, `triton_kernels` the tables.

A program works on one tile: ROWS consecutive blocks of one segment, each padded to PAD (a power of
two) lanes. Full blocks are read from memory once and held in registers. A segment's last tile, where
blocks may be short or missing, and blocks too long to hold are read twice, CHUNK elements at a time:
that code is separate so that its masks cost full blocks no registers. Launch with enable_fp_fusion=False.
"""

# Compile-time constants are in capitals, as usual in Triton; its compiler, not mypy, checks the types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from trimtab.codec.triton_memory import (
    load_codes,
    load_pairs,
    load_values,
    places,
    row_lengths,
    store_codes,
    store_padding,
    store_pairs,
    store_values,
    tile,
)


@triton.jit(do_not_specialize=["stream", "scale", "stride", "gap"])
def encode(flat, payloads, out, owners, table, stream: tl.uint64, scale: tl.float32, stride: tl.int64,
           gap: tl.int32, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
           CHUNK: tl.constexpr, HELD: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
           WIDE: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Encode, or with COUNT payloads reduce and re-encode, writing the decoded values back."""
    offset, numel, index, name, start, k = tile(owners, table, ROWS, UNIT)
    values = flat + offset + k * BLOCK
    blocks = (numel + BLOCK - 1) // BLOCK
    pairs = start + 8 * k
    codes = start + 8 * blocks + k * ((BLOCK * BITS + 7) // 8)
    left = numel - k * BLOCK
    key = _keys(stream, name, index + k, ROWS)
    if HELD and left >= ROWS * BLOCK:
        lengths = tl.full([ROWS], BLOCK, tl.int32)
        t = _sums(values, payloads, pairs, codes, scale, stride, gap, lengths, BITS, BLOCK, PAD, ROWS, GROUP,
                  WIDE, COUNT, True)  # fmt: skip
        low, high = _range(t, lengths, BLOCK, PAD, True)
        low, unit, inv, bad = _unit(low, high, BITS)
        store_pairs(out + pairs, low, unit, lengths, ROWS, WIDE)
        _quantize(t, low, unit, inv, bad, values, out + codes, key, 0, lengths, BITS, BLOCK, PAD, ROWS, GROUP,
                  STOCHASTIC, COUNT, True)  # fmt: skip
        if BLOCK * BITS % 64 != 0:
            store_padding(out + start, numel, blocks, left <= ROWS * BLOCK, BITS, BLOCK)
    else:
        low = tl.full([ROWS], float("inf"), tl.float32)
        high = tl.full([ROWS], float("-inf"), tl.float32)
        for at in range(0, tl.minimum(left, BLOCK), CHUNK):
            lengths = row_lengths(left, at, BLOCK, CHUNK, ROWS)
            t = _sums(values + at, payloads, pairs, codes + at // 8 * BITS, scale, stride, gap, lengths, BITS,
                      BLOCK, CHUNK, ROWS, GROUP, WIDE, COUNT, False)  # fmt: skip
            lo, hi = _range(t, lengths, BLOCK, CHUNK, False)
            low = least(low, lo)
            high = most(high, hi)
        low, unit, inv, bad = _unit(low, high, BITS)
        store_pairs(out + pairs, low, unit, row_lengths(left, 0, BLOCK, CHUNK, ROWS), ROWS, WIDE)
        for at in range(0, tl.minimum(left, BLOCK), CHUNK):
            lengths = row_lengths(left, at, BLOCK, CHUNK, ROWS)
            t = _sums(values + at, payloads, pairs, codes + at // 8 * BITS, scale, stride, gap, lengths, BITS,
                      BLOCK, CHUNK, ROWS, GROUP, WIDE, COUNT, False)  # fmt: skip
            _quantize(t, low, unit, inv, bad, values + at, out + codes + at // 8 * BITS, key, at, lengths,
                       BITS, BLOCK, CHUNK, ROWS, GROUP, STOCHASTIC, COUNT, False)  # fmt: skip
        store_padding(out + start, numel, blocks, left <= ROWS * BLOCK, BITS, BLOCK)


@triton.jit
def decode(flat, payload, owners, table, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
           ROWS: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr, UNIT: tl.constexpr,
           GROUP: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Write a payload's values over, or with ADD onto, the segments' values."""
    offset, numel, _, _, start, k = tile(owners, table, ROWS, UNIT)
    values = flat + offset + k * BLOCK
    blocks = (numel + BLOCK - 1) // BLOCK
    pairs = payload + start + 8 * k
    codes = payload + start + 8 * blocks + k * ((BLOCK * BITS + 7) // 8)
    left = numel - k * BLOCK
    if HELD and left >= ROWS * BLOCK:
        lengths = tl.full([ROWS], BLOCK, tl.int32)
        _decode_tile(values, pairs, codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, WIDE, ADD, True)
    else:
        for at in range(0, tl.minimum(left, BLOCK), CHUNK):
            lengths = row_lengths(left, at, BLOCK, CHUNK, ROWS)
            _decode_tile(values + at, pairs, codes + at // 8 * BITS, lengths, BITS, BLOCK, CHUNK, ROWS, GROUP,
                         WIDE, ADD, False)  # fmt: skip


@triton.jit
def _decode_tile(values, pairs, codes, lengths, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
                 ROWS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
                 FULL: tl.constexpr):  # fmt: skip
    at, inside = places(lengths, BLOCK, PAD, ROWS)
    if ADD:
        y = load_values(values + at, inside, BLOCK, PAD, FULL).to(tl.float32)
        v = _decoded(pairs, codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, WIDE, FULL)
        v = y + v
    else:
        v = _decoded(pairs, codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, WIDE, FULL)
    store_values(values + at, v.to(values.dtype.element_ty), inside, BLOCK, PAD, FULL)


@triton.jit
def _sums(values, payloads, pairs, codes, scale, stride, gap, lengths, BITS: tl.constexpr, BLOCK: tl.constexpr,
          PAD: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr,
          FULL: tl.constexpr):  # fmt: skip
    """What is to be encoded: scale × the values, plus each payload's in turn."""
    at, inside = places(lengths, BLOCK, PAD, ROWS)
    t = load_values(values + at, inside, BLOCK, PAD, FULL).to(tl.float32) * scale
    if COUNT <= 8:
        for i in tl.static_range(COUNT):
            theirs = payloads + (i + (gap <= i).to(tl.int64)) * stride
            t += _decoded(theirs + pairs, theirs + codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, WIDE, FULL)
    else:
        for i in range(COUNT):
            theirs = payloads + (i + (gap <= i).to(tl.int64)) * stride
            t += _decoded(theirs + pairs, theirs + codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, WIDE, FULL)
    return t


@triton.jit
def _decoded(pairs, codes, lengths, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
             ROWS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    low, unit = load_pairs(pairs, lengths, ROWS, WIDE)
    code = load_codes(codes, lengths, BITS, BLOCK, PAD, ROWS, GROUP, FULL)
    return low[:, None] + unit[:, None] * code.to(tl.float32)


@triton.jit
def _range(t, lengths, BLOCK: tl.constexpr, PAD: tl.constexpr, FULL: tl.constexpr):
    """Smallest and largest of each row, NaN where there is one."""
    if FULL and BLOCK == PAD:
        low = tl.reduce(t, 1, least)
        high = tl.reduce(t, 1, most)
    else:
        inside = tl.arange(0, PAD)[None, :] < lengths[:, None]
        low = tl.reduce(tl.where(inside, t, float("inf")), 1, least)
        high = tl.reduce(tl.where(inside, t, float("-inf")), 1, most)
    return low, high


@triton.jit
def _unit(low, high, BITS: tl.constexpr):
    """(low, unit, 1 / unit, whether it is not finite) of each row."""
    low = low + 0.0
    extent = high - low
    # One test covers every case: NaN comes through the comparisons, Inf through the difference.
    bad = ((extent.to(tl.uint32, bitcast=True) >> 23) & 0xFF) == 0xFF
    unit = extent * (1.0 / ((1 << BITS) - 1))
    level = unit < 1.1754943508222875e-38  # 2^-126
    inv = tl.where(
        level, 0.0, tl.math.div_rn(tl.full(unit.shape, 1.0, tl.float32), tl.where(level, 1.0, unit))
    )
    unit = tl.where(level, 0.0, unit)
    nan = tl.full(unit.shape, 0x7FC00000, tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(bad, nan, low), tl.where(bad, nan, unit), inv, bad


@triton.jit
def _quantize(t, low, unit, inv, bad, values, codes, key, first, lengths, BITS: tl.constexpr,
              BLOCK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
              STOCHASTIC: tl.constexpr, COUNT: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Store the rows' codes; after a reduction, their decoded values too."""
    at, inside = places(lengths, BLOCK, PAD, ROWS)
    q = (t - low[:, None]) * inv[:, None]
    if STOCHASTIC:
        q += _offsets(key, first, PAD)
    else:
        q += 0.5
    if not (FULL and BLOCK == PAD):
        q = tl.where(inside, q, 0.0)
    # Clamping before the conversion gives the same codes; those of rows that are not finite are replaced.
    code = tl.minimum(q, (1 << BITS) - 1.0).to(tl.int32).to(tl.uint32)
    if COUNT > 0:
        code = tl.where(bad[:, None], 0, code)
        v = low[:, None] + unit[:, None] * code.to(tl.float32)
        store_values(values + at, v.to(values.dtype.element_ty), inside, BLOCK, PAD, FULL)
    store_codes(codes, code, bad, lengths, BITS, BLOCK, PAD, ROWS, GROUP, FULL)


@triton.jit
def _offsets(key, first, PAD: tl.constexpr):
    """The rounding offsets of a row's elements from `first`: `trimtab-lb32`'s 16 bits + ½, × 2^-16."""
    i = first + tl.arange(0, PAD)[None, :]
    # Neighboring lanes compute the same word: the compiler keeps one, since they share a thread.
    k1 = (key >> 32).to(tl.uint32)[:, None]
    x = (i >> 1).to(tl.uint32) + key.to(tl.uint32)[:, None]
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= k1
    x *= 0x846CA68B
    high = x >> 16
    u = tl.where((i & 1) != 0, high, (x ^ high) & 0xFFFF)
    # 0x43000000 | u is the float 128 + u·2^-16; both it and the difference are exact.
    return (u | 0x43000000).to(tl.float32, bitcast=True) - 127.99999237060547  # 128 - 2^-17


@triton.jit
def _keys(stream, name, index, ROWS: tl.constexpr):
    """The 64-bit key of each row's block, from `index` on."""
    blocks = (index + tl.arange(0, ROWS)).to(tl.uint64)
    return _absorb(_absorb(stream.to(tl.uint64), name.to(tl.uint64)), blocks)


@triton.jit
def _absorb(h, v):
    z = (h ^ v) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def most(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
