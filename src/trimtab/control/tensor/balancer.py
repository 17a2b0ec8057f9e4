"""Balance a tensor-parallel job while it runs: time its ranks, and move or prune work when one is slow.

It hooks in between training steps, so a script needs no extra line:

1. In every step each rank measures its own time in units and elsewhere (`UnitClock`).
2. After every window the ranks exchange their medians in one all-gather, which is read one step later so that a GPU
   never waits for it.
3. If the ranks were uneven for some windows, every rank makes the same decision
   (`trimtab.planning.tensor.rebalance`) from the same numbers and applies its part before the next forward pass.
4. The next window measures the effect of the decision; both are kept in `decisions`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab import environment
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.control.tensor.resizing import clear_resize, resized, set_resize, watch_resize
from trimtab.control.tensor.seen_costs import SeenCosts
from trimtab.control.training_steps import TrainingSteps
from trimtab.errors import TrimtabError
from trimtab.measure.tensor_ranks import UnitClock, measure_transfer
from trimtab.model_state import attach_state, find_state, state_of
from trimtab.planning.tensor.balance import Balance
from trimtab.planning.tensor.rebalance import (
    Costs,
    Decision,
    Rank,
    changes,
    counts_for,
    decide,
    expected_steps,
    uneven,
)
from trimtab.predict.migration import Transfer
from trimtab.report import events
from trimtab.sharding.lease import MESSAGES, end_leases, lease
from trimtab.sharding.migration import assignment_for, can_move, move_in_replica
from trimtab.sharding.unit_block import sharded_model

_COPIES = 3
"""Tensors sent per parameter when a unit moves permanently: itself and two optimizer states."""
_SAMPLE_EVERY = {"cpu": 1, "cuda": 2}
"""One in so many steps is timed: each CUDA event costs the host some microseconds."""
_FREE_FOR_UNITS = 0.5
"""Fraction of the free memory that more units may take."""
_SMALLEST_SHARE = 1e-3
"""Share of a rank that has no unit, so that its time per share is defined."""
_BYTES_IN_TRAINING = 4
_SAME_SPEED = 1.25
"""Two windows whose times differ by less than this factor show the same speed."""
_SAME_PART = 0.02
"""Pruned fractions that differ by less count as the same."""
_NUMBERS = 6
"""Numbers that a rank sends to the others after a window."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One decision, and its effect."""

    step: int
    """Optimizer steps before it."""

    times: tuple[float, ...]
    """Seconds of each rank's own work in a step before it."""

    decision: Decision
    took: float = 0.0
    """Seconds to apply it."""

    measured: float | None = None
    """Seconds of the slowest rank's own work in the window after it; None until then."""


def balance(model: nn.Module, rules: Balance | None = None, *, clock: UnitClock | None = None) -> None:
    """Keep the ranks of a converted model balanced from now on; every rank calls it, before training starts."""
    rules = Balance() if rules is None else rules
    if state_of(model).balancer is not None:
        raise TrimtabError("balance: this model is already balanced; call it once")
    attach_state(model).balancer = Balancer(model, rules, clock)


def balancer_of(model: nn.Module) -> Balancer:
    """The controller of a model that was converted with ``balance="auto"``."""
    balancer: Balancer | None = find_state(model, "balancer")
    if balancer is None:
        raise TrimtabError(
            'this model is not balanced; convert it with trimtab.tensor_parallel(..., balance="auto")'
        )
    return balancer


def decisions(model: nn.Module) -> list[Record]:
    """The decisions so far, with predicted and measured times: the same on every rank."""
    return list(balancer_of(model).records)


class Balancer:
    """The controller of one model on one rank."""

    def __init__(self, model: nn.Module, rules: Balance, clock: UnitClock | None) -> None:
        self._model = weakref.ref(model)
        self._sharded = sharded_model(model, "balance")
        self._group, self._device = self._sharded.group, self._sharded.device
        self.rules = rules
        self.records: list[Record] = []
        self.spent = 0.0
        """CPU seconds between steps, without applying decisions: the cost of balancing besides the clock."""
        self._movable = dist.get_world_size() == self._group.size or self._sharded.replicas is not None
        """Whether units may move; if not, they are leased, because all replicas must agree on who owns what."""
        self._weights = _weights(self._sharded)
        self._bytes = sum(
            tensor.parameter[:1].nbytes * tensor.axis.length for _, tensor in self._sharded.tensors()
        )
        if rules.lease and self._group.size > 1 and self._group.aside is None:
            aside = private_groups(self._group.process_group, self._device, 1)
            self._group.aside = aside[0]
            weakref.finalize(self._group, destroy_groups, aside).atexit = False
        self.transfer: Transfer | None = (
            measure_transfer(self._group, self._device) if self._group.size > 1 else None
        )
        self._clock = UnitClock(self._device) if clock is None else clock
        self.every = 1 if clock is not None else _SAMPLE_EVERY.get(self._device.type, 1)
        self._step = self._counted = 0
        self._timed = False
        self._gathered: tuple[Any, torch.Tensor] | None = None
        self._windows: list[list[float]] = []
        self._before: list[list[float]] | None = None
        """The ranks' numbers of the previous window, under the same assignment."""
        self._skewed_since: int | None = None
        self._past: list[int] = []
        self._seen = SeenCosts(rules.window)
        if rules.resize > 0:
            watch_resize(self._sharded)
        if self._group.size > 1:
            units = {id(tensor.parameter) for _, tensor in self._sharded.tensors()}
            self._steps = TrainingSteps(model, units, self)

    def begins(self) -> None:
        """Time the step that begins, if it is one of those that are timed."""
        self._timed = self._step % self.every == 0
        if self._timed:
            self._group.clock = self._clock
            self._clock.begin()

    def ends(self) -> None:
        """What follows, such as evaluation, does not belong to a step."""
        self._group.clock = None
        if self._timed:
            self._clock.end()

    def fresh_clock(self) -> UnitClock:
        """A new clock of the same kind, to measure its cost."""
        return UnitClock(self._device)

    def between(self, model: nn.Module) -> None:
        """After a step, before the next forward pass."""
        start = time.thread_time()
        self._step += 1
        self._counted += 1
        applied = 0.0
        replicas = self._sharded.replicas
        # Every tensor group decides by itself; all end their windows at the same steps, to tell the others of moves.
        due = self._counted >= self.rules.window if replicas is None else self._step % self.rules.window == 0
        if self._gathered is not None:
            applied = self._conclude(model)
            if replicas is not None:
                replicas.share_tables()
        elif due:
            self._counted = 0
            self._gather()
        self.spent += time.thread_time() - start - applied

    def _gather(self) -> None:
        """Start sending this rank's measurements to the other ranks."""
        samples = self._clock.samples()
        own = [
            median(blocks for blocks, *_ in samples) if samples else 0.0,
            median(rest for _, rest, _ in samples) if samples else 0.0,
            self._most(),
            resized(self._sharded),
            self._seen.move_ratio,
            median(waited for *_, waited in samples) if samples else 0.0,
        ]
        sent = torch.tensor(own, dtype=torch.float64).to(self._device, non_blocking=True)
        every = torch.empty(self._group.size * _NUMBERS, dtype=torch.float64, device=self._device)
        try:
            if self._device.type != "cuda":
                parts = list(every.view(self._group.size, -1))
                self._gathered = (
                    dist.all_gather(parts, sent, group=self._group.process_group, async_op=True),
                    every,
                )
                return
            dist.all_gather(list(every.view(self._group.size, -1)), sent, group=self._group.process_group)
        except RuntimeError as error:
            raise TrimtabError(_LOST) from error
        host = torch.empty_like(every, device="cpu", pin_memory=True)
        host.copy_(every, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._gathered = (copied, host)

    def _conclude(self, model: nn.Module) -> float:
        """Read the measurements of all ranks and decide; returns the CPU seconds of applying the decision."""
        assert self._gathered is not None
        (handle, every), self._gathered = self._gathered, None
        try:
            handle.synchronize() if self._device.type == "cuda" else handle.wait()
        except RuntimeError as error:
            raise TrimtabError(_LOST) from error
        by_rank: list[list[float]] = every.view(self._group.size, -1).tolist()
        if not all(blocks > 0 for blocks, *_ in by_rank):
            return 0.0  # a rank had no step to measure
        learned = self._seen.learn(by_rank)
        ranks = self._ranks([_blended(*pair) for pair in zip(self._before or by_rank, by_rank, strict=True)])
        self._before = by_rank
        times = [blocks + rest for blocks, rest, *_ in by_rank]
        self._note(times, ranks)
        self._windows.append(times)
        held = any(rank.pruned or rank.share != rank.owned for rank in ranks)
        review = learned or len(self._windows) % self.rules.review == 0
        if not uneven(self._windows, self.rules) and not (held and review):
            return 0.0
        lasted = 0 if self._skewed_since is None else self._step - self._skewed_since
        decision = decide(
            ranks,
            self._costs(),
            self.rules,
            steps=expected_steps(lasted, self._past, self.rules),
        )
        if not changes(decision, ranks) or not self._is_new(decision):
            return 0.0
        start = time.thread_time()
        self._apply(model, decision, times)
        return time.thread_time() - start

    def _note(self, times: Sequence[float], ranks: Sequence[Rank]) -> None:
        """Complete the last record, and track how long the ranks' speeds have been uneven."""
        if self.records and self.records[-1].measured is None:
            record = replace(self.records[-1], measured=max(times))
            self.records[-1] = record
            if self._group.rank == 0:
                environment.logger().info(
                    f"balance: after step {record.step} the slowest rank takes {max(times) * 1e3:.1f} ms; "
                    f"{record.decision.predicted * 1e3:.1f} ms were predicted"
                )
        wholes = [rank.whole for rank in ranks]
        skewed = max(wholes) / min(wholes) > self.rules.threshold
        if skewed and self._skewed_since is None:
            self._skewed_since = self._step - self.rules.window
        elif not skewed and self._skewed_since is not None:
            self._past.append(self._step - self._skewed_since)
            self._skewed_since = None

    def _ranks(self, numbers: Sequence[Sequence[float]]) -> list[Rank]:
        size = range(self._group.size)
        computed, owned = [0.0] * self._group.size, [0.0] * self._group.size
        for block in self._sharded.blocks.values():
            weight = self._weights[block.name] / block.units
            here = block.table.counts if block.lease is None else block.lease.counts
            for rank in size:
                computed[rank] += weight * here[rank]
                owned[rank] += weight * block.table.counts[rank]
        return [
            Rank(
                blocks=numbers[rank][0],
                rest=numbers[rank][1],
                share=max(_SMALLEST_SHARE, computed[rank]),
                home=max(_SMALLEST_SHARE, owned[rank]),
                most=numbers[rank][2],
                pruned=numbers[rank][3],
            )
            for rank in size
        ]

    def _is_new(self, decision: Decision) -> bool:
        """Whether it changes units or pruned fractions; heads cannot be divided finely, so it may not."""
        previous = self.records[-1].decision.pruned if self.records else (0.0,) * self._group.size
        if any(abs(a - b) > _SAME_PART for a, b in zip(decision.pruned, previous, strict=True)):
            return True
        counts, blocks = self._counts(decision), self._sharded.blocks.values()
        if decision.mode == "lease":
            return any(
                counts[b.name] != (tuple(b.lease.counts) if b.lease else b.table.counts)
                for b in blocks
                if b.name in counts
            )
        if any(block.lease is not None for block in blocks):
            return True
        return decision.mode == "own" and any(counts[b.name] != b.table.counts for b in blocks)

    def _counts(self, decision: Decision) -> dict[str, tuple[int, ...]]:
        leased = decision.mode == "lease"
        blocks = [b for b in self._sharded.blocks.values() if not (leased and b.vocabulary)]
        return counts_for({b.name: b.units for b in blocks}, decision.shares)

    def _costs(self) -> Costs:
        assert self.transfer is not None
        blocks = len(self._sharded.blocks)
        model = self._model()
        movable = (
            self.rules.own and self._movable and model is not None and can_move(model, self._steps.optimizers)
        )
        own = self.transfer.own(self._bytes, _COPIES, blocks) if movable else None
        lent = self.transfer.lease(self._bytes, blocks, MESSAGES) if self.rules.lease else None
        return self._seen.corrected(Costs(own=own, lease=lent))

    def _apply(self, model: nn.Module, decision: Decision, times: Sequence[float]) -> None:
        start = time.perf_counter()
        counts = self._counts(decision)
        if decision.mode != "lease":
            end_leases(model)
        if decision.mode == "own":
            move_in_replica(model, self._steps.optimizers, assignment_for(model, counts))
        elif decision.mode == "lease":
            lease(model, counts)
        part = decision.pruned[self._group.rank]
        if part > 0:
            rules = self.rules
            set_resize(self._sharded, part, selection=rules.selection, form=rules.form, impute=rules.impute)
        elif self.rules.resize > 0:
            clear_resize(self._sharded)
        if self._device.type == "cuda" and decision.mode == "own":
            torch.cuda.current_stream().synchronize()
        took = time.perf_counter() - start
        self._seen.applied(decision, took)
        self.records.append(Record(step=self._step, times=tuple(times), decision=decision, took=took))
        self._clock.forget()
        self._windows, self._counted, self._before = [], 0, None
        if self._group.rank == 0:
            actions = ", ".join(
                f"rank {rank} {action}"
                for rank, action in enumerate(decision.actions)
                if action not in ("nothing", "helps")
            )
            environment.logger().info(
                f"balance: step {self._step}: {actions or 'each rank computes its own units'}; ranks took "
                f"{'/'.join(f'{own * 1e3:.1f}' for own in times)} ms, "
                f"{decision.predicted * 1e3:.1f} predicted with shares "
                f"{'/'.join(f'{share:.2f}' for share in decision.shares)} (took {took * 1e3:.0f} ms)"
            )

            events.emit(
                "decision",
                step=self._step,
                what="tensor",
                noticed=f"the ranks took {'/'.join(f'{own * 1e3:.1f}' for own in times)} ms",
                decided=actions or "each rank computes its own units",
                why=None,
                expected={"seconds": decision.predicted},
                before=None,
                after=list(decision.shares),
            )

    def _most(self) -> float:
        """The largest fraction of all work that fits into this rank's memory."""
        if self._device.type != "cuda":
            return 1.0
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        owned = sum(
            self._weights[block.name] * block.count / block.units for block in self._sharded.blocks.values()
        )
        return min(1.0, owned + free * _FREE_FOR_UNITS / (self._bytes * _BYTES_IN_TRAINING))


def _blended(before: Sequence[float], now: Sequence[float]) -> list[float]:
    """A rank's mean times over two windows, for less noise; if its speed changed, those of the last window."""
    if not 1 / _SAME_SPEED < now[0] / before[0] < _SAME_SPEED:
        return list(now)
    return [(before[0] + now[0]) / 2, (before[1] + now[1]) / 2, *now[2:]]


_LOST = "balance: a rank was lost; every unit is still on its owner. Resume the job from its last checkpoint"


def _weights(sharded: Any) -> dict[str, float]:
    """Each block's fraction of all work, in proportion to the size of its matrices."""
    sizes = {
        block.name: sum(t.parameter[:1].numel() * t.axis.length for t in block.tensors if t.multiplied)
        for block in sharded.blocks.values()
    }
    return {name: size / sum(sizes.values()) for name, size in sizes.items()}
