"""Numbers that a rank shares with other processes of the emulation, in a memory-mapped file.

The rank writes its process id, its number of optimizer steps, and the speed at which it should run according to the
schedule; the process that slows it down reads them.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

# Aligned eight-byte fields, which every supported machine reads and writes atomically.
_FIELDS = struct.Struct("=qqd")


class RankState:
    """The shared numbers of one rank."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIELDS.size)
        # A typed view writes a field in one store; pack_into may write byte by byte.
        self._integers = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")

    @classmethod
    def create(cls, path: Path, speed: float) -> RankState:
        path.write_bytes(_FIELDS.pack(0, 0, speed))
        return cls(path)

    @property
    def pid(self) -> int:
        """Process id of the rank, from the moment it may be slowed down; 0 before."""
        return self._integers[0]

    @pid.setter
    def pid(self, value: int) -> None:
        self._integers[0] = value

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        return self._integers[1]

    @steps.setter
    def steps(self, value: int) -> None:
        self._integers[1] = value

    @property
    def speed(self) -> float:
        """Speed at which it should run, relative to the fastest rank."""
        return self._floats[2]

    @speed.setter
    def speed(self, value: float) -> None:
        self._floats[2] = value
