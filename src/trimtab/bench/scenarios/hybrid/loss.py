"""Part of `trimtab bench hybrid`: what the methods do to the loss, and proof that the comparison can see damage.

The same model, operators and code as in the timed runs, on two equal ranks: how fast a rank is does not change
what it computes. Batches are smaller, so that there are more steps. Every method sees the same number of samples
in the same order, seed by seed; the A/A row is plain training once more with other draws of the data. The canary
throws most of every gradient away, for good: top-k without error feedback.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from trimtab.api.compress import compress
from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import AA
from trimtab.bench.scenarios.hybrid.plan import task
from trimtab.bench.scenarios.hybrid.ranks import Trainer, Way, planned
from trimtab.bench.scenarios.loss import DIVERGED, compare
from trimtab.codec import TopK
from trimtab.planning.plan_file import parse_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.bench.scenarios.shares.tasks import Task

CANARY = "top-k (canary)"
STEPS = 40
EACH = {"cpu": 8, "cuda": 16}
"""Samples of each of two ranks in a step."""

DENSITY = 0.003
"""The part of a gradient's values that the canary keeps."""


def runs(
    found: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """What to train, each thing once, and by cluster and method which of them that is.

    Args:
        found: by cluster what `hybrid_ranks.on_rank` gave.
    """
    plain = {"precisions": [{}, {}], "samples": [1, 1]}
    chosen: dict[str, dict[str, Any]] = {"ddp": plain, "ddp" + AA: plain}
    known = {json.dumps(plain, sort_keys=True): "ddp"}
    of: dict[str, dict[str, str]] = {}
    for cluster, result in found.items():
        of[cluster] = {}
        for method in ("ddp", "uniform-low", "shares", "trimtab-fixed", "trimtab"):
            way = result["ways"].get(method)
            if way is None:
                continue
            run = {"precisions": way["precisions"], "samples": way["samples"]}
            if method in result["plans"]:
                run["plan"] = result["plans"][method]
            elif len(set(run["samples"])) == 1:
                run["samples"] = [1, 1]
            name = known.setdefault(json.dumps(run, sort_keys=True), f"{cluster} {method}")
            of[cluster][method] = name
            chosen.setdefault(name, run)
    return {**chosen, CANARY: {**plain, "canary": True}}, of


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, by run and seed."""
    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    finals: dict[str, list[float]] = {name: [] for name in spec["runs"]}
    todo = [(name, seed) for seed in range(spec["seeds"]) for name in spec["runs"]]
    for done, (name, seed) in enumerate(todo):
        of = task(device, seed, spec.get("size"))
        finals[name].append(_train(name, spec["runs"][name], of, seed, spec["steps"], device))
        report(done + 1, len(todo))
    return finals


def _train(name: str, run: Mapping[str, Any], of: Task, seed: int, steps: int, device: torch.device) -> float:
    if "plan" in run:
        way = planned(parse_plan(run["plan"], source=name))
    else:
        way = Way(precisions=tuple(map(dict, run["precisions"])), samples=tuple(run["samples"]))
    of = replace(of, each=min(of.each, EACH[device.type]))
    draw = seed + 1000 if name == "ddp" + AA else seed
    trainer = Trainer(of, device, replace(way, follows=False), seed=seed, draw=draw, follow=False)
    if run.get("canary"):
        compress(trainer.ddp, TopK(density=DENSITY), error_feedback=False)
    for _ in range(steps):
        trainer.step()
    set_precision(trainer.ddp, {})  # judged as the model that would be used
    final = trainer.held_out_loss()
    return final if isfinite(final) else DIVERGED


def judged(finals: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """By run: mean loss, spread, gap to plain training and whether that counts as worse."""
    return {row.pop("method"): row for row in compare(finals)}
