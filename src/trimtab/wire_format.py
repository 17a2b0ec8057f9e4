"""Sizes of gradients on the wire, and which of them are compressed: shared by the codec and the planner.

The size table is that of docs/wire-format.md.
"""

from __future__ import annotations

MIN_NUMEL = 2048
"""Smaller parameters, and all with one axis, travel uncompressed: few bytes, and the most sensitive."""

TINY_BYTES = 16 * 1024
"""Up to this payload one all-gather is used: a second round of latency costs more than scattering saves."""

MOST_GATHERED_BYTES = 8 * TINY_BYTES
"""But only while all ranks' payloads together have at most this size: everyone receives and decodes all of them."""


WEIGHT_BITS, WEIGHT_BLOCK = 8, 256
"""Bits and block of FSDP2's weights where they are gathered in fewer bits: rounding to the nearest is more accurate in
small blocks, and 8 bits of it have left every loss where it was."""

ADAPTIVE_BITS, ADAPTIVE_BLOCK = 3, 128
"""What a job in adaptive bits is expected to send, roughly: the mean bits and the block that suit any optimizer."""


def in_one_gather(nbytes: int, world: int) -> bool:
    """Whether a bucket of so many encoded bytes is all-gathered instead of scattered, reduced and gathered."""
    return world <= 2 or (nbytes <= TINY_BYTES and world * nbytes <= MOST_GATHERED_BYTES)


def encoded_bytes(numel: int, bits: int, block: int = 1024, *, itemsize: int = 4) -> int:
    """Bytes of `numel` values in `bits` each (0: uncompressed), with one range for each `block` values."""
    if numel == 0:
        return 0
    if bits == 0:
        return _align8(numel * itemsize)
    blocks = -(-numel // block)
    last = numel - (blocks - 1) * block
    return 8 * blocks + _align8((blocks - 1) * -(-block * bits // 8) + -(-last * bits // 8))


def _align8(n: int) -> int:
    return -(-n // 8) * 8
