"""Raw segments on the GPU: uncompressed values. A tile is TILE consecutive elements."""

# Compile-time constants are in capitals, as usual in Triton; its compiler, not mypy, checks the types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from trimtab.codec.triton_memory import load_values, store_values, tile, word_type


@triton.jit(do_not_specialize=["scale", "stride", "gap"])
def encode_raw(flat, payloads, out, owners, table, scale: tl.float32, stride: tl.int64, gap: tl.int32,
               TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Write scale × the values to `out`; with COUNT payloads, add theirs in order and keep the sums in `flat`."""
    SIZE: tl.constexpr = flat.dtype.element_ty.primitive_bitwidth // 8
    offset, numel, _, _, start, k = tile(owners, table, 1, UNIT)
    values = flat + offset + k * TILE
    begin = start + k * TILE * SIZE
    left = numel - k * TILE
    if left >= TILE:
        _encode_tile(values, payloads, out, begin, scale, stride, gap, left, TILE, SIZE, WIDE, COUNT, True)
    else:
        _encode_tile(values, payloads, out, begin, scale, stride, gap, left, TILE, SIZE, WIDE, COUNT, False)
    i = tl.arange(0, 8)
    used = numel * SIZE
    padding = (left <= TILE) & (i < (used + 7) // 8 * 8 - used)
    tl.store(out + start + used + i, tl.full([8], 0, tl.uint8), mask=padding)


@triton.jit
def decode_raw(flat, payload, owners, table, TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
               ADD: tl.constexpr):  # fmt: skip
    """Write a payload's raw values over, or with ADD onto, the segments' values."""
    SIZE: tl.constexpr = flat.dtype.element_ty.primitive_bitwidth // 8
    offset, numel, _, _, start, k = tile(owners, table, 1, UNIT)
    values = flat + offset + k * TILE
    sent = payload + start + k * TILE * SIZE
    left = numel - k * TILE
    if left >= TILE:
        _decode_tile(values, sent, left, TILE, SIZE, WIDE, ADD, True)
    else:
        _decode_tile(values, sent, left, TILE, SIZE, WIDE, ADD, False)


@triton.jit
def _encode_tile(values, payloads, out, begin, scale, stride, gap, left, TILE: tl.constexpr,
                 SIZE: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    i = tl.arange(0, TILE)
    t = load_values(values + i, i < left, TILE, TILE, FULL).to(tl.float32) * scale
    for p in range(COUNT):
        theirs = payloads + (p + (gap <= p).to(tl.int64)) * stride + begin
        t += _load_sent(theirs, left, values.dtype.element_ty, TILE, SIZE, WIDE, FULL).to(tl.float32)
    v = t.to(values.dtype.element_ty)
    if WIDE:
        store_values((out + begin).to(values.dtype) + i, v, i < left, TILE, TILE, FULL)
    else:
        byte = tl.arange(0, SIZE)[None, :]
        word = v.to(word_type(SIZE * 8), bitcast=True).to(tl.uint32)[:, None]
        single = (word >> (byte * 8).to(tl.uint32)).to(tl.uint8)
        tl.store(out + begin + i[:, None] * SIZE + byte, single, mask=(i < left)[:, None])
    if COUNT > 0:
        store_values(values + i, v, i < left, TILE, TILE, FULL)


@triton.jit
def _decode_tile(values, sent, left, TILE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
                 ADD: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    i = tl.arange(0, TILE)
    v = _load_sent(sent, left, values.dtype.element_ty, TILE, SIZE, WIDE, FULL)
    if ADD:
        y = load_values(values + i, i < left, TILE, TILE, FULL).to(tl.float32)
        v = (y + v.to(tl.float32)).to(values.dtype.element_ty)
    store_values(values + i, v, i < left, TILE, TILE, FULL)


@triton.jit
def _load_sent(sent, left, DTYPE: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
               FULL: tl.constexpr):  # fmt: skip
    i = tl.arange(0, TILE)
    if WIDE:
        return load_values(sent.to(tl.pointer_type(DTYPE)) + i, i < left, TILE, TILE, FULL)
    byte = tl.arange(0, SIZE)[None, :]
    single = tl.load(sent + i[:, None] * SIZE + byte, mask=(i < left)[:, None], other=0)
    word = tl.sum(single.to(tl.uint32) << (byte * 8).to(tl.uint32), axis=1)
    return word.to(word_type(SIZE * 8)).to(DTYPE, bitcast=True)
