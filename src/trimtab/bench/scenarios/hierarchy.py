"""`trimtab bench hierarchy`: hosts of several ranks, of unequal numbers too, flat and in two levels at a slow link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.bench.harness import AA, Progress, Result, interleave
from trimtab.bench.ranks import hosts as equal_hosts
from trimtab.bench.ranks import one_host, run_on_cluster
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block, Uncompressed
from trimtab.collectives import Hierarchy, SharedMemory
from trimtab.doors.ddp import DdpCompression, stage_groups
from trimtab.measure.timing import slowest_seconds
from trimtab.models import tasks

CPU = torch.device("cpu")
PLAIN, IDEAL = "flat plain", "ideal"
METHODS = (
    PLAIN,
    PLAIN + AA,
    "flat compressed",
    "flat compressed ring",
    "hierarchical plain, gloo",
    "hierarchical plain, shared memory",
    "hierarchical compressed, gloo",
    "hierarchical compressed, shared memory",
    IDEAL,
)


def hierarchy(
    link: str, hosts: Sequence[int], layers: int, inside_mb: int, repeats: int, progress: Progress
) -> Result:
    """Training steps by every way on emulated hosts of some ranks each; then an all-reduce inside one host.

    A flat reduction has no stage inside a host, so it has one row, over Gloo.
    """
    rows = run_on_cluster(
        equal_hosts((1.0,) * len(hosts), link=link, per_host=hosts),
        on_rank,
        {"layers": layers, "repeats": repeats},
        lambda done, total: progress(done, total + 2),
    )
    spec = {"mb": inside_mb, "repeats": 2 * repeats + 1}
    inside = run_on_cluster(one_host(), inside_on_rank, spec)
    progress(1, 1)
    best = "hierarchical compressed, shared memory"
    ms = {row["method"]: row["step_ms"] for row in rows}
    wire = {row["method"]: row["wire_mb_between_hosts"] for row in rows}
    gloo, again, shared = (row["step_ms"] for row in inside)
    shape = "+".join(map(str, hosts))
    summary: dict[str, Any] = {
        "link": link,
        "hosts": shape,
        "two_levels_over_best_flat": min(ms[method] for method in ms if method.startswith("flat")) / ms[best],
        "hierarchical_compressed_over_best_other": min(ms[m] for m in ms if m not in (best, IDEAL))
        / ms[best],
        "hierarchical_compressed_over_flat_plain": ms[PLAIN] / ms[best],
        "hierarchical_compressed_over_flat_compressed": ms["flat compressed"] / ms[best],
        "hierarchical_compressed_of_ideal": next(r["fraction_of_ideal"] for r in rows if r["method"] == best),
        "wire_flat_over_hierarchical_compressed": wire["flat compressed"] / wire[best],
        "shared_memory_over_gloo_inside": gloo / shared,
        "aa_ratio": ms[PLAIN + AA] / ms[PLAIN],
        "aa_ratio_inside": again / gloo,
    }
    return Result(
        bench="hierarchy", summary=summary, rows=[*({"hosts": shape, **row} for row in rows), *inside]
    )


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
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
            **timing.step,
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
        self, method: str, layers: int, groups: tuple[dist.ProcessGroup, ...], levels: Mapping[str, Hierarchy]
    ) -> None:
        task = tasks.gpt(width=512, layers=layers, heads=8, context=16, samples=1)
        # Views: nine models on each of four ranks must fit in memory.
        ddp = DistributedDataParallel(task.model, gradient_as_bucket_view=True)
        self._compression: DdpCompression | None = None
        kind, _, inside = method.removesuffix(AA).partition(", ")
        if kind not in (PLAIN, IDEAL):
            ring = kind.endswith("ring")
            self._compression = DdpCompression(
                ddp,
                Uncompressed() if kind.endswith("plain") else Block(bits=4),
                groups=groups,
                hierarchy=levels[inside] if inside else None,
                method="ring" if ring else None,
            )
            ddp.register_comm_hook(None, self._compression.reduce)
        super().__init__(
            ddp,
            # Small batches, for short steps: at 0.05 the losses depended on the last bit of the first gradients.
            torch.optim.SGD(ddp.parameters(), lr=0.01),
            lambda step: task.batch(step=step, rank=dist.get_rank()),
            silent=kind == IDEAL,
        )

    def close(self) -> None:
        if self._compression is not None:
            self._compression.close()


def inside_on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """An all-reduce between two ranks of one host: Gloo over the loopback, again, and shared memory."""
    world = dist.group.WORLD
    assert world is not None
    shared = SharedMemory(world, CPU)
    values = torch.randn(spec["mb"] * 1_000_000 // 4)
    half = 1 / dist.get_world_size()

    def gloo() -> None:
        dist.all_reduce(values)
        values.mul_(half)

    prefix = f"all-reduce of {spec['mb']} MB inside a host, "
    cases = {
        prefix + "gloo": gloo,
        prefix + "gloo" + AA: gloo,
        prefix + "shared memory": lambda: shared.all_reduce(values, scale=half),
    }
    timed = {name: partial(slowest_seconds, run, CPU) for name, run in cases.items()}
    timings = interleave(timed, warmup=2, repeats=spec["repeats"], progress=report)
    shared.close()
    return [{"method": name, **timing.step} for name, timing in timings.items()]
