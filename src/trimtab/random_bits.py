"""`trimtab-lb32`: the counter-based random bits of stochastic rounding (docs/wire-format.md).

Nothing here has state: the same (seed, step, rank, stage, parameter, block, element) gives the
same bits on any device, in any order of calls.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

NAME = "trimtab-lb32"

OWN = 0
"""The stage of a rank's encoding of its own values."""

REDUCED = 1
"""The stage of an owner's re-encoding of a sum."""

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream(seed: int, step: int, rank: int, stage: int) -> int:
    """The 64 bits that make one message's random numbers differ from every other's."""
    h = 0
    for value in (seed, step, rank, stage):
        h = absorb(h, value)
    return h


def name_hash(name: str) -> int:
    """The 64 bits that represent a parameter's name in the random streams."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def absorb(h: int, value: int) -> int:
    """Mix 64 bits of `value` into the hash `h`."""
    z = ((h ^ (value & _MASK64)) + _GOLDEN) & _MASK64
    for shift, factor in _MIX64:
        z ^= z >> shift
        z = z * factor & _MASK64
    return z ^ z >> 31


def block_keys(
    stream: int, name_hash: int, first_block: int, count: int, device: torch.device
) -> torch.Tensor:
    """Keys of `count` consecutive blocks of a parameter: int64 holding the 64 bits of each."""
    parameter = absorb(stream, name_hash)
    blocks = torch.arange(first_block, first_block + count, dtype=torch.int64, device=device)
    z = (blocks ^ _signed(parameter)) + _signed(_GOLDEN)
    for shift, factor in _MIX64:
        z = z ^ _shift_right(z, shift)
        z = z * _signed(factor)
    return z ^ _shift_right(z, 31)


def uniform16(keys: torch.Tensor, length: int) -> torch.Tensor:
    """The 16 random bits of the first `length` elements of each block: int64, (blocks, length)."""
    k0 = (keys & _MASK32).unsqueeze(1)
    k1 = (_shift_right(keys, 32)).unsqueeze(1)
    pairs = torch.arange(-(-length // 2), dtype=torch.int64, device=keys.device)
    # int64 products wrap, and their low 32 bits are those of the uint32 product.
    x = (pairs + k0) & _MASK32
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK32
    x = x ^ (x >> 15) ^ k1
    x = x * 0x846CA68B & _MASK32
    x = x ^ (x >> 16)
    return torch.stack((x & 0xFFFF, x >> 16), dim=2).flatten(1)[:, :length]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift: int64's own repeats the sign bit."""
    return (z >> shift) & (_MASK64 >> shift)
