"""Reads and writes of the block codec's GPU code: values, (low, unit) pairs, packed codes.

Throughout, a tile has ROWS rows of PAD lanes; `lengths` are the rows' true lengths; FULL says that
each of them is BLOCK. WIDE says that the payload is aligned to 8 bytes; if not, it is accessed byte
by byte. GROUP is the number of codes that make one stored word, or 0 where codes straddle bytes.
"""

# Compile-time constants are in capitals, as usual in Triton; its compiler, not mypy, checks the types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(owners, table, ROWS: tl.constexpr, UNIT: tl.constexpr):
    """This program's segment, (offset, numel, first block, name hash, start byte), and its first block there."""
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * 8
    # Tables hold multiples of UNIT and 8, so that the compiler knows how addresses are aligned.
    offset = tl.load(row) * UNIT
    start = tl.load(row + 4) * 8
    k = (program - tl.load(row + 5)) * ROWS
    return offset, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), start, k


@triton.jit
def row_lengths(left, at, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """How many of CHUNK elements each row has from its element `at`, with `left` in the segment from row 0."""
    lengths = tl.minimum(left - tl.arange(0, ROWS).to(tl.int64) * BLOCK, BLOCK) - at
    return tl.minimum(tl.maximum(lengths, 0), CHUNK).to(tl.int32)


@triton.jit
def places(lengths, BLOCK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Element offsets of a tile's lanes, and which of them hold elements."""
    i = tl.arange(0, PAD)[None, :]
    return tl.arange(0, ROWS)[:, None] * BLOCK + i, i < lengths[:, None]


@triton.jit
def load_values(pointers, inside, BLOCK: tl.constexpr, PAD: tl.constexpr, FULL: tl.constexpr):
    if FULL and BLOCK == PAD:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_values(pointers, v, inside, BLOCK: tl.constexpr, PAD: tl.constexpr, FULL: tl.constexpr):
    if FULL and BLOCK == PAD:
        tl.store(pointers, v)
    else:
        tl.store(pointers, v, mask=inside)


@triton.jit
def store_pairs(pairs, low, unit, lengths, ROWS: tl.constexpr, WIDE: tl.constexpr):
    r = tl.arange(0, ROWS)
    both = low.to(tl.uint32, bitcast=True).to(tl.uint64) | (
        unit.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    )
    if WIDE:
        tl.store(pairs.to(tl.pointer_type(tl.uint64)) + r, both, mask=lengths > 0)
    else:
        byte = tl.arange(0, 8)[None, :]
        single = (both[:, None] >> (byte * 8).to(tl.uint64)).to(tl.uint8)
        tl.store(pairs + r[:, None] * 8 + byte, single, mask=(lengths > 0)[:, None])


@triton.jit
def load_pairs(pairs, lengths, ROWS: tl.constexpr, WIDE: tl.constexpr):
    r = tl.arange(0, ROWS)
    if WIDE:
        both = tl.load(pairs.to(tl.pointer_type(tl.uint64)) + r, mask=lengths > 0, other=0)
    else:
        byte = tl.arange(0, 8)[None, :]
        single = tl.load(pairs + r[:, None] * 8 + byte, mask=(lengths > 0)[:, None], other=0)
        both = tl.sum(single.to(tl.uint64) << (byte * 8).to(tl.uint64), axis=1)
    low = both.to(tl.uint32).to(tl.float32, bitcast=True)
    return low, (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def store_codes(codes, code, bad, lengths, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
                ROWS: tl.constexpr, GROUP: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Pack and store the rows' codes (uint32; zero past a row's length), or zeros where the row is `bad`."""
    r = tl.arange(0, ROWS)[:, None]
    if GROUP != 0:
        WORD: tl.constexpr = GROUP * BITS
        shift = (tl.arange(0, GROUP) * BITS).to(tl.uint32)[None, None, :]
        word = tl.sum(tl.reshape(code, [ROWS, PAD // GROUP, GROUP]) << shift, axis=2)
        word = tl.where(bad[:, None], 0, word).to(word_type(WORD))
        pointers = codes.to(tl.pointer_type(word_type(WORD))) + (
            r * ((BLOCK * BITS + WORD - 1) // WORD) + tl.arange(0, PAD // GROUP)[None, :]
        )
        if FULL and BLOCK == PAD:
            tl.store(pointers, word)
        else:
            tl.store(pointers, word, mask=tl.arange(0, PAD // GROUP)[None, :] * GROUP < lengths[:, None])
    else:
        shift = (tl.arange(0, 8) * BITS).to(tl.uint64)[None, None, :]
        word = tl.sum(tl.reshape(code.to(tl.uint64), [ROWS, PAD // 8, 8]) << shift, axis=2)
        word = tl.where(bad[:, None], 0, word)
        byte = tl.arange(0, 8)[None, None, :]
        single = (word[:, :, None] >> (byte * 8).to(tl.uint64)).to(tl.uint8)
        at = tl.arange(0, PAD // 8)[None, :, None] * BITS + byte
        nbytes = ((lengths * BITS + 7) // 8)[:, None, None]
        rows = r[:, :, None] * ((BLOCK * BITS + 7) // 8)
        tl.store(codes + rows + at, single, mask=(byte < BITS) & (at < nbytes))


@triton.jit
def load_codes(codes, lengths, BITS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
               GROUP: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """The rows' codes, uint32."""
    r = tl.arange(0, ROWS)[:, None]
    if GROUP != 0:
        WORD: tl.constexpr = GROUP * BITS
        at = tl.arange(0, PAD // GROUP)[None, :]
        pointers = codes.to(tl.pointer_type(word_type(WORD))) + (r * ((BLOCK * BITS + WORD - 1) // WORD) + at)
        if FULL and BLOCK == PAD:
            word = tl.load(pointers).to(tl.uint32)
        else:
            word = tl.load(pointers, mask=at * GROUP < lengths[:, None], other=0).to(tl.uint32)
        shift = (tl.arange(0, GROUP) * BITS).to(tl.uint32)[None, None, :]
        code = tl.reshape(word[:, :, None] >> shift, [ROWS, PAD])
    else:
        # A code lies in one byte or two.
        bit = tl.arange(0, PAD)[None, :] * BITS
        at = r * ((BLOCK * BITS + 7) // 8) + bit // 8
        inside = tl.arange(0, PAD)[None, :] < lengths[:, None]
        first = tl.load(codes + at, mask=inside, other=0).to(tl.uint32)
        second = tl.load(codes + at + 1, mask=inside & (bit % 8 + BITS > 8), other=0).to(tl.uint32)
        code = (first | (second << 8)) >> (bit % 8).to(tl.uint32)
    return code & ((1 << BITS) - 1)


@triton.jit
def store_padding(segment, numel, blocks, last, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero what is left of the segment's last 8 bytes; `last`: this tile holds its last block."""
    tail = numel - (blocks - 1) * BLOCK
    used = (blocks - 1) * ((BLOCK * BITS + 7) // 8) + (tail * BITS + 7) // 8
    i = tl.arange(0, 8)
    zero = tl.full([8], 0, tl.uint8)
    tl.store(segment + 8 * blocks + used + i, zero, mask=last & (i < (used + 7) // 8 * 8 - used))


@triton.constexpr_function
def word_type(bits):
    return {8: tl.uint8, 16: tl.uint16, 32: tl.uint32}[bits]
