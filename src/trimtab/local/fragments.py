"""Which parameters are exchanged together, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

SMALLEST_CUT = 1 << 16
"""Parameters with fewer values are not cut: one message more would cost more than evener fragments save."""

EVENNESS = 8
"""Nor are those that are less than this part of a fragment."""


class Part(NamedTuple):
    """A parameter, or some rows of one."""

    name: str
    first: int | None = None
    last: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.first is None else f"{self.name}[{self.first}:{self.last}]"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """What belongs to this part of a tensor in the parameter's shape: a view."""
        return whole if self.first is None else whole[self.first : self.last]


def split(shapes: Mapping[str, Sequence[int]], count: int) -> tuple[tuple[Part, ...], ...]:
    """Parameters in order, cut into at most `count` runs of about equal size; none is empty.

    A large parameter, such as an embedding, is cut between rows: in one fragment it would occupy the wire for several
    turns, and the fragments after it would arrive late.
    """
    assert count >= 1
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    total, done = max(1, sum(sizes.values())), 0
    fragments: list[list[Part]] = [[]]

    def add(part: Part, middle: float) -> None:
        """The middle of a part decides to which run it belongs."""
        if fragments[-1] and min(count - 1, int(middle * count / total)) >= len(fragments):
            fragments.append([])
        fragments[-1].append(part)

    for name, size in sizes.items():
        if size < max(SMALLEST_CUT, total / count / EVENNESS):
            add(Part(name), done + size / 2)
        else:
            rows = shapes[name][0]
            width = size // rows
            ends = (total * (index + 1) / count for index in range(count))
            cuts = {round((end - done) / width) for end in ends}
            edges = sorted({0, rows, *(row for row in cuts if 0 < row < rows)})
            for first, last in pairwise(edges):
                part = Part(name) if last - first == rows else Part(name, first, last)
                add(part, done + width * (first + last) / 2)
        done += size
    return tuple(map(tuple, fragments))


def turns(steps: int, count: int) -> tuple[int, ...]:
    """For each of `count` fragments, the step of a round (1 to `steps`) after which it is sent; evenly spaced."""
    assert steps >= 1
    return tuple(max(1, (index + 1) * steps // count) for index in range(count))
