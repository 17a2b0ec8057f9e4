"""The table of a block: which unit lies on which rank, in which slot. Pure data, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_NAMED = 5  # units named in an error


@dataclass(frozen=True, eq=False)
class UnitTable:
    """For each rank the units it owns, by slot."""

    units: int
    slots: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, block: str, units: int, lists: Sequence[Sequence[int]], ranks: int) -> UnitTable:
        """From the units of each rank; refused, by name, unless every unit is on exactly one rank."""
        if len(lists) != ranks:
            raise TrimtabError(
                f"{block}: the assignment speaks of {len(lists)} ranks and there are {ranks}; "
                "give one list of units for each rank"
            )
        try:
            slots = tuple(np.array([index(unit) for unit in owned], dtype=np.int64) for owned in lists)
        except TypeError:
            raise TrimtabError(f"{block}: units are whole numbers, one list of them for each rank") from None
        every = np.concatenate(slots)
        strange = every[(every < 0) | (every >= units)]
        if strange.size:
            raise TrimtabError(f"{block}: no unit {_some(strange)}; its units are 0 to {units - 1}")
        count = np.bincount(every, minlength=units)
        doubled, lost = np.flatnonzero(count > 1), np.flatnonzero(count == 0)
        if doubled.size or lost.size:
            wrong = [f"unit {_some(doubled)} is owned more than once"] if doubled.size else []
            wrong += [f"unit {_some(lost)} is owned by no rank"] if lost.size else []
            raise TrimtabError(f"{block}: {' and '.join(wrong)}; give each unit to exactly one rank")
        return cls(units, slots)

    @classmethod
    def consecutive(cls, counts: Sequence[int]) -> UnitTable:
        """The first units on rank 0, the next on rank 1 and so on."""
        ends = np.cumsum(counts)
        starts = [0, *ends[:-1]]
        slots = tuple(np.arange(a, b, dtype=np.int64) for a, b in zip(starts, ends, strict=True))
        return cls(int(ends[-1]), slots)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(owned) for owned in self.slots)

    def owners(self) -> NDArray[np.int64]:
        """The rank of each unit."""
        owner = np.empty(self.units, dtype=np.int64)
        for rank, owned in enumerate(self.slots):
            owner[owned] = rank
        return owner

    def with_owners(self, owner: NDArray[np.int64]) -> UnitTable:
        """The table after a move: who stays keeps its slot, who comes takes a free one, no hole is left."""
        changed = np.flatnonzero(owner != self.owners())
        return UnitTable(
            self.units,
            tuple(
                _refilled(owned, owner[owned] != rank, changed[owner[changed] == rank])
                for rank, owned in enumerate(self.slots)
            ),
        )

    def with_counts(self, counts: Sequence[int]) -> UnitTable:
        """The table with so many units on each rank that moves fewest: surplus goes out by the last slots."""
        if len(counts) != len(self.slots) or sum(counts) != self.units or min(counts) < 0:
            raise TrimtabError(
                f"{list(counts)} does not share {self.units} units among {len(self.slots)} ranks; "
                "give each rank a number of at least 0 that together make up all units"
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
    named = ", ".join(str(unit) for unit in units[:_NAMED])
    return named if len(units) <= _NAMED else f"{named} and {len(units) - _NAMED} more"
