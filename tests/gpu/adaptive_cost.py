"""`python -m tests.gpu.adaptive_cost`: statistics of gradients on the GPU agree with the CPU's, and what they cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from trimtab.collectives import Piece
from trimtab.control.compression.statistics import Statistics
from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings

WIDTH, LAYERS = 768, 12
PARTS = {"qkv": 3, "proj": 1, "fc": 4, "out": 4}


def buckets(device: torch.device) -> list[tuple[list[Piece], torch.Tensor]]:
    """GPT-2's matrices in buckets of about 25 MB; the first layer has overflowed."""
    sizes = {f"h{i}.{part}": WIDTH * WIDTH * n for i in range(LAYERS) for part, n in PARTS.items()}
    sizes["wte"] = 50257 * WIDTH
    found, pieces, offset = [], [], 0
    for name, numel in sizes.items():
        pieces.append(Piece(name=name, offset=offset, numel=numel, bits=4, block=128))
        offset += numel
        if offset > 6_500_000 or name == "wte":
            values = torch.randn(offset, generator=torch.Generator().manual_seed(offset))
            found.append((pieces, values.to(device)))
            pieces, offset = [], 0
    return found


def statistics_of(made: list[tuple[list[Piece], torch.Tensor]]) -> Statistics:
    device = made[0][1].device
    return Statistics({p.name: (p.numel, 1024) for pieces, _ in made for p in pieces}, device)


def train(statistics: Statistics, made: list[tuple[list[Piece], torch.Tensor]]) -> None:
    for step in range(3):
        for index, (pieces, flat) in enumerate(made):
            values = flat * (step + 1)
            if step == 2 and index == 0:
                values[0] = torch.nan
            statistics.add(pieces, values)
        statistics.fold()
    for pieces, flat in made:
        statistics.keep(pieces, flat)


def decide(statistics: Statistics, *, plan: bool) -> dict[str, Any]:
    bits = dict.fromkeys(statistics.samples, 4)
    planner = BitPlanner("dynamic", PlannerSettings(name="bits-scaled", gbit_per_s=1.0), guard=True)
    snapshot = statistics.snapshot(None, bits)
    return planner.decide(20, snapshot.layers(), bits, loss=None, may_plan=plan, period=100)


def cpu_ms(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return median(times) * 1e3


def main() -> None:
    here, there = torch.device("cpu"), torch.device("cuda")
    on_cpu, on_gpu = buckets(here), buckets(there)
    ours, theirs = statistics_of(on_cpu), statistics_of(on_gpu)
    train(ours, on_cpu)
    train(theirs, on_gpu)
    apart = max(float((theirs.averages[n].cpu() - ours.averages[n]).abs().max()) for n in ours.averages)
    overflow = [name for name, value in theirs.averages.items() if not bool(value.isfinite().all())]
    same = decide(ours, plan=True) == decide(theirs, plan=True)

    def add() -> None:
        for pieces, flat in on_gpu:
            theirs.add(pieces, flat)
        theirs.fold()

    def look() -> None:
        for pieces, flat in on_gpu:
            theirs.keep(pieces, flat)
        decide(theirs, plan=False)

    costs = {
        "sample_ms": cpu_ms(add),
        "look_ms": cpu_ms(look),
        "plan_ms": cpu_ms(lambda: decide(theirs, plan=True)),
    }
    costs["a_step_ms"] = costs["sample_ms"] / 5 + costs["look_ms"] / 20 + costs["plan_ms"] / 100
    print(json.dumps({"apart": apart, "overflow": overflow, "same_decision": same, **costs}))


if __name__ == "__main__":
    main()
