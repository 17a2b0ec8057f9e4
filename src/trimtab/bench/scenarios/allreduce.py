"""`trimtab bench allreduce`: how long a plain all-reduce takes, by size and link rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trimtab.bench.harness import AA, Progress, Result, interleave, part
from trimtab.bench.ranks import run_on_cluster, two_hosts, wire_bytes
from trimtab.cluster import parse_rate
from trimtab.measure.timing import lockstep_seconds


def allreduce(link: Sequence[str], size_mb: Sequence[int], repeats: int, progress: Any) -> Result:
    """Two emulated hosts; for each link rate ("none": unshaped) every size in turn, in one job.

    `over_floor` is the time divided by that of the same bytes at the link's full rate.
    """
    rows: list[dict[str, Any]] = []
    for index, rate in enumerate(link):
        spec = {"sizes_mb": list(size_mb), "repeats": repeats}
        measured = run_on_cluster(two_hosts(rate), on_rank, spec, part(progress, index, len(link)))
        for row in measured:
            floor_ms = row["wire_mb"] * 8 / parse_rate(rate) if rate != "none" else None
            over = row["ms"] / floor_ms if floor_ms else None
            rows.append({"method": row.pop("method"), "link": rate, **row, "over_floor": over})
    largest = [row for row in rows if row["mb"] == max(size_mb)]
    summary: dict[str, Any] = {f"{row['link']}_ms": row["ms"] for row in largest if AA not in row["method"]}
    noise = [row["aa_ratio"] for row in rows if AA in row["method"]]
    summary["aa_worst"] = max(abs(ratio - 1) for ratio in noise)
    return Result(bench="allreduce", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Each size twice (the second is the A/A row), interleaved."""
    world = dist.get_world_size()
    buffers = {size: torch.randn(size * 1_000_000 // 4) for size in spec["sizes_mb"]}

    def timed(buffer: torch.Tensor) -> float:
        buffer.fill_(1.0)
        return lockstep_seconds(lambda: dist.all_reduce(buffer), buffer.device)

    cases = {
        f"{size}{suffix}": partial(timed, buffer) for size, buffer in buffers.items() for suffix in ("", AA)
    }
    timings = interleave(cases, warmup=1, repeats=spec["repeats"], progress=report)
    rows = []
    for size, buffer in buffers.items():
        assert float(buffer[0]) == world, "an all-reduce of ones gives the number of ranks"
        before = wire_bytes()
        dist.all_reduce(buffer)
        dist.barrier()
        wire_mb = (wire_bytes() - before) / 1e6
        plain, again = timings[str(size)], timings[f"{size}{AA}"]
        for name, timing in (("all-reduce", plain), ("all-reduce" + AA, again)):
            rows.append(
                {
                    "method": name,
                    "mb": size,
                    "ms": timing.median_ms,
                    "spread": timing.spread,
                    "aa_ratio": timing.ratio(plain),
                    "wire_mb": wire_mb,
                }
            )
    return rows
