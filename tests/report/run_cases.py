"""Run folders as ranks would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STARTED = 1_790_000_000.0


def sample(step: int, rank: int = 0, *, clock: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A step of 100 ms: rank 0 is ready after 50 ms, rank 1 after 80, and the exchange ends at 90."""
    began = STARTED + clock + step * 0.1
    ready = 0.05 if rank == 0 else 0.08
    return {
        "time": began + 0.1,
        "kind": "step",
        "step": step,
        "steps": 1,
        "seconds": 0.1,
        "data": 0.0,
        "compute": ready,
        "codec": 0.002,
        "wire": 0.09 - ready - 0.002,
        "optimizer": 0.01,
        "exchange": 0.06,
        "began": began,
        "ready": began + ready,
        "exchanged": began + 0.09,
        "samples": 32 - 8 * rank,
        "loss": 1.0 / step,
        "memory": 10**9,
        "sent": 10**6,
        "sent_plain": 10**7,
        "bits": 3.2,
        **changes,
    }


def start(rank: int, host: str = "a", world_size: int = 2) -> dict[str, Any]:
    facts = {"version": 1, "rank": rank, "world_size": world_size, "host": host, "pid": 1, "restart": None}
    return {"time": STARTED, "kind": "start", "step": 0, **facts}


def end(status: int = 0) -> dict[str, Any]:
    return {"time": STARTED + 9, "kind": "end", "step": None, "status": status, "seconds": 9.0, "dropped": 0}


def write_rank(folder: Path, rank: int, events: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (folder / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def two_ranks(
    folder: Path, *more: dict[str, Any], steps: int = 12, clock: float = 0.0, host: str = "a"
) -> Path:
    """Two ranks; the second on `host`, with a clock that is `clock` seconds ahead."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"version": 1, "script": "train.py", "world_size": 2}))
    write_rank(folder, 0, [start(0), *[sample(step) for step in range(1, steps + 1)], *more, end()])
    own = [sample(step, 1, clock=clock) for step in range(1, steps + 1)]
    write_rank(folder, 1, [start(1, host), *own, end()])
    return folder
