"""`trimtab bench loss`: what fewer bits do to the loss, and proof that the comparison can see damage.

Every method trains the same model from the same start on the same data; only how the gradients
travel differs. Differences to fp32 are taken seed by seed. The A/A row is fp32 once more with
other draws of the data: how far apart the luck of the draw brings equals. SGD without clipping,
since Adam and clipping both hide the size of a gradient, and with it much of what a codec does.
"""

from __future__ import annotations

from math import isfinite, sqrt
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA
from trimtab.bench.ranks import run_on_ranks, two_hosts
from trimtab.bench.result import Result
from trimtab.codec import Block
from trimtab.models.tasks import Gpt, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CANARY = "1-nearest (canary)"
DIVERGED = 100.0
"""Stands for a loss that is no longer a number, so that it can be averaged and counts as worse."""

HELD_OUT = 999_999
"""Seed of the batches every run is judged on."""

SIGMAS = 3.0
"""A mean gap of more than so many times the noise counts as worse."""

METHODS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "fp32" + AA: None,
    "8": {"codec": Block(bits=8)},
    "4": {"codec": Block(bits=4)},
    "4-nearest": {"codec": Block(bits=4, stochastic=False)},
    "2": {"codec": Block(bits=2)},
    "2-feedback": {"codec": Block(bits=2), "error_feedback": True},
    CANARY: {"codec": Block(bits=1, stochastic=False)},
}


def loss(steps: int, seeds: int, progress: Callable[[int, int], None]) -> Result:
    """Train every method with every seed on two ranks; compare the losses on held-out text."""
    from trimtab.emulate import Emulation

    with Emulation(two_hosts(None)) as emulation:
        spec = {"steps": steps, "seeds": seeds}
        finals: dict[str, list[float]] = run_on_ranks(emulation, on_rank, spec, progress=progress)
    rows = compare(finals)
    by_method = {row["method"]: row for row in rows}
    summary: dict[str, Any] = {
        "canary_flagged": by_method[CANARY]["worse"],
        "4_bits_worse": by_method["4"]["worse"],
        "4_bits_gap": by_method["4"]["gap"],
        "aa_gap": by_method["fp32" + AA]["gap"],
    }
    return Result(bench="loss", summary=summary, rows=rows)


def compare(finals: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Rows of final losses (one a seed) with their gap to fp32's; the first method is fp32, the second its A/A.

    Noise is the standard error of fp32's mean over seeds, or of the A/A row's gap if that is larger.
    A method's own scatter does not count: one that now and then diverges must not pass for it.
    """
    base, again = list(finals.values())[:2]
    noise = max(_standard_error(base), _standard_error([b - a for a, b in zip(base, again, strict=True)]))
    rows = []
    for method, losses in finals.items():
        gap = mean(loss - reference for loss, reference in zip(losses, base, strict=True))
        rows.append(
            {
                "method": method,
                "final_loss": mean(losses),
                "spread": stdev(losses),
                "gap": gap,
                "gap_over_noise": gap / noise,
                "worse": gap > SIGMAS * noise,
            }
        )
    return rows


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, list[float]]:
    """The validation loss after the last step, per method and seed."""
    torch.set_num_threads(1)
    runs = [(method, seed) for seed in range(spec["seeds"]) for method in METHODS]
    finals: dict[str, list[float]] = {method: [] for method in METHODS}
    for done, (method, seed) in enumerate(runs):
        finals[method].append(_train(method, seed, spec["steps"]))
        report(done + 1, len(runs))
    return finals


def _train(method: str, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Gpt(width=96, layers=2, heads=4, context=64))
    settings = METHODS[method]
    if settings is not None:
        trimtab.compress(ddp, seed=seed, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
    draw = seed + 1000 if method == "fp32" + AA else seed
    for step in range(steps):
        optimizer.zero_grad()
        ddp(tokens(8, 64, seed=draw, step=step, rank=dist.get_rank())).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held_out = [ddp.module(tokens(32, 64, seed=HELD_OUT, step=i, rank=0)) for i in range(8)]
    final = float(torch.stack(held_out).mean())
    return final if isfinite(final) else DIVERGED


def _standard_error(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values))
