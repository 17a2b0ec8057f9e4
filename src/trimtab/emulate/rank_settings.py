"""The settings that the launcher passes to a rank in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.emulate.throttling.cgroups import Group
from trimtab.emulate.throttling.schedule import Contention


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
