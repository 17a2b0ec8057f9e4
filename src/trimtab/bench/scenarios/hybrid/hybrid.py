"""`trimtab bench hybrid`: unequal ranks by precision, by shares, by both, and at their physical best.

Each cluster is a job of its own, in which the plans are made as a user's would be (probe, damage, plan) and then
trained by, in blocks of steps that take turns with every other method. `ideal-fp32` and `ideal-plan` are the summed
rates of ranks that train by themselves, all at the same time, nobody waiting: with nothing lowered, and as the plan
with free shares says. The losses come from further runs of the same model (`hybrid.loss`). Finally the allocator is
compared with an exact solver on what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trimtab.bench.harness import AA, Progress, Result
from trimtab.bench.losses import judged
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.hybrid import loss as hybrid_loss
from trimtab.bench.scenarios.hybrid.ranks import on_rank
from trimtab.errors import TrimtabError

CLUSTERS: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "cpu": {"1.0/0.75": (1.0, 0.75, None), "1.0/0.4": (1.0, 0.4, None), "memory": (1.0, 0.75, 0.3)},
    "cuda": {"57/43": (0.57, 0.43, None), "70/30": (0.7, 0.3, None), "memory": (0.57, 0.43, 0.3)},
}
"""The speeds of two ranks, and the second one's memory as a part of the first one's where it is scarce."""

PARTS = LOSS, ALLOCATOR = "loss", "allocator"


def hybrid(device: str, repeats: int, seeds: int, only: Sequence[str], progress: Progress) -> Result:
    """The clusters and parts named by `only`, or all; losses are those of the clusters that are run."""
    if device not in CLUSTERS:
        raise TrimtabError(f"there is no device {device!r}; choose {', '.join(CLUSTERS)}")
    known = (*CLUSTERS[device], *PARTS)
    if unknown := [name for name in only if name not in known]:
        raise TrimtabError(f"there is no part {unknown[0]!r} of this bench; choose {', '.join(known)}")
    chosen = [name for name in known if name in only or not only]
    clusters = [name for name in chosen if name in CLUSTERS[device]]
    if LOSS in chosen and not clusters:
        raise TrimtabError(f"the part loss compares plans; name a cluster too: {', '.join(CLUSTERS[device])}")
    if ALLOCATOR in chosen and find_spec("scipy") is None:
        raise TrimtabError(
            "the part allocator needs SciPy, whose solver it is compared with: pip install 'trimtab[exact]', or leave "
            "it out with --only"
        )
    stages = [*clusters, *(part for part in PARTS if part in chosen)]

    def stage(name: str) -> Progress:
        index = stages.index(name)
        return lambda done, total: progress(index * 1000 + done * 1000 // total, len(stages) * 1000)

    measured: dict[str, dict[str, Any]] = {}
    for name in clusters:
        *speeds, memory = CLUSTERS[device][name]
        spec: dict[str, Any] = {"device": device, "speeds": speeds, "memory": memory, "repeats": repeats}
        measured[name] = run_on_cluster(hosts(spec["speeds"], device), on_rank, spec, stage(name))
    rows = [{"cluster": name, **row} for name, of_cluster in measured.items() for row in of_cluster["rows"]]
    summary: dict[str, Any] = {"device": device}
    if LOSS in chosen:
        runs, run_names = hybrid_loss.runs(measured)
        spec = {"device": device, "runs": runs, "seeds": seeds, "steps": hybrid_loss.STEPS}
        equal = hosts((1.0, 1.0) if device == "cpu" else (0.5, 0.5), device)
        verdicts = judged(run_on_cluster(equal, hybrid_loss.on_rank, spec, stage(LOSS)))
        for row in rows:
            row |= _loss_of(verdicts, run_names[row["cluster"]].get(row["method"]))
        for name in ("ddp" + AA, hybrid_loss.CANARY):
            rows.append({"cluster": "losses", "method": name, **_loss_of(verdicts, name)})
        summary["canary_flagged"] = verdicts[hybrid_loss.CANARY]["worse"]
    for name, of_cluster in measured.items():
        own = {row["method"]: row for row in rows if row["cluster"] == name}
        summary |= {f"{name} {key}": value for key, value in figures(own, of_cluster).items()}
    if ALLOCATOR in chosen:
        summary |= _allocator(measured)
        stage(ALLOCATOR)(1, 1)
    return Result(bench="hybrid", summary=summary, rows=rows)


def _loss_of(verdicts: Mapping[str, Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    own = verdicts[name]
    return {
        "final_loss": own["final_loss"],
        "final_loss_spread": own["spread"],
        "loss_gap": own["gap"],
        "worse": own["worse"],
    }


def figures(rows: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of one cluster."""

    def ratio(key: str, method: str, other: str) -> float | None:
        a, b = rows[method].get(key), rows[other].get(key)
        return None if a is None or not b else a / b

    rivals = [
        row["samples_per_s"]
        for method, row in rows.items()
        if method != "trimtab" and not method.startswith("ideal") and row["samples_per_s"] is not None
    ]
    free = rows["trimtab"]["samples_per_s"]
    predicted = measured["predicted"]["free"]
    return {
        "aa_ratio": ratio("samples_per_s", "ddp" + AA, "ddp"),
        "fixed_over_uniform": ratio("samples_per_s", "trimtab-fixed", "uniform-low"),
        "fixed_lowered": rows["trimtab-fixed"]["operators_lowered"],
        "uniform_lowered": rows["uniform-low"]["operators_lowered"],
        "fixed_error_over_uniform": ratio("gradient_error", "trimtab-fixed", "uniform-low"),
        "fixed_worse": rows["trimtab-fixed"].get("worse"),
        "free_over_ddp": ratio("samples_per_s", "trimtab", "ddp"),
        "free_fraction_of_ideal": rows["trimtab"]["fraction_of_ideal"],
        "free_over_next": free / max(rivals) if free is not None and rivals else None,
        "free_worse": rows["trimtab"].get("worse"),
        "predicted_over_ddp": predicted["plain_step_s"] / predicted["step_s"],
    }


def _allocator(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The allocator compared with an exact solver, at several step times, on every cluster's measured operators."""
    from trimtab.planning.precision.exact import grade
    from trimtab.planning.precision.options import Option

    gaps = []
    for of_cluster in measured.values():
        for choices in of_cluster["choices"].values():
            options = {
                operator: tuple(
                    Option(precision=p, seconds=seconds, damage=damage, memory=0)
                    for p, (seconds, damage) in several.items()
                )
                for operator, several in choices.items()
            }
            least = sum(min(o.seconds for o in several) for several in options.values())
            most = sum(max(o.seconds for o in several if o.damage == 0) for several in options.values())
            for part in (0.1, 0.25, 0.5, 0.75, 0.9):
                gaps.append(grade(options, pace_s=least + part * (most - least)).gap)
    return {"allocator_gaps": len(gaps), "allocator_worst_gap": max(gaps, default=None)}
