"""`trimtab bench loss`: what fewer bits do to the loss, and proof that the comparison can see damage.

Every method trains the same model from the same start on the same data; only how the gradients
travel differs. Differences to fp32 are taken seed by seed. A second fp32 run from a start moved by
one part in a million (the A/A row) shows how far apart equals come out.
"""

from __future__ import annotations

from math import sqrt
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA
from trimtab.bench.models import Gpt, tokens
from trimtab.bench.ranks import run_on_ranks, two_hosts
from trimtab.bench.result import Result
from trimtab.codec import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CANARY = "1-nearest (canary)"
SIGMAS = 3.0
"""A mean gap of more than so many standard errors, the A/A row's included, counts as worse."""

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
    """Train every method with every seed on two ranks; compare the losses of the last tenth."""
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
    """Rows of final losses (one a seed) with their gap to fp32's; the first method is fp32, the second its A/A."""
    base, noise = list(finals.values())[:2]
    noise_error = _standard_error([b - a for a, b in zip(base, noise, strict=True)])
    rows = []
    for method, losses in finals.items():
        gaps = [loss - reference for loss, reference in zip(losses, base, strict=True)]
        error = sqrt(_standard_error(gaps) ** 2 + noise_error**2)
        gap = mean(gaps)
        rows.append(
            {
                "method": method,
                "final_loss": mean(losses),
                "spread": stdev(losses),
                "gap": gap,
                "gap_error": error,
                "worse": not gap <= SIGMAS * error if method != "fp32" else False,
            }
        )
    return rows


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, list[float]]:
    """The mean loss over ranks of the last tenth of the steps, per method and seed."""
    torch.set_num_threads(1)
    runs = [(method, seed) for seed in range(spec["seeds"]) for method in METHODS]
    finals: dict[str, list[float]] = {method: [] for method in METHODS}
    for done, (method, seed) in enumerate(runs):
        finals[method].append(_train(method, seed, spec["steps"]))
        report(done + 1, len(runs))
    return finals


def _train(method: str, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    model = Gpt(width=96, layers=2, heads=4, context=64)
    if method == "fp32" + AA:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6)
    ddp = DistributedDataParallel(model)
    settings = METHODS[method]
    if settings is not None:
        trimtab.compress(ddp, seed=seed, **settings)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    late = []
    for step in range(steps):
        value = ddp(tokens(8, 64, seed=seed, step=step, rank=dist.get_rank()))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            late.append(value.detach())
    total = torch.stack(late).mean()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return float(total) / dist.get_world_size()


def _standard_error(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values))
