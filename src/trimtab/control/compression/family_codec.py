"""From a family of compression settings, as plans name it, to the codec that implements it."""

from __future__ import annotations

from trimtab.codec import Block
from trimtab.planning.compression.family import Family


def family_codec(family: Family, bits: int) -> Block:
    return Block(bits=bits, block=family.block, stochastic=family.stochastic)
