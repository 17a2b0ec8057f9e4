"""`trimtab bench shares`: uneven ranks with equal batches, with batches by speed, and at their physical best.

Every method trains the same model on the same global batches, in blocks of steps that take turns. `ideal`
is what no data-parallel job can beat: each rank trains for itself on the batch it has under plain DDP, all
at once, nobody waits for anybody, and the rates are added. Shares change nothing about the training, so the
losses must agree; the canary, which counts each rank's mean alike, shows that the comparison would see it
if they did not.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import trimtab
from trimtab.api.loader import loader
from trimtab.bench.harness import AA, Timing
from trimtab.bench.ranks import run_on_ranks
from trimtab.bench.result import Result
from trimtab.bench.scenarios.shares.tasks import Task, make_task
from trimtab.codec import Block
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trimtab.cluster import Cluster

SPEEDS = {"cpu": ((1.0, 0.4), (1.0, 0.7, 0.4)), "cuda": ((0.7, 0.3),)}
MODELS = {"cpu": ("gpt", "digits"), "cuda": ("gpt2",)}
CANARY = "mean of means (canary)"
COMPRESSED = "shares, 4 bits"
METHODS = {
    "cpu": ("ddp", "ddp" + AA, "shares", "ideal"),
    "cuda": ("ddp", "ddp" + AA, "shares", COMPRESSED, "ideal"),
}
UNTRAINED = ("ddp" + AA, "ideal")
"""Only their speed counts, so they sit out all but the last block of the warm-up."""

BLOCK = 4
"""Steps of a method before the next has its turn."""

WARMUP = 6
"""Blocks in which shares settle; not measured."""

CONTENTION = (0.4, 40, 90, 140)
"""Speed left to the second of two equal hosts, from which step, to which, and steps in all."""


def shares(device: str, repeats: int, progress: Callable[[int, int], None]) -> Result:
    """Every speed and model in a job of its own; on CPU also a rank that slows down and recovers."""
    from trimtab.emulate import Emulation, parse_contention

    jobs = [(speeds, model) for speeds in SPEEDS[device] for model in MODELS[device]]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"device": device}
    every = len(jobs) + (device == "cpu")
    for index, (speeds, model) in enumerate(jobs):

        def moved(done: int, total: int, index: int = index) -> None:
            progress(index * total + done, every * total)

        spec: dict[str, Any] = {"device": device, "model": model, "speeds": speeds}
        spec |= {"warmup": WARMUP, "repeats": repeats, "block": BLOCK}
        with Emulation(_hosts(speeds, device)) as emulation:
            found = run_on_ranks(emulation, on_rank, spec, progress=moved)
        called = "/".join(f"{speed:g}" for speed in speeds)
        rows += [{"speeds": called, "model": model, **row} for row in found]
        summary |= _figures(f"{model}_{called}", {row["method"]: row for row in found})
    if device == "cpu":
        left, start, end, steps = CONTENTION
        slowed = parse_contention(f"b={left}@{start}:{end}")
        with Emulation(_hosts((1.0, 1.0), device), schedule=[slowed]) as emulation:
            spec = {"device": device, "steps": steps}
            taken = run_on_ranks(emulation, follow_contention, spec, progress=None)
        summary |= reaction(taken, start, end)
        progress(every, every)
    return Result(bench="shares", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """All methods in turn, block by block; rates of the last `repeats` blocks."""
    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    trainers = {method: Trainer(method, spec["model"], device) for method in METHODS[device.type]}
    # Seconds for a sample, so that ratios of blocks of one round cancel what slowed that round.
    samples: dict[str, list[float]] = {method: [] for method in trainers}
    blocks = spec["warmup"] + spec["repeats"]
    for block in range(blocks):
        lasted = 0.0
        for method, trainer in trainers.items():
            if block < spec["warmup"] - 1 and method in UNTRAINED:
                continue
            ideal = method == "ideal"
            rate, seconds = trainer.alone(lasted) if ideal else trainer.block(spec["block"])
            lasted = max(lasted, seconds)
            if block >= spec["warmup"]:
                samples[method].append(1 / rate)
        report(block + 1, blocks + 1)
    canary = Trainer(CANARY, spec["model"], device, speeds=spec["speeds"])
    for _ in range(blocks):
        canary.block(spec["block"])
    report(blocks + 1, blocks + 1)
    timings = {method: Timing(samples=tuple(values)) for method, values in samples.items()}
    rows = [
        {
            "method": method,
            "samples_per_s": 1e3 / timing.median_ms,
            "spread": timing.spread,
            "fraction_of_ideal": 1 / timing.ratio(timings["ideal"]),
            "shares": None if method == "ideal" else "/".join(map(str, trainers[method].data.shares)),
            "final_loss": None if method in UNTRAINED else trainers[method].held_out_loss(),
        }
        for method, timing in timings.items()
    ]
    shared = "/".join(map(str, canary.data.shares))
    return [*rows, {"method": CANARY, "shares": shared, "final_loss": canary.held_out_loss()}]


def follow_contention(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[float]:
    """The second rank's part of the batch in every step."""
    torch.set_num_threads(1)
    trainer = Trainer("shares", "gpt", torch.device(spec["device"]))
    taken = []
    for _ in range(spec["steps"]):
        trainer.step()
        taken.append(trainer.data.shares[1] / sum(trainer.data.shares))
    return taken


def reaction(taken: Sequence[float], start: int, end: int) -> dict[str, Any]:
    """How soon a share follows: steps until it has gone eight tenths of its way."""
    before, during, after = (float(median(taken[stop - 10 : stop])) for stop in (start, end, len(taken)))

    def steps(part: Sequence[float], old: float, new: float) -> int:
        near = [abs(share - new) <= 0.2 * abs(new - old) for share in part]
        return near.index(True)

    return {
        "contention_share_before": before,
        "contention_share_during": during,
        "contention_share_after": after,
        "reaction_steps": steps(taken[start:end], before, during),
        "recovery_steps": steps(taken[end:], during, after),
    }


class Trainer:
    """One method's model, optimiser and data."""

    def __init__(
        self, method: str, model: str, device: torch.device, *, speeds: Sequence[float] | None = None
    ) -> None:
        self._task: Task = make_task(model, device)
        self._method, self._device = method, device
        self._world = dist.get_world_size()
        self.ddp = DistributedDataParallel(self._task.model)
        if method == COMPRESSED:
            trimtab.compress(self.ddp, Block(bits=4))
        adjusts = method in ("shares", COMPRESSED)
        self.data = loader(
            self._task.train,
            self._task.each * self._world,
            shares=speeds,
            adjust=Adjust() if adjusts else None,
            drop_last=True,
        )
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=3e-4)
        self._batches: Iterator[Any] = iter(())
        self._paused = ExitStack()
        self._step_s = 0.0

    def step(self) -> None:
        """One step of the whole job."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.data)
            batch = next(self._batches)
        loss = self._loss(batch)
        weighted = self.data.weigh(loss)
        (loss if self._method == CANARY else weighted).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def block(self, steps: int) -> tuple[float, float]:
        """Samples a second over so many steps, until the last rank has ended, and the seconds of the block."""
        self._together()
        self._paused.close()  # what the other methods took is no part of this one's steps
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._paused.enter_context(self.data.waiting())
        self._together()
        taken = time.perf_counter() - start
        return steps * self._task.each * self._world / taken, taken

    def alone(self, seconds: float) -> tuple[float, float]:
        """The added rates of all ranks, each training for itself for about so long."""
        steps = max(1, round(seconds / self._step_s)) if self._step_s else 1
        self._together()
        start = time.perf_counter()
        for _ in range(steps):
            batch = next(self._batches, None)
            if batch is None:
                self._batches = iter(DataLoader(self._task.train, self._task.each, drop_last=True))
                batch = next(self._batches)
            with self.ddp.no_sync():
                self._loss(batch).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._finish()
        taken = time.perf_counter() - start
        self._step_s = taken / steps
        rate = torch.tensor([self._task.each / self._step_s], device=self._device)
        dist.all_reduce(rate)
        return float(rate), taken

    def held_out_loss(self) -> float:
        """Mean loss on samples that were not trained on."""
        with torch.no_grad():
            losses = [
                self._task.loss(self.ddp.module, self._to_device(batch)).float()
                for batch in DataLoader(self._task.held_out, 16, drop_last=True)
            ]
        return float(torch.stack(losses).mean())

    def _loss(self, batch: Any) -> torch.Tensor:
        cuda = self._device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            return self._task.loss(self.ddp, self._to_device(batch))

    def _to_device(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.to(self._device)
        return [part.to(self._device) for part in batch]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _together(self) -> None:
        self._finish()
        dist.barrier()
        self._finish()


def _figures(called: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of one job: the best method over plain DDP and against ideal, and what it did to the loss."""
    best = rows.get(COMPRESSED, rows["shares"])
    loss = rows["ddp"]["final_loss"]
    return {
        f"{called}_fraction_of_ideal": best["fraction_of_ideal"],
        f"{called}_over_ddp": best["samples_per_s"] / rows["ddp"]["samples_per_s"],
        f"{called}_loss_gap": abs(rows["shares"]["final_loss"] - loss),
        f"{called}_canary_gap": abs(rows[CANARY]["final_loss"] - loss),
        f"{called}_aa_ratio": rows["ddp" + AA]["samples_per_s"] / rows["ddp"]["samples_per_s"],
    }


def _hosts(speeds: Sequence[float], device: str) -> Cluster:
    """A host of one rank for each speed."""
    from trimtab.cluster import Cluster, Device, Host

    kind: Any = device
    classes = {f"d{i}": Device(kind=kind, speed=speed) for i, speed in enumerate(speeds)}
    hosts = tuple(Host(name="abcd"[i], devices={f"d{i}": 1}) for i in range(len(speeds)))
    return Cluster(version=1, devices=classes, hosts=hosts)
