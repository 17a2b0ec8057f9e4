"""A few numbers that one rank shares with the processes around it, in a mapped file.

The rank writes its process id and its count of optimizer steps; it also writes the speed
it should run at (it knows the schedule), which whoever slows it down reads.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Eight-byte fields on eight-byte boundaries: written and read whole on every machine we know.
_FIELDS = struct.Struct("=qqd")


class RankState:
    """The shared numbers of one rank; each is read and written through to the others."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIELDS.size)
        # A typed view writes a field in one store; pack_into may write it byte by byte.
        self._integers = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")

    @classmethod
    def create(cls, path: Path, speed: float) -> RankState:
        path.write_bytes(_FIELDS.pack(0, 0, speed))
        return cls(path)

    @property
    def pid(self) -> int:
        """Process id of the rank once it may be slowed down; 0 before."""
        return self._integers[0]

    @pid.setter
    def pid(self, value: int) -> None:
        self._integers[0] = value

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._integers[1]

    @steps.setter
    def steps(self, value: int) -> None:
        self._integers[1] = value

    @property
    def speed(self) -> float:
        """Speed it should run at, as a part of the fastest rank's."""
        return self._floats[2]

    @speed.setter
    def speed(self, value: float) -> None:
        self._floats[2] = value
