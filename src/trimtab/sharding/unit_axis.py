"""Where the units of a block are in a full tensor, and how a rank stores its own units.

A full tensor, as on a single device, has its units along one axis. A rank stores the slices of its units one after
another along the first axis, whatever the axis of the full tensor, so that each unit is contiguous in memory: it can
be moved, and written to a checkpoint, as one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UnitAxis:
    """The layout of units along one axis of a full tensor."""

    units: int
    axis: int
    """The axis of the full tensor."""

    parts: tuple[int, ...]
    """Entries of one unit in each part of the axis: a plain axis has one part, fused q, k, v have three."""

    @property
    def width(self) -> int:
        """Entries of one unit along the axis."""
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
        """What a rank stores if it owns these units, in this order."""
        return self.to_units(full)[units.to(full.device)].flatten(0, 1)

    def boxes(self, unit: int, count: int) -> list[tuple[int, int]]:
        """Start and length along the full axis of `count` consecutive units, for each part."""
        boxes, start = [], 0
        for part in self.parts:
            boxes.append((start + unit * part, count * part))
            start += self.units * part
        return boxes


def runs(units: list[int]) -> list[tuple[int, int, int]]:
    """(first slot, first unit, length) of each run of consecutive units in consecutive slots."""
    result: list[tuple[int, int, int]] = []
    for slot, unit in enumerate(units):
        if result and result[-1][1] + result[-1][2] == unit:
            first_slot, first_unit, length = result[-1]
            result[-1] = (first_slot, first_unit, length + 1)
        else:
            result.append((slot, unit, 1))
    return result
