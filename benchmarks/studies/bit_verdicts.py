"""Which ways to send gradients (and, with FSDP2, weights) in fewer bits harm the loss? Verdicts on three models.

    python -m benchmarks.studies.bit_verdicts --device cuda --model gpt --optimizer SGD --out DIR    # six such jobs
    python -m benchmarks.studies.bit_verdicts --merge DIR --json FILE

A small GPT, a ViT and a Llama-style model are trained with SGD (momentum) and AdamW on four workers, simulated on one
device: every worker has its own gradient, which trimtab's own codec encodes; the owner of a value sums what arrived and
encodes the sum once more, as the real scatter-reduce-allgather does. All methods and seeds train side by side
(`stacked_runs`, `simulated_wire`). Methods of a seed share its initial weights and its data, so losses on held-out
data are compared seed by seed. What chance does to them is seen in runs of fp32 whose first weights were nudged by a
thousandth. Canaries, settings known to be harmful, must come out as worse. With `--pretrained` all methods of a seed
start from the same trained weights. Learning rates are chosen with another seed than those of the verdicts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import isfinite, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from benchmarks.studies.bit_methods import (
    CANARY,
    OTHER_DATA,
    WEIGHT_CANARY,
    WORKERS,
    Method,
    methods,
    sent_bytes,
    work,
)
from benchmarks.studies.simulated_wire import nearest
from benchmarks.studies.stacked_runs import MODELS, TINY, Runs, Sizes, adamw, rate, sgd
from torch import Tensor

from trimtab.bench.harness import Result
from trimtab.bench.losses import DIVERGED, SIGMAS
from trimtab.planning.compression.family import ADAMW, SGD
from trimtab.wire_format import WEIGHT_BLOCK

SEEDS = range(100, 105)
"""Of the verdicts; learning rates are chosen with another."""

STEPS, LEAST_STEPS, NUDGE = 500, 200, 1e-3
LEARNING_RATES = {SGD: (0.01, 0.02, 0.05, 0.1, 0.2, 0.4), ADAMW: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
"""Of which each job takes the one that ends lowest in fp32 with `TUNING_SEED`."""

TUNING_SEED, TUNING_STEPS = 0, 250
PRETRAINING_RATE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model with an optimizer; every method trains it."""

    model: str
    optimizer: str
    device: str = "cpu"
    seeds: tuple[int, ...] = tuple(SEEDS)
    steps: int = STEPS
    pretrained: int = 0
    """Steps of fp32 with AdamW before, the same for every method of a seed: what fewer bits do then is seen in less
    noise than from the start, where a run may be sooner or later off its first plateau by chance."""

    lr: float | None = None
    """None: chosen in short trainings."""

    budget_s: float | None = None
    """Train fewer steps, though not less than `LEAST_STEPS`, if these would take longer."""


def train(job: Job, sizes: Sizes, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Held-out losses by method and seed, and what the methods send."""
    device = torch.device(job.device)
    if job.lr is None:
        job = replace(job, lr=tuned(job, sizes))
    steps = job.steps
    if job.budget_s is not None:
        steps = _affordable(job, sizes, only)
    chosen = {name: m for name, m in methods(job.optimizer, steps).items() if only is None or name in only}
    began = time.perf_counter()
    training = _Training(job, sizes, chosen, device)
    for step in range(steps):
        training.step(step, rate(step, steps))
    losses = training.held_out()
    return {
        **asdict(job),
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "parameters": training.runs.flat.shape[1],
        "coded": training.runs.coded,
        "losses": {name: losses[rows] for name, rows in training.rows.items()},
        "bytes_over_uniform4": {
            name: sent_bytes(chosen[name], wire, training.runs.coded_shapes)
            for name, wire in training.wires.items()
        },
        "work": {name: work(wire) for name, wire in training.wires.items()},
    }


class _Training:
    """All methods and seeds of a job, side by side."""

    def __init__(self, job: Job, sizes: Sizes, chosen: Mapping[str, Method], device: torch.device) -> None:
        self._methods, count = chosen, len(job.seeds)
        self.rows = {name: slice(i * count, (i + 1) * count) for i, name in enumerate(chosen)}
        self.runs = Runs(job.model, sizes, [seed for _ in chosen for seed in job.seeds], device)
        self._data_seeds = [
            seed + 1000 if method.other_data else seed for method in chosen.values() for seed in job.seeds
        ]
        if job.pretrained:
            self.runs.flat.copy_(
                _pretrained(job.model, job.pretrained, sizes, job.seeds, device).repeat(len(chosen), 1)
            )
        for name, method in chosen.items():
            if method.nudge:
                for row, seed in zip(self.runs.flat[self.rows[name]], job.seeds, strict=True):
                    noise = torch.Generator().manual_seed(seed + 10_000 * method.nudge)
                    row.mul_(1 + NUDGE * torch.randn(len(row), generator=noise).to(device))
        self.wires = {
            name: method.make(self.runs.coded_shapes, job.seeds, device) for name, method in chosen.items()
        }
        assert job.lr is not None
        rates = torch.full((len(self.runs.flat),), job.lr, device=device)
        self._optimizer = _optimizer(job.optimizer, self.runs, rates)

    def step(self, step: int, factor: float) -> None:
        gradients, losses = self.runs.gradients(self._weights(), step, self._data_seeds, WORKERS)
        gradients.div_(WORKERS)
        reduced, coded = gradients.sum(1), self.runs.coded
        for name, rows in self.rows.items():
            reduced[rows, :coded] = self.wires[name].reduce(gradients[rows, :, :coded], step, losses[rows])
        self._optimizer(reduced, factor)

    def held_out(self) -> list[float]:
        losses = self.runs.held_out_losses(self._weights())
        return [loss if isfinite(loss) else DIVERGED for loss in losses]

    def _weights(self) -> Tensor:
        """Those that workers compute with: rounded where they are gathered in fewer bits."""
        if all(method.weight_bits is None for method in self._methods.values()):
            return self.runs.flat
        weights, coded = self.runs.flat.clone(), self.runs.coded
        for name, method in self._methods.items():
            if method.weight_bits is not None:
                rows = self.rows[name]
                weights[rows, :coded] = nearest(weights[rows, :coded], method.weight_bits, WEIGHT_BLOCK)
        return weights


def tuned(job: Job, sizes: Sizes) -> float:
    """The learning rate with which fp32 ends lowest, on a seed that no verdict uses."""
    device, candidates = torch.device(job.device), LEARNING_RATES[job.optimizer]
    runs = Runs(job.model, sizes, [TUNING_SEED] * len(candidates), device)
    if job.pretrained:
        runs.flat.copy_(
            _pretrained(job.model, job.pretrained, sizes, (TUNING_SEED,), device).expand(len(candidates), -1)
        )
    optimizer = _optimizer(job.optimizer, runs, torch.tensor(candidates, device=device))
    steps = min(TUNING_STEPS, job.steps)
    for step in range(steps):
        gradients, _ = runs.gradients(runs.flat, step, [TUNING_SEED] * len(candidates), WORKERS)
        optimizer(gradients.mean(1), rate(step, steps))
    losses = [loss if isfinite(loss) else DIVERGED for loss in runs.held_out_losses(runs.flat)]
    return candidates[losses.index(min(losses))]


@cache
def _pretrained(model: str, steps: int, sizes: Sizes, seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """Weights, a row for each seed, after training on data that is not used again."""
    runs = Runs(model, sizes, seeds, device)
    step_by = adamw(runs.flat, torch.full((len(seeds),), PRETRAINING_RATE, device=device), runs.decayed)
    for step in range(steps):
        gradients, _ = runs.gradients(runs.flat, step, [seed + 5000 for seed in seeds], WORKERS)
        step_by(gradients.mean(1), rate(step, 2 * steps))
    return runs.flat


def _optimizer(kind: str, runs: Runs, rates: Tensor) -> Callable[[Tensor, float], None]:
    return sgd(runs.flat, rates) if kind == SGD else adamw(runs.flat, rates, runs.decayed)


def _affordable(job: Job, sizes: Sizes, only: Sequence[str] | None) -> int:
    """How many steps fit into the budget, after some that warm up and are timed."""
    assert job.budget_s is not None
    device = torch.device(job.device)
    every = methods(job.optimizer, job.steps)
    trial = _Training(job, sizes, {n: m for n, m in every.items() if only is None or n in only}, device)
    timed, start = 12, 0.0
    for step in range(8 + timed):
        if step == 8:
            _synchronize(device)
            start = time.perf_counter()
        trial.step(step, 0.1)
    _synchronize(device)
    each = 1.15 * (time.perf_counter() - start) / timed  # planning bits takes some
    return max(min(job.steps, int(job.budget_s / each)), LEAST_STEPS)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for every method of a job, judged seed by seed: a mean gap of more than `SIGMAS` times the noise is worse.

    Noise is what nudged initial weights do to a mean over seeds. A method's own scatter counts if it is larger (random
    rounding changes a run by more than a nudge does), up to the scatter of other data: what diverges now and then must
    not pass because of it.
    """
    losses: Mapping[str, list[float]] = outcome["losses"]
    base = losses["fp32"]

    def gaps_of(name: str) -> list[float]:
        return [b - a for a, b in zip(base, losses[name], strict=True)]

    nudges = [gap for name in losses if "nudged" in name for gap in gaps_of(name)]
    least = sqrt(mean(gap * gap for gap in nudges) / len(base))
    most = stdev(gaps_of(OTHER_DATA)) / sqrt(len(base))
    rows = []
    for name, own in losses.items():
        gaps = gaps_of(name)
        gap = mean(gaps)
        noise = max(least, min(stdev(gaps) / sqrt(len(base)), most))
        rows.append(
            {
                "model": outcome["model"],
                "optimizer": outcome["optimizer"],
                "method": name,
                "bytes_over_uniform4": outcome["bytes_over_uniform4"][name],
                "codec": outcome["work"][name],
                "final_loss": mean(own),
                "spread": stdev(own),
                "gap": gap,
                "gap_percent": 100 * gap / mean(base),
                "gaps": gaps,
                "noise": noise,
                "gap_over_noise": gap / noise,
                "worse": gap > SIGMAS * noise,
            }
        )
    return rows


def merged(outcomes: Sequence[Mapping[str, Any]]) -> Result:
    """The table of all jobs, and who passed where."""
    rows = [row for outcome in outcomes for row in rows_of(outcome)]
    jobs = [(outcome["model"], outcome["optimizer"]) for outcome in outcomes]
    by_key = {(row["model"], row["optimizer"], row["method"]): row for row in rows}
    summary: dict[str, Any] = {
        "jobs": [
            {
                key: outcome[key]
                for key in ("model", "optimizer", "steps", "lr", "parameters", "coded", "seconds")
            }
            for outcome in outcomes
        ],
        "seeds": list(outcomes[0]["seeds"]),
        "canaries_flagged": {
            f"{model}, {optimizer}": [
                bool(by_key[model, optimizer, canary]["worse"]) for canary in (CANARY, WEIGHT_CANARY)
            ]
            for model, optimizer in jobs
        },
    }
    for optimizer in (SGD, ADAMW):
        models = [model for model, own in jobs if own == optimizer]
        names = dict.fromkeys(row["method"] for row in rows if row["optimizer"] == optimizer)
        summary[f"worse on, {optimizer}"] = {
            name: [model for model in models if by_key[model, optimizer, name]["worse"]] for name in names
        }
    return Result(bench="bit_verdicts", summary=summary, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--optimizer", choices=(SGD, ADAMW), default=SGD)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretrained", type=int, default=0, help="steps of fp32 that all methods start from")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--budget", type=float, help="seconds that training may take")
    parser.add_argument("--only", nargs="+", help="methods")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the losses of this job")
    parser.add_argument("--merge", type=Path, help="folder with the losses of all jobs: print the table")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.merge is not None:
        outcomes = [json.loads(path.read_text()) for path in sorted(args.merge.glob("verdicts-*.json"))]
        table = merged(outcomes).to_json()
        if args.json is None:
            print(table)
        else:
            args.json.write_text(table + "\n")
        return
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    job = Job(
        model=args.model,
        optimizer=args.optimizer,
        device=args.device,
        seeds=tuple(args.seeds),
        steps=args.steps,
        pretrained=args.pretrained,
        lr=args.lr,
        budget_s=args.budget,
    )
    outcome = train(job, TINY if args.tiny else Sizes(), args.only)
    if args.out is not None:
        name = f"verdicts-{args.model}-{args.optimizer}.json"
        (args.out / name).write_text(json.dumps(outcome, indent=1) + "\n")
    for name, losses in outcome["losses"].items():
        print(f"{name:50} {mean(losses):.4f} {outcome['bytes_over_uniform4'][name]:.3f} {losses}")
    print(f"{outcome['steps']} steps, {outcome['seconds']:.0f} s")


if __name__ == "__main__":
    main()
