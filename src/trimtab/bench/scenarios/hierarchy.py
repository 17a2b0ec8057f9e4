"""`trimtab bench hierarchy`: two hosts of two ranks at a slow link, flat and in two levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.bench.clusters import hosts, two_hosts
from trimtab.bench.harness import AA, interleave
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.result import Result
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block, Uncompressed
from trimtab.collectives import Hierarchy, SharedMemory
from trimtab.doors.ddp import DdpCompression, stage_groups
from trimtab.models import tasks

CPU = torch.device("cpu")
PLAIN, IDEAL = "flat plain", "ideal"
METHODS = (
    PLAIN,
    PLAIN + AA,
    "flat compressed",
    "hierarchical plain, gloo",
    "hierarchical plain, shared memory",
    "hierarchical compressed, gloo",
    "hierarchical compressed, shared memory",
    IDEAL,
)


def hierarchy(
    link: str,
    layers: int,
    inside_mb: int,
    repeats: int,
    progress: Callable[[int, int], None],
) -> Result:
    """Training steps by every way on two emulated hosts of two ranks; then an all-reduce inside one host.

    A flat reduction has no stage inside a host, so it has one row, over Gloo.
    """
    rows = run_on_cluster(
        two_hosts(link, per_host=2),
        on_rank,
        {"layers": layers, "repeats": repeats},
        lambda done, total: progress(done, total + 2),
    )
    spec = {"mb": inside_mb, "repeats": 2 * repeats + 1}
    inside = run_on_cluster(hosts((1.0,), per_host=2), inside_on_rank, spec)
    progress(1, 1)
    by_name = {row["method"]: row for row in rows}
    best = by_name["hierarchical compressed, shared memory"]
    rivals = [row for name, row in by_name.items() if row is not best and name != IDEAL]
    shared, gloo = inside[-1], inside[0]
    summary: dict[str, Any] = {
        "link": link,
        "hierarchical_compressed_over_best_other": min(row["step_ms"] for row in rivals) / best["step_ms"],
        "hierarchical_compressed_over_flat_plain": by_name[PLAIN]["step_ms"] / best["step_ms"],
        "hierarchical_compressed_over_flat_compressed": by_name["flat compressed"]["step_ms"]
        / best["step_ms"],
        "hierarchical_compressed_of_ideal": best["fraction_of_ideal"],
        "wire_flat_over_hierarchical_compressed": by_name["flat compressed"]["wire_mb_between_hosts"]
        / best["wire_mb_between_hosts"],
        "shared_memory_over_gloo_inside": gloo["step_ms"] / shared["step_ms"],
        "aa_ratio": by_name[PLAIN + AA]["step_ms"] / by_name[PLAIN]["step_ms"],
        "aa_ratio_inside": inside[1]["step_ms"] / gloo["step_ms"],
    }
    return Result(bench="hierarchy", summary=summary, rows=[*rows, *inside])


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """One copy of the model for each method, all from the same start and on the same data."""
    world = dist.group.WORLD
    assert world is not None
    groups = stage_groups(world, CPU)
    levels = {
        "gloo": Hierarchy(world, CPU, shared_memory=False),
        "shared memory": Hierarchy(world, CPU, shared_memory=True),
    }
    trainers = {method: Method(method, spec["layers"], groups, levels) for method in METHODS}
    cases = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(cases, warmup=2, repeats=spec["repeats"], progress=report)
    rows = [
        {
            "method": method,
            "step_ms": timing.median_ms,
            "spread": timing.spread,
            "fraction_of_ideal": 1 / timing.ratio(timings[IDEAL]),
            "wire_mb_between_hosts": trainers[method].wire_mb,
            "loss": trainers[method].loss,
        }
        for method, timing in timings.items()
    ]
    for trainer in trainers.values():
        trainer.close()
    for level in levels.values():
        level.close()
    return rows


class Method(Trainer):
    """One method's model, optimizer and communication.

    The counter of sent bytes is that of the host's interface: what this host sent to the other.
    """

    def __init__(
        self,
        method: str,
        layers: int,
        groups: tuple[dist.ProcessGroup, ...],
        levels: Mapping[str, Hierarchy],
    ) -> None:
        task = tasks.gpt(width=512, layers=layers, heads=8, context=16, samples=1)
        # Views: eight models on each of four ranks must fit in memory.
        ddp = DistributedDataParallel(task.model, gradient_as_bucket_view=True)
        self._compression: DdpCompression | None = None
        kind, _, inside = method.removesuffix(AA).partition(", ")
        if kind not in (PLAIN, IDEAL):
            codec = Block(bits=4) if kind.endswith("compressed") else Uncompressed()
            self._compression = DdpCompression(
                ddp, codec, groups=groups, hierarchy=levels[inside] if inside else None
            )
            ddp.register_comm_hook(None, self._compression.reduce)
        super().__init__(
            ddp,
            torch.optim.SGD(ddp.parameters(), lr=0.05),
            lambda step: task.batch(step=step, rank=dist.get_rank()),
            silent=kind == IDEAL,
        )

    def close(self) -> None:
        if self._compression is not None:
            self._compression.close()


def inside_on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """An all-reduce between two ranks of one host: Gloo over the loopback, again, and shared memory."""
    world = dist.group.WORLD
    assert world is not None
    shared = SharedMemory(world, CPU)
    values = torch.randn(spec["mb"] * 1_000_000 // 4)
    half = 1 / dist.get_world_size()

    def case(run: Callable[[torch.Tensor], None]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            start = time.perf_counter()
            run(values)
            dist.barrier()
            return time.perf_counter() - start

        return timed

    def gloo(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        tensor.mul_(half)

    prefix = f"all-reduce of {spec['mb']} MB inside a host, "
    cases = {
        prefix + "gloo": case(gloo),
        prefix + "gloo" + AA: case(gloo),
        prefix + "shared memory": case(lambda tensor: shared.all_reduce(tensor, scale=half)),
    }
    timings = interleave(cases, warmup=2, repeats=spec["repeats"], progress=report)
    shared.close()
    return [
        {"method": name, "step_ms": timing.median_ms, "spread": timing.spread}
        for name, timing in timings.items()
    ]
