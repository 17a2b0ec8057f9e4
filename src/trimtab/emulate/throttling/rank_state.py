"""What a rank gets from the launcher in a file, and numbers that it shares with other processes in a mapped one.

The rank writes its process id, its number of optimizer steps, and the speed at which it should run according to the
schedule; the process that slows it down reads them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.emulate.throttling.cgroups import Group
from trimtab.emulate.throttling.schedule import Contention


class RankState(ctypes.Structure):
    """The shared numbers of one rank: aligned, so that every supported machine reads and writes them atomically."""

    _fields_ = (("pid", ctypes.c_int64), ("steps", ctypes.c_int64), ("speed", ctypes.c_double))

    pid: int
    """Process id of the rank, from the moment it may be slowed down; 0 before."""

    steps: int
    """Number of optimizer steps so far."""

    speed: float
    """Speed at which it should run, relative to the fastest rank."""

    @classmethod
    def open(cls, path: Path) -> RankState:
        with path.open("r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    @classmethod
    def create(cls, path: Path, speed: float) -> RankState:
        path.write_bytes(bytes(cls(speed=speed)))
        return cls.open(path)


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of one rank in a run."""

    device: str
    """Its device class."""

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
