"""What leaving units out on one of two ranks does to the loss: priority beside random, seed by seed.

Every method trains the same model from the same start on the same data; only what the second rank leaves out
differs. Differences are taken seed by seed. The A/A row is the even run with other draws of the data; the
canary leaves most of both ranks out at random, which must show.
"""

from __future__ import annotations

from math import isfinite, sqrt
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import AA
from trimtab.bench.ranks import run_on_ranks, two_hosts
from trimtab.bench.scenarios.loss import DIVERGED, HELD_OUT, compare
from trimtab.bench.scenarios.tp import KINDS, Gpt
from trimtab.control.tensor.resizing import WINDOW, set_resize, watch_resize
from trimtab.models.tasks import tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATIO = 0.5
STEPS = 400
"""Enough to show a difference: after 300, that of priority and random was only twice its standard error."""

CANARY = "resize-random 0.9 on both (canary)"
SIZES = {"width": 64, "heads": 4, "layers": 2, "length": 32, "batch": 16}
METHODS: dict[str, dict[str, Any] | None] = {
    "even": None,
    "even" + AA: None,
    "resize-random": {"ratio": RATIO, "selection": "random"},
    "resize-priority": {"ratio": RATIO, "selection": "priority"},
    CANARY: {"ratio": 0.9, "selection": "random"},
}
BEGINS = 2 * WINDOW
"""The step from which something is left out: a rank becomes slow while a job runs, and there are statistics then."""

_RATE = 3e-3
_DECAY = 0.1


FIRST_SEED = 10
"""Not those that the bench's sizes and steps were chosen with."""


def resize_loss(steps: int, seeds: int, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Rows of every method's loss on held-out text after training with each seed, on two ranks.

    Keys: as of `trimtab bench loss`, with the seeds' losses as `losses`. A row more, `priority over random`,
    has the mean difference of the two (below 0: priority is better), its spread, and the seeds in which it was.
    """
    from trimtab.emulate import Emulation

    with Emulation(two_hosts(None)) as emulation:
        spec = {"steps": steps, "seeds": seeds}
        finals: dict[str, list[float]] = run_on_ranks(emulation, on_rank, spec, progress=progress)
    return rows_of(finals)


def rows_of(finals: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    rows = [{**row, "losses": finals[row["method"]]} for row in compare(finals)]
    apart = [p - r for p, r in zip(finals["resize-priority"], finals["resize-random"], strict=True)]
    between = {
        "method": "priority over random",
        "gap": mean(apart),
        "spread": stdev(apart),
        "gap_over_noise": mean(apart) / (stdev(apart) / sqrt(len(apart))),
        "better_seeds": sum(each < 0 for each in apart),
    }
    return [*rows, between]


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, per method and seed."""
    torch.set_num_threads(1)
    runs = [(method, seed) for seed in range(FIRST_SEED, FIRST_SEED + spec["seeds"]) for method in METHODS]
    finals: dict[str, list[float]] = {method: [] for method in METHODS}
    for done, (method, seed) in enumerate(runs):
        finals[method].append(train(method, seed, spec["steps"]))
        report(done + 1, len(runs))
    return finals


def train(method: str, seed: int, steps: int) -> float:
    """One run; every rank gives the same loss."""
    torch.manual_seed(seed)
    model: Any = Gpt(SIZES["width"], SIZES["heads"], SIZES["layers"], SIZES["length"])
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), kinds=KINDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, cycle_momentum=False)
    setting = METHODS[method]
    if setting is not None:
        watch_resize(model)
    draw = seed + 1000 if method == "even" + AA else seed
    for step in range(steps):
        if setting is not None and step == BEGINS and (dist.get_rank() == 1 or method == CANARY):
            set_resize(model, seed=seed, **setting)
        optimizer.zero_grad()
        model(tokens(SIZES["batch"], SIZES["length"], seed=draw, step=step, rank=0)).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        held_out = [model(tokens(32, SIZES["length"], seed=HELD_OUT, step=i, rank=0)) for i in range(8)]
    final = float(torch.stack(held_out).mean())
    return final if isfinite(final) else DIVERGED
