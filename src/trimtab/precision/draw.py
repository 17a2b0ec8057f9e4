"""Random bits for rounding operands: `trimtab-lb32` (docs/wire-format.md), with the keys of docs/precision.md."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from trimtab.random_bits import absorb


class Operand(IntEnum):
    """The operand being rounded; each has a random stream of its own."""

    INPUT = 2
    WEIGHT = 3
    GRAD_FOR_INPUT = 4
    GRAD_FOR_WEIGHT = 5


def base_key(seed: int, rank: int, name_hash: int) -> int:
    """The constant part of an operator's key, as a signed 64-bit integer: the type an operator schema can hold."""
    h = 0
    for value in (seed, rank, name_hash):
        h = absorb(h, value)
    return h - (1 << 64) if h >> 63 else h


class Draw(NamedTuple):
    """The random stream of one operator's rounding, or rounding to nearest."""

    base: int
    """See `base_key`."""

    calls: Tensor
    """How often the model was called: one int64 on the operands' device, so that the host never waits for it."""

    stochastic: bool

    def key(self, operand: Operand) -> int:
        """The 64-bit key of an operand; for a counter in host memory only."""
        return absorb(absorb(self.base & 0xFFFFFFFFFFFFFFFF, int(self.calls)), operand)
