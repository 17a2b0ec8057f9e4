"""Where the units of a block lie in a full tensor, and how a rank stores its own.

A full tensor, as a single device has it, holds its units along one axis. A rank stores the
slices of its units one after another along the first axis, whatever the full tensor's axis
was, so that a unit is always one run of memory: what moves, and what a checkpoint names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UnitAxis:
    """How the units lie along one axis of a full tensor."""

    units: int
    axis: int
    """The axis of the full tensor along which they lie."""

    parts: tuple[int, ...]
    """Entries one unit has in each part of the axis: a plain axis has one part, fused q, k, v has three."""

    @property
    def width(self) -> int:
        """Entries of the axis that belong to one unit."""
        return sum(self.parts)

    @property
    def length(self) -> int:
        return self.units * self.width

    def to_units(self, full: Tensor) -> Tensor:
        """The slices of all units, stacked: (units, width, the other axes)."""
        moved = full.movedim(self.axis, 0)
        pieces = moved.split([self.units * part for part in self.parts])
        return torch.cat([piece.unflatten(0, (self.units, -1)) for piece in pieces], dim=1)

    def select(self, full: Tensor, units: Tensor) -> Tensor:
        """What a rank stores that owns these units, in this order."""
        return self.to_units(full)[units.to(full.device)].flatten(0, 1)

    def boxes(self, unit: int, count: int) -> list[tuple[int, int]]:
        """Start and length along the full axis of `count` consecutive units, for each part."""
        found, start = [], 0
        for part in self.parts:
            found.append((start + unit * part, count * part))
            start += self.units * part
        return found


def runs(units: list[int]) -> list[tuple[int, int, int]]:
    """(first slot, first unit, length) of each stretch of consecutive units in consecutive slots."""
    found: list[tuple[int, int, int]] = []
    for slot, unit in enumerate(units):
        if found and found[-1][1] + found[-1][2] == unit:
            first_slot, first_unit, length = found[-1]
            found[-1] = (first_slot, first_unit, length + 1)
        else:
            found.append((slot, unit, 1))
    return found
