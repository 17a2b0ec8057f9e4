"""The command line of `trimtab simulate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from trimtab.cli.terminal import print_table
from trimtab.cluster import load_cluster
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.models.spec import load_model
from trimtab.planning.plan_file import load_plan
from trimtab.planning.what_if import Outcome, even, planned, what_ifs, workload_of
from trimtab.predict.replay.trace import save_trace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trimtab.planning.plan import Plan

SHOWN = (
    "what",
    "ranks",
    "step_ms",
    "samples_per_s",
    "wire_ms",
    "codec_ms",
    "cost_per_million_samples",
    "estimated",
)
"""Columns of the table; JSON has them all."""


def command(
    cluster: Path,
    model: str,
    plan: Path | None,
    batch: int,
    autocast: str | None,
    changes: Mapping[str, Any],
    *,
    real: bool,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate the job as given and with each change; print, and write the trace of the first."""
    given = load_cluster(cluster)
    kinds = {device.kind for device in given.devices.values()}
    workload = workload_of(model, samples=batch, autocast=autocast, device=min(kinds), real=real)
    try:
        if plan is None:
            setting = even(given, batch)
        else:
            given, setting = planned(_plan_for(plan, model), given)
        outcomes = what_ifs(given, workload, setting, **changes)
    except TrimtabError as error:
        raise TrimtabError(f"{cluster}: {error}") from None
    for said in dict.fromkeys(outcome.out_of_reach for outcome in outcomes):
        if said is not None:
            logger().warning("%s: %s", cluster, said)
    if trace is not None:
        save_trace(trace, outcomes[0].timeline, outcomes[0].roles)
    if as_json:
        print(json.dumps({"model": model, "outcomes": [tree(outcome) for outcome in outcomes]}, indent=2))
        return
    rows = [outcome.row() for outcome in outcomes]
    print_table(f"one step of {model}", [{k: row[k] for k in SHOWN if k in row} for row in rows])
    print_table("ranks, as given", ranks(outcomes[0]))
    for outcome in outcomes:
        print(outcome.words())


def _plan_for(path: Path, model: str) -> Plan:
    """A plan, if it is for this model."""
    plan = load_plan(path)
    found = fingerprint(load_model(model, torch.device("meta")).model)
    if plan.model != found:
        raise TrimtabError(
            f"{path} was made for another model (fingerprint {plan.model}) than {model} ({found}); make it anew with "
            f"`trimtab plan --model {model}`"
        )
    return plan


def ranks(outcome: Outcome) -> list[dict[str, Any]]:
    """A line for each device class."""
    return [
        {
            "device": role.name,
            "ranks": role.ranks,
            "samples": outcome.setting.ranks[role.name].samples,
            "compute_ms": role.compute_s * 1e3,
            "wait_ms": role.wait_s * 1e3,
            "utilisation": role.utilisation,
            "peak_gib": outcome.memory[role.name].peak / 2**30,
            "estimated": role.name in outcome.estimated,
        }
        for role in outcome.timeline.roles
    ]


def tree(outcome: Outcome) -> dict[str, Any]:
    """An outcome for JSON."""
    return {
        **outcome.row(),
        "bottleneck": outcome.words(),
        "out_of_reach": outcome.out_of_reach,
        "devices": ranks(outcome),
    }
