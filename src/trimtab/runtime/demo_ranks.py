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
from trimtab.bench.gpt import Gpt
from trimtab.bench.ranks import wire_bytes
from trimtab.bench.share_tasks import Passages
from trimtab.plan.batch_shares import Adjust
from trimtab.precision.devices import offers
from trimtab.runtime.loader import loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PLAIN, BITS, SHARES, INT8 = "plain DDP", "trimtab.compress", "+ trimtab.loader", "+ int8 on host b"
IDEAL = "no communication"
EACH = 8
"""Samples of a rank when all have the same."""

CONTEXT = 128
BLOCK, SETTLING, COUNTED = 3, 4, 2
"""Steps of a method before the next has its turn; blocks in which shares settle; blocks that count."""


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Rows of the demo's table, and what trimtab says about the compression."""
    torch.set_num_threads(1)
    methods = [PLAIN, BITS, SHARES]
    if "int8" in offers(torch.device("cpu"))["linear"]:
        methods.append(INT8)
    runs = {method: Run(method) for method in (*methods, IDEAL)}
    rates: dict[str, list[float]] = {method: [] for method in runs}
    blocks = SETTLING + COUNTED
    for block in range(blocks):
        for method, run in runs.items():
            if block < SETTLING - 1 and method in (PLAIN, IDEAL):
                continue  # nothing about them settles; they only need their share of training below
            rates[method].append(run.alone() if method == IDEAL else run.block())
        report(block + 1, blocks + 1)
    for _ in range(SETTLING - 1):
        runs[PLAIN].block()  # so that all have trained equally long when losses are compared
    report(blocks + 1, blocks + 1)
    rate = {method: median(values[-COUNTED:]) for method, values in rates.items()}
    rows = [
        {
            "method": method,
            "samples_per_s": rate[method],
            "over_ddp": rate[method] / rate[PLAIN],
            "wire_mb": None if method == IDEAL else run.wire_mb,
            "shares": None if method == IDEAL else "/".join(map(str, run.data.shares)),
            "loss": None if method == IDEAL else run.held_out_loss(),
        }
        for method, run in runs.items()
    ]
    numel = sum(p.numel() for p in runs[PLAIN].ddp.parameters())
    title = f"A GPT of {numel / 1e6:.0f} million parameters, {blocks * BLOCK} steps of {2 * EACH} samples"
    return {"title": title, "rows": rows, "explain": trimtab.explain(runs[BITS].ddp)}


class Run:
    """One method's model, optimiser and data."""

    def __init__(self, method: str) -> None:
        torch.manual_seed(0)
        model = Gpt(width=256, layers=6, heads=8, context=CONTEXT)
        if method == INT8 and dist.get_rank() == 1:
            trimtab.set_precision(model, {"blocks.*": "int8"})
        self.ddp = DistributedDataParallel(model)
        if method not in (PLAIN, IDEAL):
            trimtab.compress(self.ddp)
        passages = Passages(CONTEXT + 1)
        some = len(passages) - 64
        self._train, self._held_out = Subset(passages, range(some)), Subset(passages, range(some, some + 64))
        follows = method in (SHARES, INT8)
        self.data = loader(
            self._train, EACH * dist.get_world_size(), adjust=Adjust() if follows else None, drop_last=True
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
