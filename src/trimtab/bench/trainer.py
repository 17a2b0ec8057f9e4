"""The one trainer of the benches: a wrapped model, its optimizer and its batches, and `step()`, which measures.

Scenarios configure it: the model comes wrapped in DDP, in FSDP2, or bare; what `trimtab.compress`, `trimtab.apply`
and the like do to it has been done before. `LoaderTrainer` trains on a loader's batch shares, `TensorTrainer` splits
the layers over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import count
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from trimtab.api.loader import loader
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import Progress, Timing
from trimtab.bench.ranks import wire_bytes
from trimtab.control.rank_values import gather_numbers
from trimtab.control.shares.rounds import RoundLoader
from trimtab.measure.local_clock import LocalClock
from trimtab.measure.timing import meet, synchronize
from trimtab.models.gpt import TransformerLayer
from trimtab.models.tasks import CPU, Task
from trimtab.planning.tensor.balance import Balance
from trimtab.planning.tensor.shares import water_level
from trimtab.sharding import Attention, Clock, LocalTimes, Mlp
from trimtab.sharding.unit_block import sharded_model
from trimtab.sharding.unit_kinds import UnitKind

Batch = tuple[torch.Tensor, ...]


def autocast(device: torch.device) -> Any:
    """What models compute in where a bench does not say otherwise: fp32 on a CPU, bf16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Trainer:
    """One method's model, optimizer and batches on this rank. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[int], Batch],
        device: torch.device = CPU,
        *,
        half: bool = False,
        silent: bool = False,
    ) -> None:
        """
        Args:
            model: returns its loss.
            batch: the model's arguments in a step.
            half: computes in bf16 on a GPU.
            silent: DDP does not communicate.
        """
        self.model, self.optimizer, self.batch, self.device = model, optimizer, batch, device
        self._half, self._silent = half, silent
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.own_seconds = 0.0
        """What this rank needed in the last step; the last of `seconds` is the slowest rank's."""
        self.sent_before, self.wire_mb = 0, 0.0
        """What this rank's interface had sent before the last step, and sent in it."""

    @property
    def module(self) -> nn.Module:
        """The model without DDP around it."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def loss(self) -> float:
        return self.losses[-1] if self.losses else float("nan")

    def forward(self, batch: Batch) -> torch.Tensor:
        with autocast(self.device) if self._half else nullcontext():
            loss: torch.Tensor = self.model(*batch)
        return loss

    def train(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; returns its loss."""
        with self.model.no_sync() if self._silent else nullcontext():  # type: ignore[operator]
            loss = self.forward(batch)
            self.weigh(loss).backward()
        self.optimizer.step()
        # Without communication DDP does not keep its views of gradients: they must not be allocated anew each step.
        views = getattr(self.model, "gradient_as_bucket_view", False)
        self.optimizer.zero_grad(set_to_none=not (self._silent and views))
        return loss.detach()

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it enters the backward pass."""
        return loss

    def step(self) -> float:
        """Train on the next batch; returns the seconds that the slowest rank needed."""
        batch = self.batch(len(self.losses))
        meet(self.device)
        self.sent_before = wire_bytes()
        start = time.perf_counter()
        loss = self.train(batch)
        synchronize(self.device)
        self.own_seconds = time.perf_counter() - start
        slowest = torch.tensor([self.own_seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        # Read once all ranks have finished: what a rank sends may wait in the queue of its interface.
        self.wire_mb = (wire_bytes() - self.sent_before) / 1e6
        self.losses.append(float(loss))
        self.seconds.append(float(slowest))
        return self.seconds[-1]


class LoaderTrainer(Trainer):
    """Trains on global batches that a loader shares out, in blocks of steps that take turns with other methods."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        task: Task,
        *,
        lr: float,
        samples: int | None = None,
        weighted: bool = True,
        **sharing: Any,
    ) -> None:
        """
        Args:
            samples: this rank's batch while it trains alone; the task's by default.
            weighted: False counts each rank's mean alike, which is wrong where shares differ.
            sharing: options of `trimtab.loader`.
        """
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=lr)
        super().__init__(ddp, optimizer, lambda step: self._next(self.data), task.device, half=True)
        self.task = task
        self.data = loader(task.train, task.samples * dist.get_world_size(), drop_last=True, **sharing)
        self._own_samples, self._weighted = samples or task.samples, weighted
        self._batches: Iterator[Any] = iter(())
        self._paused = ExitStack()
        self._alone_s = 0.0
        self._clock = LocalClock(task.device)
        self.own_steps: list[tuple[float, ...]] = []
        """On a CPU: each rank's own seconds of each step, without exchanging gradients or waiting for others."""

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        weighted = self.data.weigh(loss)
        chosen = weighted if self._weighted else loss
        self._clock.follow(chosen)
        return chosen

    def block(self, steps: int) -> tuple[float, float]:
        """Train for some steps; returns the job's samples a second, and the seconds until the last rank finished.

        Where ranks take unequal numbers of steps, `steps` is the length of a round, and the block is one round.
        """
        rounds = isinstance(self.data, RoundLoader)
        meet(self.device)
        self._paused.close()  # what the other methods took is no part of this one's steps
        sent, start = wire_bytes(), time.perf_counter()
        own = []
        for step in count():
            self.train(self.batch(step))
            if self.device.type == "cpu" and not rounds:  # on a GPU reading the clock would wait
                self._clock.end_step()
                own.append(self._clock.read())
            if self.data.round_ends if rounds else step + 1 == steps:
                break
        self._paused.enter_context(self.data.waiting())
        self._paused.enter_context(self._clock.waiting())
        meet(self.device)
        seconds = time.perf_counter() - start
        if own:
            self.own_steps += zip(*gather_numbers(own, None), strict=True)
        self.wire_mb = (wire_bytes() - sent) / 1e6 / steps
        return steps * self.task.samples * dist.get_world_size() / seconds, seconds

    def alone(self, seconds: float) -> tuple[float, float]:
        """Each rank trains by itself, without communication, for about so long; returns the sum of their rates."""
        steps = max(1, round(seconds / self._alone_s)) if self._alone_s else 1
        data = DataLoader(self.task.train, self._own_samples, drop_last=True)
        meet(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            batch = self._next(data)
            with self.model.no_sync():  # type: ignore[operator]
                self.forward(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        synchronize(self.device)
        elapsed = time.perf_counter() - start
        self._alone_s = elapsed / steps
        rate = torch.tensor([self._own_samples / self._alone_s], device=self.device)
        dist.all_reduce(rate)
        return float(rate), elapsed

    def held_out_loss(self) -> float:
        return self.task.held_out_loss(self.module)

    def _next(self, data: Any) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(data)
            batch = next(self._batches)
        return self.task.to_device(batch)


def take_turns(
    trainers: Mapping[str, LoaderTrainer],
    alone: Sequence[str],
    untrained: Sequence[str],
    *,
    warmup: int,
    repeats: int,
    steps: int,
    report: Progress,
    few: Mapping[str, int] | None = None,
) -> dict[str, Timing]:
    """All methods in turn, in blocks of steps: the seconds of a sample, so that what slows a whole round cancels out.

    Args:
        alone: methods in which each rank trains by itself.
        untrained: methods of which only the speed counts; they sit out all but the last block of the warm-up.
        few: methods whose blocks have another number of steps.
    """
    samples: dict[str, list[float]] = {method: [] for method in trainers}
    for block in range(warmup + repeats):
        longest = 0.0
        for method, trainer in trainers.items():
            if block < warmup - 1 and method in untrained:
                continue
            rate, seconds = (
                trainer.alone(longest) if method in alone else trainer.block((few or {}).get(method, steps))
            )
            longest = max(longest, seconds)
            if block >= warmup:
                samples[method].append(1 / rate)
        report(block + 1, warmup + repeats)
    return {method: Timing(samples=tuple(values)) for method, values in samples.items()}


def lost(own: Sequence[Sequence[float]], step_s: float, ideal_s: float) -> dict[str, float]:
    """Where the time of a step beyond the ideal one goes, as parts of the step.

    Args:
        own: for each step the ranks' own seconds.
    """
    own = [times for times in own if all(own_s > 0 for own_s in times)]  # the first step of all is not timed
    slowest = max(fmean(times) for times in zip(*own, strict=True))
    waited = fmean(max(times) for times in own)
    return {
        "lost_to_balance": (slowest - ideal_s) / step_s,
        "lost_to_variation": (waited - slowest) / step_s,
        "lost_to_exchange": (step_s - waited) / step_s,
    }


KINDS: dict[type[nn.Module], UnitKind | Sequence[UnitKind]] = {
    TransformerLayer: (Attention(qkv="qkv", out="out"), Mlp(ins=("up",), out="down"))
}
"""Where the units of the benches' models are."""


class TensorTrainer(Trainer):
    """Trains a model whose layers are split over all ranks; with a clock it also times what each rank does itself."""

    def __init__(
        self,
        task: Task,
        *,
        shares: Any = None,
        balance: Balance | None = None,
        clock: bool = False,
        prepare: Callable[[nn.Module], None] = lambda model: None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
        """
        Args:
            shares: as `trimtab.tensor_parallel` takes them, like `balance`.
            prepare: is called with the split model before it has an optimizer.
        """
        mesh = init_device_mesh(task.device.type, (dist.get_world_size(),))
        tensor_parallel(task.model, mesh, shares=shares, kinds=KINDS, balance=balance)
        self.sharded = sharded_model(task.model, "bench")
        self._clock = Clock(task.device) if clock else None
        if clock:
            self.sharded.group.clock = self._clock
        prepare(task.model)
        # All ranks train on the same batch.
        super().__init__(task.model, optimizer(task.model), lambda step: task.batch(step=step), task.device)
        self.local_times: list[tuple[float, LocalTimes]] = []
        """With a clock: this rank's seconds of each step, and how they divide."""

    def step(self) -> float:
        seconds = super().step()
        if self._clock is not None:
            self.local_times.append((self.own_seconds, self._clock.read()))
        return seconds

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Units of each rank, by block."""
        return {block.name: block.table.counts for block in self.sharded.blocks.values()}

    @property
    def units(self) -> dict[str, list[int]]:
        """What each rank computes of the first blocks."""
        return {
            block.name: list(block.table.counts) if block.lease is None else block.lease.counts
            for block in list(self.sharded.blocks.values())[:2]
        }


def ideal(local_times: Sequence[tuple[float, LocalTimes]], device: torch.device) -> Timing:
    """What the best split would have reached, step by step, from the times of an even one.

    The even run's own times of the ranks, leveled, plus what its collectives took where nobody waited: on the
    rank that was last.
    """
    rows = [
        (each.compute, each.collectives, own - each.compute - each.collectives) for own, each in local_times
    ]
    mine = torch.tensor(rows, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    samples = []
    for compute, collectives, rest in torch.stack(gathered, dim=-1).tolist():
        per_share = [seconds * len(gathered) for seconds in compute]
        samples.append(water_level(1, per_share, rest) + min(collectives))
    return Timing(samples=tuple(samples))
