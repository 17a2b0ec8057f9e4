"""What the page shows of a run, computed once from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trimtab.report.page.cards import PARTS
from trimtab.report.page.values import mapping, mean, number, sequence
from trimtab.report.run_folder import Run

MOST_RANKS = 32
"""Ranks that are drawn one by one."""

MOST_EVENTS = 5000
BACKWARD = 2 / 3
"""Part of the compute time in which plain DDP can send gradients: the backward pass."""


@dataclass(kw_only=True)
class RunData:
    """A run with what its charts need."""

    run: Run
    prices: dict[int, float] = field(default_factory=dict)
    """Price of each rank's device for an hour, where known."""

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that are drawn: those with samples, at most `MOST_RANKS`."""
        return [rank for rank, samples in self.run.steps.items() if samples][:MOST_RANKS]

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan that was in force last; empty if there was none."""
        plans = self.run.events("plan")
        return mapping(plans[-1].get("plan")) if plans else {}

    @cached_property
    def started(self) -> float:
        times = [number(event.get("time")) for rank in self.run.ranks.values() for event in rank.events[:1]]
        return min([t for t in times if t is not None], default=0.0)

    @cached_property
    def last_step(self) -> int:
        return max((samples[-1]["step"] for samples in self.run.steps.values() if samples), default=0)

    @cached_property
    def seconds(self) -> float:
        """From the first event to the last."""
        times = [number(event.get("time")) for rank in self.run.ranks.values() for event in rank.events[-1:]]
        return max([t for t in times if t is not None], default=self.started) - self.started

    def settled(self, rank: int) -> list[dict[str, Any]]:
        """Samples of the last half of the steps: after the first decisions."""
        samples = self.run.steps.get(rank, [])
        half = [sample for sample in samples if sample["step"] - sample["steps"] >= self.last_step / 2]
        return half or samples[-1:]

    def mean_of(self, rank: int, name: str) -> float | None:
        """The mean of a field over the settled steps."""
        samples = self.settled(rank)
        return mean([sample.get(name) for sample in samples], [float(sample["steps"]) for sample in samples])

    @cached_property
    def parts(self) -> dict[int, list[float | None]]:
        """Mean seconds of each of `PARTS`, by rank."""
        return {rank: [self.mean_of(rank, part) for part in PARTS] for rank in self.ranks}

    @cached_property
    def step_s(self) -> float | None:
        """The settled step: ranks run in lockstep, so that the mean over ranks is the step of all."""
        return mean(self.mean_of(rank, "seconds") for rank in self.ranks)

    @cached_property
    def batch_size(self) -> float | None:
        """Samples of a step on all ranks, the last known."""
        known = [self.mean_of(rank, "samples") for rank in self.run.steps]
        return None if None in known or not known else sum(each for each in known if each is not None)

    @cached_property
    def ideal_s(self) -> float | None:
        """The step if every rank always worked on the model: no exposed exchange, no waiting, shares by speed."""
        own, rates = [], []
        for rank in self.ranks:
            seconds = sum(self.mean_of(rank, part) or 0.0 for part in ("data", "compute", "optimizer"))
            samples = self.mean_of(rank, "samples")
            if not seconds:
                return None
            own.append(seconds)
            rates.append((samples or 0.0) / seconds)
        total = sum(self.mean_of(rank, "samples") or 0.0 for rank in self.ranks)
        return total / sum(rates) if all(rates) and rates else mean(own)

    @cached_property
    def plain_s(self) -> tuple[float, str] | None:
        """The step of plain DDP and where that figure comes from."""
        measured = number(self.run.info.get("plain_step_s"))
        if measured:
            return measured, "measured in the same job"
        predicted = number(mapping(self.plan.get("predicted")).get("plain_step_s"))
        if predicted:
            return predicted, "predicted by the plan"
        for decision in reversed(self.run.events("decision")):
            exchange = number(mapping(decision.get("expected")).get("plain_s"))
            if decision.get("what") == "compress" and exchange and self.ranks:
                own = [
                    sum(self.mean_of(rank, part) or 0.0 for part in ("data", "compute", "optimizer"))
                    + max(0.0, exchange - BACKWARD * (self.mean_of(rank, "compute") or 0.0))
                    for rank in self.ranks
                ]
                return max(own), "estimated from a trial exchange in full precision, with these shares"
        return None

    @cached_property
    def losses(self) -> list[tuple[dict[str, Any], float | None]]:
        """Sampled steps with the mean loss over ranks, by samples; the first rank's sample stands for the step."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for samples in self.run.steps.values():
            for sample in samples:
                if sample.get("loss") is not None:
                    by_step.setdefault(sample["step"], []).append(sample)
        joined = []
        for _, samples in sorted(by_step.items()):
            weights = [number(sample.get("samples")) or 1.0 for sample in samples]
            finite = all(number(sample["loss"]) is not None for sample in samples)
            joined.append((samples[0], mean([s["loss"] for s in samples], weights) if finite else None))
        return joined

    @cached_property
    def loss_change(self) -> tuple[float, float] | None:
        """Mean loss of the first and the last tenth of the samples; the last is NaN if the loss was not finite."""
        values = [loss for _, loss in self.losses]
        tenth = max(1, len(values) // 10)
        if len(values) < 2:
            return None
        first = mean(values[:tenth])
        last = None if values[-1] is None else mean(values[-tenth:])
        return None if first is None else (first, float("nan") if last is None else last)

    @cached_property
    def sent(self) -> list[tuple[dict[str, Any], float, float]]:
        """The first rank's samples with the bytes that all ranks have sent by then, and those of a plain all-reduce."""
        if not self.ranks:
            return []
        totals: dict[int, list[float]] = {}
        for samples in self.run.steps.values():
            for sample in samples:
                both = totals.setdefault(sample["step"], [0.0, 0.0])
                for at, name in enumerate(("sent", "sent_plain")):
                    both[at] += (number(sample.get(name)) or 0.0) * sample["steps"]
        sent = plain = 0.0
        joined = []
        for sample in self.run.steps[self.ranks[0]]:
            sent += totals[sample["step"]][0]
            plain += totals[sample["step"]][1]
            joined.append((sample, sent, plain))
        return joined

    @cached_property
    def layers(self) -> list[tuple[str, int]]:
        """Names and dimensions of the trained parameters, by depth."""
        described = self.run.events("layers")
        rows = [sequence(row) for row in sequence(described[-1].get("layers"))] if described else []
        return [(str(row[0]), int(number(row[2]) or 0)) for row in rows if len(row) >= 3][:MOST_EVENTS]

    @cached_property
    def devices(self) -> dict[int, dict[str, Any]]:
        """The last `device` event of each rank."""
        return {rank.rank: (rank.of("device") or [{}])[-1] for rank in self.run.ranks.values()}

    def since_start(self, event: dict[str, Any]) -> float:
        return (number(event.get("time")) or self.started) - self.started
