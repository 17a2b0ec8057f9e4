"""docs/wire-format.md once more, one element at a time in numpy scalars: it shares no code with what it checks."""

from __future__ import annotations

import struct

import numpy as np

M32, M64 = 2**32 - 1, 2**64 - 1
f32 = np.float32


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def absorb(h: int, v: int) -> int:
    return mix64(((h ^ v) + 0x9E3779B97F4A7C15) & M64)


def u16(key: int, i: int) -> int:
    x = ((i >> 1) + (key & M32)) & M32
    x ^= x >> 16
    x = x * 0x7FEB352D & M32
    x ^= x >> 15
    x ^= key >> 32
    x = x * 0x846CA68B & M32
    x ^= x >> 16
    return x >> 16 if i % 2 else x & 0xFFFF


def encode_block(t: list[np.float32], bits: int, key: int | None) -> tuple[bytes, bytes]:
    """The (low, unit) pair and the codes of a block; `key` None rounds to nearest."""
    top = 2**bits - 1
    with np.errstate(all="ignore"):
        low, high = f32(min(t) + f32(0)), max(t)
        extent = f32(high - low)
        if not (np.isfinite(t).all() and np.isfinite(extent)):
            return struct.pack("<II", 0x7FC00000, 0x7FC00000), bytes(-(-len(t) * bits // 8))
        unit = f32(extent * f32(1 / top))
        inv = f32(0)
        if unit < 2.0**-126:
            unit = f32(0)
        else:
            inv = f32(f32(1) / unit)
        string = 0
        for i, value in enumerate(t):
            r = f32(0.5) if key is None else f32(f32(u16(key, i)) * f32(2**-16) + f32(2**-17))
            q = f32(f32(f32(value - low) * inv) + r)
            string |= min(int(q), top) << i * bits
    return struct.pack("<ff", low, unit), string.to_bytes(-(-len(t) * bits // 8), "little")


def encode(
    values: list[float],
    *,
    bits: int,
    block: int,
    scale: float,
    stream: int | None,
    name_hash: int,
    first: int,
) -> bytes:
    """A segment of fp32 values; `stream` None rounds to nearest."""
    pairs, codes = b"", b""
    for k, begin in enumerate(range(0, len(values), block)):
        with np.errstate(all="ignore"):
            t = [f32(f32(x) * f32(scale)) for x in values[begin : begin + block]]
        key = None if stream is None else absorb(absorb(stream, name_hash), first + k)
        pair, string = encode_block(t, bits, key)
        pairs, codes = pairs + pair, codes + string
    return pairs + codes + bytes(-len(codes) % 8)


def decode(data: bytes, numel: int, *, bits: int, block: int) -> list[np.float32]:
    blocks, width, values = -(-numel // block), -(-block * bits // 8), []
    for i in range(numel):
        k, j = divmod(i, block)
        low, unit = (f32(v) for v in struct.unpack_from("<ff", data, 8 * k))
        string = int.from_bytes(data[8 * blocks + k * width : 8 * blocks + (k + 1) * width], "little")
        with np.errstate(all="ignore"):
            values.append(f32(low + f32(unit * f32(string >> j * bits & 2**bits - 1))))
    return values
