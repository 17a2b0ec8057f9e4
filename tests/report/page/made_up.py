"""Run folders made by arithmetic, in the form of docs/run-folder.md: long, uneven, and with every kind of event."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

START = 1_790_000_000.0
LAYERS = [
    f"blocks.{block}.{part}.weight"
    for block in range(6)
    for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
]


def sampled_steps(total: int) -> list[tuple[int, int]]:
    """(step, steps it stands for), as the run folder samples them."""
    taken, step, every = [], 0, 1
    while step + every <= total:
        step += every
        taken.append((step, every))
        every = next(
            (e for limit, e in ((64, 1), (128, 2), (256, 4), (512, 8), (1024, 16)) if step < limit), 32
        )
    return taken


def plan() -> dict[str, Any]:
    lowered = {name.removesuffix(".weight"): "int8" if "mlp" in name else "bf16" for name in LAYERS[8:]}
    return {
        "version": 2,
        "bits": "adaptive",
        "batch": "free",
        "roles": {
            "fast": {
                "device": "RTX 4090",
                "samples": 22,
                "precisions": {},
                "compute_s": 0.098,
                "peak_bytes": 9 << 30,
                "memory_bytes": 24 << 30,
                "after_s": 0.008,
            },
            "slow": {
                "device": "T4",
                "samples": 10,
                "precisions": lowered,
                "compute_s": 0.102,
                "peak_bytes": 7 << 30,
                "memory_bytes": 16 << 30,
                "after_s": 0.012,
            },
        },
        "ranks": [["fast", 2], ["slow", 2]],
        "predicted": {
            "step_s": 0.124,
            "plain_step_s": 0.391,
            "damage": 0.0048,
            "tradeoff": [
                [0.171, 0.0],
                [0.15, 0.0009],
                [0.137, 0.0021],
                [0.124, 0.0048],
                [0.119, 0.012],
                [0.117, 0.03],
            ],
            "alone": {"bits": 0.21, "shares": 0.33, "precision": 0.36},
            "without": {"bits": 0.3, "shares": 0.19, "precision": 0.14},
        },
        "reasons": ["with even shares slow computes 310 ms a step and fast 98 ms, so that fast waits"],
    }


def write_run(
    folder: Path, *, steps: int = 800, ranks: int = 4, pace: float = 1.0, status: int | None = 0
) -> Path:
    """A run of `steps` steps; `pace` scales its times, `status` is rank 1's exit status."""
    folder.mkdir(parents=True)
    info = {
        "version": 1,
        "trimtab": "0.1.0",
        "command": ["trimtab", "run", "--nproc-per-node", str(ranks), "train.py"],
        "script": "train.py",
        "directory": "/home/user/job",
        "world_size": ranks,
        "started": START,
        "environment": {
            "python": "3.12.3",
            "platform": "Linux-6.8-x86_64",
            "host": "node-0",
            "cpus": 16,
            "packages": {"torch": "2.13.0", "numpy": "2.3.1"},
            "variables": {"OMP_NUM_THREADS": "4"},
        },
        "plan": "plan.json",
        "cluster": "cluster.json",
    }
    (folder / "run.json").write_text(json.dumps(info))
    for rank in range(ranks):
        events = _events(rank, ranks, steps, pace, status if rank == 1 else 0)
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def _events(rank: int, ranks: int, steps: int, pace: float, status: int | None) -> list[dict[str, Any]]:
    slow = rank >= ranks / 2 and ranks > 1
    end = START + 2
    events: list[dict[str, Any]] = [
        {
            "time": START,
            "kind": "start",
            "step": 0,
            "version": 1,
            "rank": rank,
            "world_size": ranks,
            "local_rank": rank % 2,
            "host": f"node-{rank // 2}",
            "pid": 4000 + rank,
            "restart": None,
        },
        {
            "time": START,
            "kind": "device",
            "step": 0,
            "device": "cuda:0",
            "name": "Tesla T4" if slow else "RTX 4090",
            "memory_limit": (16 if slow else 24) << 30,
        },
    ]
    if rank == 0:
        events += [
            {"time": START, "kind": "layers", "step": 0, "layers": [[name, 4096, 2] for name in LAYERS]},
            _bits(0, START, lambda at: 4),
            {"time": START, "kind": "plan", "step": 0, "hash": "9f3c21aa", "plan": plan()},
            {
                "time": START,
                "kind": "decision",
                "step": 0,
                "what": "compress",
                "noticed": "a plain exchange takes 270 ms",
                "decided": "compressing: 270 → 42 ms an exchange, 4 bits (AdamW)",
                "why": "the link is the bottleneck",
                "expected": {"plain_s": 0.27, "compressed_s": 0.042},
                "before": None,
                "after": 4,
            },
        ]
    for step, many in sampled_steps(steps):
        settled = step > steps * 0.15
        computes = [_compute(other, ranks, step, settled) * pace for other in range(ranks)]
        compute = computes[rank]
        wire = max(computes) - compute + (0.012 * pace if ranks > 1 else 0)
        parts = {"data": 0.002, "compute": compute, "codec": 0.004 * pace, "wire": wire, "optimizer": 0.009}
        end += sum(parts.values()) * many
        events.append(
            {
                "time": end,
                "kind": "step",
                "step": step,
                "steps": many,
                "seconds": sum(parts.values()),
                **parts,
                "exchange": 0.07 * pace,
                "began": end - sum(parts.values()) + 0.002,
                "ready": end - sum(parts.values()) + 0.002 + compute,
                "exchanged": end - 0.009,
                "samples": (10 if slow else 22) if settled else 16,
                "loss": 1.8 + 5.2 * math.exp(-step / 260) + 0.04 * math.sin(step),
                "memory": ((6 << 30) + (rank << 28)) + (1 << 30 if settled else 0),
                "sent": 12_500_000 if settled else 16_000_000,
                "sent_plain": 100_000_000,
                "bits": 3.1 if settled else 4.0,
            }
        )
        if step == 50:
            events.append(
                {
                    "time": end,
                    "kind": "trace",
                    "step": step,
                    "began": end - sum(parts.values()),
                    "spans": _spans(compute, max(computes)),
                }
            )
        if rank == 0 and step == int(steps * 0.15) // many * many:
            events += [
                {
                    "time": end,
                    "kind": "decision",
                    "step": step,
                    "what": "shares",
                    "noticed": "rank 2 computes 210 ms, rank 0 94 ms",
                    "decided": "batch shares 16, 16, 16, 16 → 22, 22, 10, 10",
                    "why": "so that all finish at the same time",
                    "expected": {"step_s": 0.124},
                    "before": [16] * 4,
                    "after": [22, 22, 10, 10],
                },
                _bits(step, end, lambda at: (2, 3, 4, 8)[at * 4 // len(LAYERS)] if at % 5 else 3),
            ]
    if rank == 0 and steps > 300:
        events += [
            {
                "time": end,
                "kind": "guard",
                "step": steps // 2,
                "reason": "loss rose by 4 %: two layers raised to 8 bits",
                "bits": {},
            },
            _bits(steps // 2, end, lambda at: 8 if at in (3, 4) else (2, 3, 4, 8)[at * 4 // len(LAYERS)]),
            {
                "time": end,
                "kind": "warning",
                "step": steps,
                "message": "rank 3 is 20 % slower than planned",
                "level": "warning",
            },
        ]
    if status is not None:
        events.append(
            {
                "time": end + 0.5,
                "kind": "end",
                "step": None,
                "status": status,
                "seconds": end - START,
                "dropped": 0,
                "writer_cpu_seconds": 0.04,
            }
        )
    return sorted(events, key=lambda event: event["time"])


def _compute(rank: int, ranks: int, step: int, settled: bool) -> float:
    slow = rank >= ranks / 2 and ranks > 1
    wiggle = 1 + 0.04 * math.sin(step * (rank + 2) * 0.7) + (0.5 if step % 97 == 0 else 0)
    return wiggle * (0.094 if not slow else 0.1 if settled else 0.21)


def _bits(step: int, time: float, of: Any) -> dict[str, Any]:
    bits = {name: of(at) for at, name in enumerate(LAYERS)}
    return {
        "time": time,
        "kind": "bits",
        "step": step,
        "bits": {**bits, LAYERS[0]: 0},
        "family": "block",
        "payload_bytes": 1000,
        "plain_bytes": 8000,
    }


def _spans(compute: float, slowest: float) -> list[list[Any]]:
    spans: list[list[Any]] = [
        ["data", "data", 0, 0.002],
        ["compute", "forward", 0.002, 0.002 + compute / 3],
        ["compute", "backward", 0.002 + compute / 3, 0.002 + compute],
    ]
    for bucket in range(5):
        at = 0.002 + compute / 3 + compute * 2 / 3 * (bucket + 1) / 5
        there = max(at + 0.003, 0.002 + slowest / 3 + slowest * 2 / 3 * (bucket + 1) / 5)
        spans += [
            ["codec", f"bucket {bucket}, stage 0", at, at + 0.003],
            ["wire", f"bucket {bucket}, stage 1", at + 0.003, there + 0.008],
            ["codec", f"bucket {bucket}, stage 2", there + 0.008, there + 0.01],
        ]
    end = 0.002 + slowest + 0.016
    return [
        *spans,
        ["wait", "for the last gradient", 0.002 + compute, 0.002 + slowest],
        ["optimizer", "optimizer", end, end + 0.009],
    ]
