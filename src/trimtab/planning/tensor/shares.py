"""How many units of a block each tensor-parallel rank should own. Pure functions.

The ranks wait for each other after every block, so a block ends when its slowest rank ends. The best shares make
all ranks finish together, like water that fills vessels to one level.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.predict.share_time import ShareTime

_STEPS = 32
"""Rounding to multiples may cost at most about 1 / this of an average share."""

_WIDEST_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Units of each rank, and when the last one finishes."""

    counts: tuple[int, ...]
    time: float
    """In the unit of the given times; ranks without units count their fixed time."""


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """The units of one block."""

    units: int
    unit_bytes: float
    """Memory of one unit on its rank: parameters, gradients, optimizer state."""


def water_fill(
    units: int,
    per_unit: Sequence[float],
    *,
    fixed: Sequence[float] | None = None,
    most: Sequence[int | None] | None = None,
    multiple: int = 1,
) -> Shares:
    """Share `units` so that the last rank finishes as early as possible; a rank's time is a `ShareTime`.

    Args:
        per_unit: for each rank, seconds per unit; infinite for a rank that must have none.
        fixed: for each rank, its other seconds.
        most: for each rank, the units that fit its memory; None for no limit.
        multiple: shares are multiples of this, except for one rank that takes the remainder.
    """
    ranks = len(per_unit)
    fixed = [0.0] * ranks if fixed is None else list(fixed)
    most = [None] * ranks if most is None else list(most)
    if ranks == 0 or len(fixed) != ranks or len(most) != ranks or units < 0 or multiple < 1:
        raise TrimtabError(
            f"tensor shares: {units} units in multiples of {multiple} cannot be shared among ranks with times "
            f"{list(per_unit)}, fixed times {fixed} and limits {most}; give each list one entry for each rank"
        )
    if not all(time > 0 for time in per_unit) or not all(0 <= time < float("inf") for time in fixed):
        raise TrimtabError(
            f"tensor shares: times per unit must be above 0 and fixed times finite and at least 0; got "
            f"{list(per_unit)} and {fixed}"
        )
    room = [
        0 if time == float("inf") else units if limit is None else max(0, min(units, limit))
        for time, limit in zip(per_unit, most, strict=True)
    ]
    if sum(room) < units:
        raise TrimtabError(
            f"tensor shares: {units} units do not fit: the ranks have room for {', '.join(map(str, room))}; "
            "use more ranks or more memory"
        )
    times = [ShareTime(*pair) for pair in zip(fixed, per_unit, strict=True)]
    counts = _start(units, times, room, multiple)
    # One multiple after another goes to the rank that finishes first with it; a rank without room for a whole
    # multiple takes what fits.
    waiting = [(times[i].seconds(counts[i] + multiple), i) for i in range(ranks) if counts[i] < room[i]]
    heapq.heapify(waiting)
    left = units - sum(counts)
    while left:
        _, rank = heapq.heappop(waiting)
        taken = min(multiple, left, room[rank] - counts[rank])
        counts[rank] += taken
        left -= taken
        if counts[rank] < room[rank]:
            heapq.heappush(waiting, (times[rank].seconds(counts[rank] + multiple), rank))
    slowest = max(time.seconds(count) for time, count in zip(times, counts, strict=True))
    return Shares(counts=tuple(counts), time=slowest)


def water_level(units: int, per_unit: Sequence[float], fixed: Sequence[float]) -> float:
    """When the last rank would finish if units could be divided: a lower bound for any shares."""
    return max(_level(units, [ShareTime(*pair) for pair in zip(fixed, per_unit, strict=True)]), *fixed)


def share_blocks(
    blocks: Mapping[str, BlockSize],
    speeds: Sequence[float],
    *,
    memory_bytes: Sequence[float | None] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Units of every block for each rank, by speed, within memory.

    Each block is shared separately, because the ranks wait for each other after each. Memory is divided among the
    blocks in proportion to their size. A rank of speed 0 gets nothing.
    """
    if not speeds or min(speeds) < 0 or max(speeds) <= 0 or max(speeds) == float("inf"):
        raise TrimtabError(
            f"tensor shares: {list(speeds)}: give each rank a speed of at least 0, one above 0"
        )
    times = [1 / speed if speed > 0 else float("inf") for speed in speeds]
    whole = sum(block.units * block.unit_bytes for block in blocks.values())
    limits: Sequence[float | None] = memory_bytes or [None] * len(speeds)
    shared = {}
    for name, block in blocks.items():
        most = [None if limit is None else int(block.units * limit / whole) for limit in limits]
        try:
            fill = water_fill(
                block.units, times, most=most, multiple=hardware_multiple(block.units // len(speeds))
            )
        except TrimtabError as error:
            raise TrimtabError(f"{name}: {error}") from None
        shared[name] = fill.counts
    return shared


def hardware_multiple(units: int) -> int:
    """The largest power of two, good for matrix hardware, that still divides so many units finely enough."""
    multiple = _WIDEST_MULTIPLE
    while multiple > 1 and units < multiple * _STEPS:
        multiple //= 2
    return multiple


def _start(units: int, times: Sequence[ShareTime], room: Sequence[int], multiple: int) -> list[int]:
    """Shares a little below the water level, so that few steps remain."""
    finite = [i for i, most in enumerate(room) if most]
    counts = [0] * len(times)
    if not finite:
        return counts
    level = _level(units, [times[i] for i in finite])
    for i in finite:
        whole = int(times[i].share_within(level) * (1 - 1e-12)) // multiple * multiple
        counts[i] = min(whole, room[i] // multiple * multiple)
    return counts


def _level(units: int, times: Sequence[ShareTime]) -> float:
    """When the ranks that take part finish together; ranks whose fixed time is longer do not take part."""
    active = list(times)
    while True:
        rate = sum(1 / time.whole for time in active)
        level = (units + sum(time.fixed / time.whole for time in active)) / rate
        staying = [time for time in active if time.fixed < level]
        if len(staying) in (0, len(active)):
            return level
        active = staying
