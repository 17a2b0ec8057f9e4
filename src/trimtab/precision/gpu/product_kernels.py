"""Triton kernels for products of int8 codes. Launch the product with enable_fp_fusion=False."""

# Triton's conventions: constants are upper case.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, out, row_scale, column_scale, bias, rows, columns, length, stride_a, stride_b,
             ROW: tl.constexpr, COLUMN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """One BM × BN tile of out = a bᵀ · (row scale · column scale) + bias, which is added to `out` with ADD.

    Sums are exact in int32. EVEN: the length is a multiple of BK. Tiles are computed in groups of GROUP rows of
    tiles, so that those which run at the same time share what they read.
    """
    tall, wide = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    first = tl.program_id(0) // (GROUP * wide) * GROUP
    height = tl.minimum(tall - first, GROUP)
    inside_group = tl.program_id(0) % (GROUP * wide)
    top = (first + inside_group % height) * BM
    left = inside_group // height * BN
    # Rows beyond the end repeat the last one and are not stored.
    i = tl.minimum(tl.arange(0, BM), rows - 1 - top)
    j = tl.minimum(tl.arange(0, BN), columns - 1 - left)
    k = tl.arange(0, BK)
    # Offsets inside the tile take 32 bits, the tile's corner 64.
    a += top.to(tl.int64) * stride_a
    b += left.to(tl.int64) * stride_b
    at_a = a + i[:, None] * stride_a + k[None, :]
    at_b = b + j[None, :] * stride_b + k[:, None]
    sums = tl.zeros([BM, BN], tl.int32)
    for at in range(0, length, BK):
        if EVEN:
            x, y = tl.load(at_a), tl.load(at_b)
        else:
            x = tl.load(at_a, mask=k[None, :] < length - at, other=0)
            y = tl.load(at_b, mask=k[:, None] < length - at, other=0)
        sums = tl.dot(x, y, sums, out_dtype=tl.int32)
        at_a += BK
        at_b += BK
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    low, right = top + i < rows, left + j < columns
    scale = tl.full([BM, BN], 1.0, tl.float32)
    if ROW:
        scale *= tl.load(row_scale + top + i, mask=low, other=0.0)[:, None]
    if COLUMN:
        scale *= tl.load(column_scale + left + j, mask=right, other=0.0)[None, :]
    value = sums.to(tl.float32) * scale
    if BIAS:
        value += tl.load(bias + left + j, mask=right, other=0.0).to(tl.float32)[None, :]
    out += top.to(tl.int64) * columns + left
    at_out = out + i[:, None] * columns + j[None, :]
    stored = low[:, None] & right[None, :]
    if ADD:
        value += tl.load(at_out, mask=stored, other=0.0)
    tl.store(at_out, value.to(out.dtype.element_ty), mask=stored)


@triton.jit
def scale_sums(sums, out, row_scale, column_scale, bias, columns, stride, ROW: tl.constexpr,
               COLUMN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The end of `multiply` for sums in memory: one program per BLOCK values of a row."""
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
    out += row * columns
    if ADD:
        value += tl.load(out + i, mask=inside, other=0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def transpose(codes, transposed, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """One BM × BN tile of bytes."""
    tiles = tl.cdiv(columns, BN)
    top = tl.program_id(0) // tiles * BM
    left = tl.program_id(0) % tiles * BN
    i = tl.arange(0, BM)[:, None]
    j = tl.arange(0, BN)[None, :]
    inside = (top + i < rows) & (left + j < columns)
    x = tl.load(codes + (top.to(tl.int64) * columns + left) + (i * columns + j), mask=inside, other=0)
    at = transposed + (left.to(tl.int64) * rows + top) + (tl.trans(j) * rows + tl.trans(i))
    tl.store(at, tl.trans(x), mask=tl.trans(inside))
