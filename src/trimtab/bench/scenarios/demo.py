"""What every rank of `trimtab demo` runs: the same training by each method, in blocks of steps that take turns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import Progress
from trimtab.bench.ranks import hosts
from trimtab.bench.scenarios.hybrid.plan import make_plans
from trimtab.bench.trainer import LoaderTrainer, take_turns
from trimtab.cluster import Cluster, cluster_tree
from trimtab.control.step_recorder import observe_backward, record_steps
from trimtab.environment import RUN_DIR
from trimtab.models import tasks
from trimtab.planning.plan import Plan
from trimtab.planning.shares.batch import Adjust
from trimtab.report import events
from trimtab.report.run_info import write_run_info

PLAIN, BITS, SHARES, PLAN = "plain DDP", "trimtab.compress", "+ trimtab.loader", "trimtab.apply(plan)"
IDEAL = "fp32, nothing sent"
SAMPLES = 8
"""Samples of a rank when all have the same number."""

BLOCK, SETTLING, COUNTED = 3, 4, 2
"""Steps of a method before the next has its turn; blocks in which shares settle; blocks that count."""

RECORDED = 40
"""Steps of the plan that are recorded for the report."""


def cluster(*, shaped: bool) -> Cluster:
    """Two hosts, the second at half the speed of the first, with a slow link where links can be shaped."""
    return hosts((1.0, 0.5), link="200mbit" if shaped else None)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Rows of the demo's table, and what trimtab explains about the compression and the plan."""
    blocks = SETTLING + COUNTED
    report(0, blocks + 2)
    # Probed and planned inside the job, as `trimtab run --auto` does it.
    plan = make_plans(_task(), cluster(shaped=spec["shaped"]), bits="adaptive", quick=True).free
    report(1, blocks + 2)
    trainers = {method: _trainer(method, plan) for method in (PLAIN, BITS, SHARES, PLAN, IDEAL)}
    timings = take_turns(
        trainers,
        (IDEAL,),
        (PLAIN, IDEAL),  # nothing about them settles
        warmup=SETTLING,
        repeats=COUNTED,
        steps=BLOCK,
        report=lambda done, total: report(done + 1, total + 2),
    )
    # So that all have trained equally long when losses are compared.
    trainers[PLAIN].block(BLOCK * (SETTLING - 1))
    report(blocks + 2, blocks + 2)
    rows = []
    for method, trainer in trainers.items():
        trained = method != IDEAL
        lowered = [len(plan.roles[plan.role_of(rank)].precisions) for rank in range(plan.world_size)]
        rows.append(
            {
                "method": method,
                "samples_per_s": 1e3 / timings[method].median_ms,
                "over_ddp": timings[PLAIN].median_ms / timings[method].median_ms,
                "wire_mb": trainer.wire_mb if trained else None,
                "shares": "/".join(map(str, trainer.data.shares)) if trained else None,
                "lowered": "/".join(map(str, lowered)) if method == PLAN else None,
                "loss": trainer.held_out_loss() if trained else None,
            }
        )
    if spec.get("run_dir") is not None:
        _record(plan, spec, 2 * SAMPLES * timings[PLAIN].median_ms / 1e3)
    numel = sum(p.numel() for p in trainers[PLAIN].module.parameters())
    steps = blocks * BLOCK
    return {
        "title": f"A GPT of {numel / 1e6:.0f} million parameters, {steps} steps of {2 * SAMPLES} samples",
        "rows": rows,
        "explained": {
            "trimtab.compress": trimtab.explain(trainers[BITS].model),
            "the plan": "; ".join(plan.reasons),
        },
    }


def _record(plan: Plan, spec: Mapping[str, Any], plain_step_s: float) -> None:
    """Train with the plan from the start, with all events in a run folder."""
    os.environ[RUN_DIR] = spec["run_dir"]
    if events.is_first_rank():
        write_run_info(
            Path(spec["run_dir"]),
            command=["trimtab", "demo"],
            script="demo",
            world_size=plan.world_size,
            plain_step_s=plain_step_s,
            cluster=cluster_tree(cluster(shaped=spec["shaped"])),
        )
    observe_backward()
    trainer = _trainer(PLAN, plan)
    record_steps(trainer.model)
    trainer.block(RECORDED)
    events.close(0)


def _task() -> tasks.Task:
    """What every method trains, from the same start."""
    return tasks.gpt(width=192, layers=4, heads=6, context=128, samples=SAMPLES)


def _trainer(method: str, plan: Plan) -> LoaderTrainer:
    task = _task()
    ddp = DistributedDataParallel(task.model)
    if method == PLAN:
        trimtab.apply(ddp, plan)
    elif method not in (PLAIN, IDEAL):
        trimtab.compress(ddp)
    adjust = Adjust() if method in (SHARES, PLAN) else None
    return LoaderTrainer(ddp, task, lr=1e-3, adjust=adjust, plan=ddp if method == PLAN else None)
