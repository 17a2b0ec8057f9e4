"""What every rank of `trimtab demo` runs: the same training by each method, in blocks that take turns."""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import trimtab
from trimtab.api.loader import loader
from trimtab.bench.ranks import wire_bytes
from trimtab.bench.scenarios.hybrid import plan as hybrid_plan
from trimtab.bench.scenarios.shares.tasks import Passages, Task
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.models.gpt import Gpt
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trimtab.planning.plan import Plan

PLAIN, BITS, SHARES, PLAN = "plain DDP", "trimtab.compress", "+ trimtab.loader", "trimtab.apply(plan)"
IDEAL = "fp32, nothing sent"
EACH = 8
"""Samples of a rank when all have the same."""

CONTEXT = 128
BLOCK, SETTLING, COUNTED = 3, 4, 2
"""Steps of a method before the next has its turn; blocks in which shares settle; blocks that count."""


def cluster(*, shaped: bool) -> Cluster:
    """Two hosts, the second at half the speed of the first, and where links can be shaped a slow one."""
    link = "office" if shaped else None
    return Cluster(
        version=1,
        devices={"fast": Device(kind="cpu", speed=1.0), "slow": Device(kind="cpu", speed=0.5)},
        links={"office": Link(gbit_per_s=0.2)} if shaped else {},
        hosts=(
            Host(name="a", devices={"fast": 1}, link=link),
            Host(name="b", devices={"slow": 1}, link=link),
        ),
    )


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Rows of the demo's table, and what trimtab says about the compression and the plan."""
    torch.set_num_threads(1)
    blocks = SETTLING + COUNTED
    report(0, blocks + 2)
    plan = make_plan(cluster(shaped=spec["shaped"]))
    report(1, blocks + 2)
    runs = {method: Run(method, plan) for method in (PLAIN, BITS, SHARES, PLAN, IDEAL)}
    rates: dict[str, list[float]] = {method: [] for method in runs}
    for block in range(blocks):
        for method, run in runs.items():
            if block < SETTLING - 1 and method in (PLAIN, IDEAL):
                continue  # nothing about them settles; they only need their share of training below
            rates[method].append(run.alone() if method == IDEAL else run.block())
        report(block + 2, blocks + 2)
    for _ in range(SETTLING - 1):
        runs[PLAIN].block()  # so that all have trained equally long when losses are compared
    report(blocks + 2, blocks + 2)
    rate = {method: median(values[-COUNTED:]) for method, values in rates.items()}
    rows = [
        {
            "method": method,
            "samples_per_s": rate[method],
            "over_ddp": rate[method] / rate[PLAIN],
            "wire_mb": None if method == IDEAL else run.wire_mb,
            "shares": None if method == IDEAL else "/".join(map(str, run.data.shares)),
            "lowered": "/".join(map(str, lowered(plan))) if method == PLAN else None,
            "loss": None if method == IDEAL else run.held_out_loss(),
        }
        for method, run in runs.items()
    ]
    numel = sum(p.numel() for p in runs[PLAIN].ddp.parameters())
    title = f"A GPT of {numel / 1e6:.0f} million parameters, {blocks * BLOCK} steps of {2 * EACH} samples"
    said = {"trimtab.compress": trimtab.explain(runs[BITS].ddp), "the plan": "; ".join(plan.reasons)}
    return {"title": title, "rows": rows, "said": said}


def task() -> Task:
    """What every method trains, from the same start."""
    torch.manual_seed(0)
    passages = Passages(CONTEXT + 1)
    some = len(passages) - 64
    return Task(
        model=Gpt(width=256, layers=4, heads=8, context=CONTEXT),
        train=Subset(passages, range(some)),
        held_out=Subset(passages, range(some, some + 64)),
        loss=lambda model, batch: model(batch),
        each=EACH,
    )


def make_plan(where: Cluster) -> Plan:
    """Probed, and planned, inside the job; `trimtab probe` and `trimtab plan` do it from outside."""
    return hybrid_plan.make(task(), where, torch.device("cpu"), None, bits="adaptive").free


def lowered(plan: Plan) -> list[int]:
    """Operators in lower precision, by rank."""
    return [len(plan.roles[plan.role_of(rank)].precisions) for rank in range(plan.world_size)]


class Run:
    """One method's model, optimiser and data."""

    def __init__(self, method: str, plan: Plan) -> None:
        of = task()
        self._train, self._held_out = of.train, of.held_out
        self.ddp = DistributedDataParallel(of.model)
        if method == PLAN:
            trimtab.apply(self.ddp, plan)
        elif method not in (PLAIN, IDEAL):
            trimtab.compress(self.ddp)
        self.data = loader(
            self._train,
            EACH * dist.get_world_size(),
            adjust=Adjust() if method in (SHARES, PLAN) else None,
            plan=self.ddp if method == PLAN else None,
            drop_last=True,
        )
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self._batches: Iterator[Any] = iter(())
        self._paused = ExitStack()
        self.wire_mb = 0.0

    def block(self) -> float:
        """Samples a second of the whole job over some steps."""
        dist.barrier()
        self._paused.close()  # what the other methods took is no part of this one's steps
        sent, start = wire_bytes(), time.perf_counter()
        for _ in range(BLOCK):
            batch = self._next(self.data)
            self.data.weigh(self.ddp(batch)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._paused.enter_context(self.data.waiting())
        dist.barrier()
        self.wire_mb = (wire_bytes() - sent) / 1e6 / BLOCK
        return BLOCK * EACH * dist.get_world_size() / (time.perf_counter() - start)

    def alone(self) -> float:
        """The added rates of the ranks, each training for itself."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(BLOCK):
            batch = self._next(DataLoader(self._train, EACH, drop_last=True))
            with self.ddp.no_sync():
                self.ddp(batch).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        rate = torch.tensor([BLOCK * EACH / (time.perf_counter() - start)])
        dist.all_reduce(rate)
        return float(rate)

    def held_out_loss(self) -> float:
        """Mean loss on samples that were not trained on."""
        with torch.no_grad():
            losses = [self.ddp.module(batch) for batch in DataLoader(self._held_out, 16)]
        return float(torch.stack(losses).mean())

    def _next(self, data: Any) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(data)
            batch = next(self._batches)
        return batch
