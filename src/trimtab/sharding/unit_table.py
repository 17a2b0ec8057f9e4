"""Which rank owns each unit of a block, and in which slot. Pure data, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabError

_LISTED = 5  # units listed in an error


@dataclass(frozen=True, eq=False)
class UnitTable:
    """The units of each rank, by slot."""

    units: int
    slots: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, block: str, units: int, lists: Sequence[Sequence[int]], ranks: int) -> UnitTable:
        """From the units of each rank; raises unless every unit is on exactly one rank."""
        if len(lists) != ranks:
            raise TrimtabError(
                f"{block}: the assignment is for {len(lists)} ranks and there are {ranks}; "
                "give one list of units for each rank"
            )
        try:
            slots = tuple(np.array([index(unit) for unit in owned], dtype=np.int64) for owned in lists)
        except TypeError:
            raise TrimtabError(f"{block}: units are whole numbers, one list of them for each rank") from None
        every = np.concatenate(slots)
        invalid = every[(every < 0) | (every >= units)]
        if invalid.size:
            raise TrimtabError(f"{block}: no unit {_some(invalid)}; its units are 0 to {units - 1}")
        count = np.bincount(every, minlength=units)
        duplicate, missing = np.flatnonzero(count > 1), np.flatnonzero(count == 0)
        if duplicate.size or missing.size:
            problems = [f"unit {_some(duplicate)} is owned more than once"] if duplicate.size else []
            problems += [f"unit {_some(missing)} is owned by no rank"] if missing.size else []
            raise TrimtabError(f"{block}: {' and '.join(problems)}; give each unit to exactly one rank")
        return cls(units, slots)

    @classmethod
    def consecutive(cls, counts: Sequence[int]) -> UnitTable:
        """The first units on rank 0, the next on rank 1, and so on."""
        ends = np.cumsum(counts)
        starts = [0, *ends[:-1]]
        slots = tuple(np.arange(a, b, dtype=np.int64) for a, b in zip(starts, ends, strict=True))
        return cls(int(ends[-1]), slots)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(owned) for owned in self.slots)

    def owners(self) -> NDArray[np.int64]:
        """The rank that owns each unit."""
        owner = np.empty(self.units, dtype=np.int64)
        for rank, owned in enumerate(self.slots):
            owner[owned] = rank
        return owner

    def with_owners(self, owner: NDArray[np.int64]) -> UnitTable:
        """The table after a move: units that stay keep their slots, arriving units fill free slots, without gaps."""
        changed = np.flatnonzero(owner != self.owners())
        return UnitTable(
            self.units,
            tuple(
                _refilled(owned, owner[owned] != rank, changed[owner[changed] == rank])
                for rank, owned in enumerate(self.slots)
            ),
        )

    def with_counts(self, counts: Sequence[int]) -> UnitTable:
        """The table with these counts that moves the fewest units: a rank gives up its last slots."""
        if len(counts) != len(self.slots) or sum(counts) != self.units or min(counts) < 0:
            raise TrimtabError(
                f"{list(counts)} does not distribute {self.units} units over {len(self.slots)} ranks; "
                f"give one non-negative number per rank, with sum {self.units}"
            )
        owner = self.owners()
        surplus = [owned[count:] for owned, count in zip(self.slots, counts, strict=True)]
        free = np.sort(np.concatenate(surplus))
        for rank, (owned, count) in enumerate(zip(self.slots, counts, strict=True)):
            taken, free = np.split(free, [max(0, count - len(owned))])
            owner[taken] = rank
        return self.with_owners(owner)


def _refilled(
    owned: NDArray[np.int64], leaves: NDArray[np.bool_], comes: NDArray[np.int64]
) -> NDArray[np.int64]:
    slots = owned.copy()
    holes = np.flatnonzero(leaves)
    filled = min(len(holes), len(comes))
    slots[holes[:filled]] = comes[:filled]
    slots = np.concatenate([slots, comes[filled:]])
    holes = holes[filled:]
    size = len(slots) - len(holes)
    stays = np.setdiff1d(np.arange(size, len(slots)), holes)
    slots[holes[holes < size]] = slots[stays]
    return slots[:size]


def _some(units: NDArray[np.int64]) -> str:
    named = ", ".join(str(unit) for unit in units[:_LISTED])
    return named if len(units) <= _LISTED else f"{named} and {len(units) - _LISTED} more"
