"""Part of `trimtab bench hybrid`: what the methods do to the loss, and proof that the comparison can see damage.

The same model, operators and code as in the timed runs, on two equal ranks: a rank's speed does not change what it
computes. Batches are smaller, so that there are more steps. The canary discards most of every gradient for good: top-k
without error feedback.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trimtab.api.compress import compress
from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import AA, Progress
from trimtab.bench.losses import final_losses
from trimtab.bench.scenarios.hybrid.plan import make_task
from trimtab.bench.scenarios.hybrid.ranks import Way, make_trainer, planned
from trimtab.codec import TopK
from trimtab.planning.plan import parse_plan

CANARY = "top-k (canary)"
STEPS = 40
SAMPLES = {"cpu": 8, "cuda": 16}
"""Samples of each of two ranks in a step."""

DENSITY = 0.003
"""The fraction of a gradient's values that the canary keeps."""


def runs(
    measured: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """What to train, equal runs once, and by cluster and method the name of the run.

    Args:
        measured: by cluster what `hybrid.ranks.on_rank` returned.
    """
    plain = {"precisions": [{}, {}], "samples": [1, 1], "bits": None}
    chosen: dict[str, dict[str, Any]] = {"ddp": plain, "ddp" + AA: plain}
    known = {json.dumps(plain, sort_keys=True): "ddp"}
    names: dict[str, dict[str, str]] = {}
    for cluster, result in measured.items():
        names[cluster] = {}
        for method in ("ddp", "uniform-low", "shares", "trimtab-fixed", "trimtab"):
            way = result["ways"].get(method)
            if way is None:
                continue
            run = dict(way)
            if method in result["plans"]:
                run["plan"] = result["plans"][method]
            elif len(set(run["samples"])) == 1:
                run["samples"] = [1, 1]
            name = known.setdefault(json.dumps(run, sort_keys=True), f"{cluster} {method}")
            names[cluster][method] = name
            chosen.setdefault(name, run)
    return {**chosen, CANARY: {**plain, "canary": True}}, names


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, by run and seed."""
    device = torch.device(spec["device"])

    def train(name: str, seed: int, data_seed: int) -> float:
        run = spec["runs"][name]
        if "plan" in run:
            way = planned(parse_plan(run["plan"], source=name))
        else:
            precisions = tuple(map(dict, run["precisions"]))
            way = Way(precisions=precisions, samples=tuple(run["samples"]), bits=run["bits"])
        task = make_task(device, seed, spec.get("size"))
        task = replace(task, samples=min(task.samples, SAMPLES[device.type]))
        trainer = make_trainer(
            task, replace(way, follows=False), seed=seed, data_seed=data_seed, follow=False
        )
        if run.get("canary"):
            compress(trainer.model, TopK(density=DENSITY), error_feedback=False)  # type: ignore[arg-type]
        for step in range(spec["steps"]):
            trainer.train(trainer.batch(step))
        set_precision(trainer.model, {})  # judged as the model that would be used
        return trainer.held_out_loss()

    return final_losses(spec["runs"], range(spec["seeds"]), train, report)
