"""`trimtab simulate`: predicted step times on hardware you need not own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path  # typer resolves annotations at run time
from typing import Annotated, Any

import typer

import trimtab
from trimtab.cluster import Cluster
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.planning.cases import Case
from trimtab.planning.plan import Plan
from trimtab.planning.what_if import Outcome
from trimtab.workload import Workload

SHOWN = (
    "what",
    "ranks",
    "batch_size",
    "step_ms",
    "samples_per_s",
    "wire_ms",
    "codec_ms",
    "price_per_hour",
    "cost_per_million_samples",
    "estimated",
)
"""Columns of the table; JSON has all of them."""


def simulate(
    cluster: Annotated[
        Path, typer.Option(help="Cluster file with its profile, as written by `trimtab probe`.")
    ],
    model: Annotated[
        str | None, typer.Option(help="As for `trimtab probe`; by default the only one that was probed.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="What each rank does, from `trimtab plan`.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank, without a plan.")] = 4,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Global batch of every what-if; by default the plan's, or --batch for each of its ranks.",
        ),
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="What if this host or class had one less?")] = None,
    add: Annotated[list[str] | None, typer.Option(help="What if there were more devices: 2xT4.")] = None,
    link_factor: Annotated[
        float | None, typer.Option(help="What if links were this many times as fast?")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate between hosts that have no link in the file: 1gbit.")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a device for an hour: T4=0.35. Repeatable.")
    ] = None,
    budget_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Which what-if is fastest for at most this price per hour?")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(min=1, max=8, help="What if gradients were sent in this many bits?")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Plan no further what-if after this time; even shares are used then.")
    ] = 120.0,
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="For a model that was not probed: build it and run it, not only its outline."
        ),
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the step's trace for ui.perfetto.dev.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with all of it (.html).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """How long would a step take on this cluster, with this plan, with these devices? Which are worth renting?

    Every change to the cluster is planned anew and compared with the cluster as given at its own best.

    Example: [bold]trimtab simulate --cluster cluster.json --add 2xT4 --price T4=0.35 --link-factor 10[/bold]
    """
    from trimtab.cli.terminal import print_table
    from trimtab.cluster import check_profile, load_cluster, model_name
    from trimtab.planning.cases import changed_clusters, verdicts
    from trimtab.planning.cluster_changes import (
        parsed_prices,
        priced,
        require_one_kind,
        require_priced,
        with_link,
    )
    from trimtab.planning.plan import load_plan
    from trimtab.planning.what_if import even, planned, what_ifs
    from trimtab.predict.replay.trace import save_trace

    base, loaded = load_cluster(cluster), None if plan is None else load_plan(plan)
    try:
        if base.profile is not None:
            check_profile(base.profile, trimtab=trimtab.__version__)
        model = model_name(base, model)
        workload = _workload(base, model, batch, autocast, real)
        prices = parsed_prices(price or [])
        base = priced(base if link is None else with_link(base, link), prices)
        changes = changed_clusters(
            base,
            remove=remove or [],
            add=add or [],
            link_factor=link_factor,
            always=budget_per_hour is not None,
        )
        if len({base.devices[rank.device].kind for rank in base.ranks()}) == 1:
            for _, changed in changes:
                require_one_kind(changed)
        require_priced([base, *(changed for _, changed in changes)], prices)
        changes = [(name, priced(changed, prices)) for name, changed in changes]
        job, setting = base, even(base, batch)
        if loaded is not None:
            _require_model(loaded, f"{plan}", base, model)
            job, setting = planned(loaded, base)
            batch_size = batch_size or loaded.batch_size
        outcomes = what_ifs(job, workload, setting, bits=bits, of_plan=loaded is not None)
        cases = _cases(changes, workload, _damages(base, model), batch, batch_size, seconds)
    except TrimtabError as error:
        raise TrimtabError(f"{cluster}: {error}") from None
    far = [one.out_of_reach for one in outcomes]
    for warning in dict.fromkeys(
        (*(far if any(far) else [one.out_of_reach for one in cases]), workload.caveat)
    ):
        if warning is not None:
            logger().warning("%s: %s", cluster, warning)
    if trace is not None:
        save_trace(trace, outcomes[0].timeline, outcomes[0].roles)
    words = verdicts(cases, budget_per_hour) if cases else []
    if html is not None:
        _write_page(html, model, outcomes, cases, words)
    if as_json:
        trees = [tree(outcomes[0]), *(case.row() for case in cases), *map(tree, outcomes[1:])]
        print(json.dumps({"model": model, "outcomes": trees, "verdicts": words}, indent=2))
        return
    rows = [outcome.row() for outcome in outcomes]
    print_table(f"one step of {model}", [{k: row[k] for k in SHOWN if k in row} for row in rows])
    print_table("ranks, as given", ranks(outcomes[0]))
    if cases:
        print_table(
            "each planned anew", [{k: v for k, v in case.row().items() if k in SHOWN} for case in cases]
        )
    for text in (*(outcome.words() for outcome in outcomes), *words):
        print(text)
    if html is not None:
        print(f"page: {html}")


def _write_page(
    path: Path, model: str, outcomes: Sequence[Outcome], cases: Sequence[Case], words: Sequence[str]
) -> None:
    from trimtab.report.page.document import to_html, write_page
    from trimtab.report.page.predicted import simulation_document

    timeline = outcomes[0].timeline
    document = simulation_document(
        model=model,
        outcomes=[outcome.row() for outcome in outcomes],
        cases=[case.row() for case in cases],
        said=[*(outcome.words() for outcome in outcomes), *words],
        roles=[role.name for role in timeline.roles],
        timeline=[(span.role, span.phase, span.name, span.start, span.end) for span in timeline.spans],
    )
    write_page(to_html(document), path)


def _damages(cluster: Cluster, model: str) -> dict[str, dict[str, float]]:
    """What is known of lower precisions; without it what-ifs are planned in the model's own."""
    stored = None if cluster.profile is None else cluster.profile.models.get(model)
    return {} if stored is None else stored.damages


def _cases(
    changes: Sequence[tuple[str, Cluster]],
    workload: Workload,
    damages: dict[str, dict[str, float]],
    samples: int,
    batch_size: int | None,
    seconds: float,
) -> list[Case]:
    """The clusters, each with its plan as long as there is time."""
    from trimtab.planning.cases import planned_case
    from trimtab.planning.what_if import even
    from trimtab.planning.what_if import simulate as replayed

    cases = []
    start = time.perf_counter()
    for name, cluster in changes:
        total = batch_size or samples * cluster.world_size
        if time.perf_counter() - start < seconds:
            cases.append(planned_case(name, cluster, workload, damages, total))
            continue
        each = max(1, total // cluster.world_size)
        step_s = replayed(cluster, workload, even(cluster, each)).timeline.step_s
        logger().warning("%s: no time was left to plan it; predicted with even shares (--seconds)", name)
        cases.append(Case(name=name, cluster=cluster, batch_size=each * cluster.world_size, step_s=step_s))
    return cases


def _workload(cluster: Cluster, model: str, samples: int, autocast: str | None, real: bool) -> Workload:
    """As it was probed, or else captured from the model's code."""
    from trimtab.measure.capture.capture import workload_of
    from trimtab.predict.operators.estimate import measured_kinds, with_estimates

    kinds = {device.kind for device in cluster.devices.values()}
    if cluster.profile is not None:
        kinds = measured_kinds(cluster, with_estimates(cluster, cluster.profile))
        stored = cluster.profile.models.get(model)
        workload = None if stored is None else stored.workload(kinds, autocast)
        if workload is not None:
            return workload
    return workload_of(model, samples=samples, autocast=autocast, device=min(kinds), real=real)


def _require_model(plan: Plan, path: str, cluster: Cluster, model: str) -> None:
    """Refuse a plan that was made for another model."""
    import torch

    from trimtab.measure.fingerprint import fingerprint
    from trimtab.models.spec import load_model

    stored = None if cluster.profile is None else cluster.profile.models.get(model)
    own = fingerprint(load_model(model, torch.device("meta")).model) if stored is None else stored.fingerprint
    if plan.model != own:
        raise TrimtabError(
            f"{path} was made for another model (fingerprint {plan.model}) than {model} ({own}); make a new one with "
            f"`trimtab plan --model {model}`"
        )


def ranks(outcome: Outcome) -> list[dict[str, Any]]:
    """A table row for each device class."""
    return [
        {
            "device": role.name,
            "ranks": role.ranks,
            "samples": outcome.setting.ranks[role.name].samples,
            "compute_ms": role.compute_s * 1e3,
            "wait_ms": role.wait_s * 1e3,
            "utilization": role.utilization,
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
