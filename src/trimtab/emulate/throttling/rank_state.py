"""What a rank gets from the launcher in a file, and numbers that it shares with other processes in a mapped one.

The rank writes its process id, its number of optimizer steps, and the speed at which it should run according to the
schedule; the process that slows it down reads them.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.emulate.throttling.cgroups import Group
from trimtab.emulate.throttling.schedule import Contention

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


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of one rank in a run."""

    kind: str
    cores: tuple[int, ...]
    sharing: int
    speed: float
    """The speed that the throttle enforces without contention."""

    throttle: str | None
    schedule: tuple[Contention, ...]
    quota: Group | None
    memory: Group | None
    memory_fraction: float | None
    """The fraction of the GPU's memory that the rank may use."""

    def save(self, run: Path, rank: int) -> None:
        (run / f"settings-{rank}.json").write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, run: Path, rank: int) -> RankSettings:
        tree = json.loads((run / f"settings-{rank}.json").read_text())
        tree["cores"] = tuple(tree["cores"])
        tree["schedule"] = tuple(Contention(**contention) for contention in tree["schedule"])
        for name in ("quota", "memory"):
            if tree[name] is not None:
                tree[name] = Group(path=Path(tree[name]["path"]), version=tree[name]["version"])
        return cls(**tree)


def state_path(run: Path, rank: int) -> Path:
    """The file of a rank's `RankState`."""
    return run / f"state-{rank}"
