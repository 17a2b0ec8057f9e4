"""`trimtab plan`: what each rank should do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.errors import TrimtabError
from trimtab.planning.make_plan import Bits
from trimtab.planning.plan import Plan
from trimtab.strict_files import require_writable

WIDTH = 48
"""Characters of the curve of step time against damage."""


def plan(
    cluster: Annotated[
        Path, typer.Option(help="Cluster file with its profile, as written by `trimtab probe`.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Global batch: samples per step, over all ranks.")],
    model: Annotated[
        str | None, typer.Option(help="As for `trimtab probe`; by default the only one that was probed.")
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            help="free: batch shares follow speed. fixed: equal shares, slow ranks get lower precision."
        ),
    ] = "free",
    damage: Annotated[
        float, typer.Option(min=0, help="Allowed squared relative error of the gradient.")
    ] = 0.01,
    bits: Annotated[
        str, typer.Option(help="Bits of gradients: 1 to 8, none, adaptive, or auto for the fastest.")
    ] = "auto",
    layout: Annotated[
        str,
        typer.Option(
            help="data: a copy of the model on every rank. N: tensor groups of N ranks. auto: groups where they are "
            "faster or a copy does not fit."
        ),
    ] = "auto",
    max_penalty: Annotated[
        float,
        typer.Option(
            help="Expected relative increase of the loss that is allowed to local steps, which the plan mentions where "
            "they would be much faster."
        ),
    ] = 0.01,
    precision: Annotated[
        str | None,
        typer.Option(help="Precisions to choose from, comma-separated; by default all that were probed."),
    ] = None,
    adjust: Annotated[
        str,
        typer.Option(
            help="What may be adjusted: auto (all), exact (only what changes no result), none, or some of bits, shares "
            "and precision, comma-separated."
        ),
    ] = "auto",
    indicator: Annotated[
        str, typer.Option(help="variance, measured, depth, curvature or random.")
    ] = "variance",
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Plan without one of this host or class.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="Plan with more devices: 2xT4.")] = None,
    link_factor: Annotated[
        float | None, typer.Option(help="Plan with links this many times as fast.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate between hosts that have no link in the file: 1gbit.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write (.json).")] = Path("plan.json"),
    html: Annotated[Path | None, typer.Option(help="Also write a page that shows the plan (.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """What should each rank do? Samples, precisions and bits of every rank, as a file for `trimtab run`.

    Example: [bold]trimtab plan --cluster cluster.json --model gpt --batch-size 8 --out plan.json[/bold]
    """
    from trimtab.api.plan import plan as make_plan
    from trimtab.cli.terminal import print_table, progress_bar
    from trimtab.cluster import load_cluster, model_name
    from trimtab.planning.cluster_changes import changed
    from trimtab.planning.plan import save_plan

    if out.suffix.lower() != ".json":
        raise TrimtabError(f"{out}: a plan file must end in .json")
    require_writable(out)
    if html is not None:
        require_writable(html)
    if batch not in ("free", "fixed"):
        raise TrimtabError(f"plan: --batch is free or fixed; got {batch!r}")
    if layout not in ("auto", "data") and not (layout.isdecimal() and int(layout) > 1):
        raise TrimtabError(f"plan: --layout is auto, data, or a number of ranks from 2; got {layout!r}")
    chosen_bits = parse_bits(bits)
    loaded_cluster = load_cluster(cluster)
    try:
        model = model_name(loaded_cluster, model)
        loaded_cluster = changed(loaded_cluster, remove=remove, add=add, link_factor=link_factor, link=link)
        with progress_bar("planning") as progress:
            made = make_plan(
                model,
                loaded_cluster,
                batch_size,
                batch=batch,  # type: ignore[arg-type]  # checked above
                damage=damage,
                bits=chosen_bits,
                layout=int(layout) if layout.isdecimal() else layout,  # type: ignore[arg-type]  # checked above
                max_penalty=max_penalty,
                indicator=indicator,
                precisions=None if precision is None else [p for p in precision.split(",") if p],
                autocast=autocast,
                adjust=adjust,
                progress=progress,
            )
    except TrimtabError as error:
        raise TrimtabError(f"{cluster}: {error}") from None
    save_plan(made, out)
    if html is not None:
        _write_page(made, html, title=out.name, model=model)
    if as_json:
        print(json.dumps(tree(made, out), indent=2))
        return
    table = rows(made)
    for column in ("device", "memory_gib"):  # shown only where they tell something
        if all(row[column] in (None, row["role"]) for row in table):
            table = [{key: value for key, value in row.items() if key != column} for row in table]
    print_table(f"{out}: {made.batch} shares, {model}", table)
    print_table("predicted", [summary(made)])
    if worth := adjustments(made):
        print_table("what each adjustment is worth: the step with it alone, and without it", worth)
    for line in drawn(made):
        print(line)
    for reason in made.reasons:
        print(f"- {reason}")
    if html is not None:
        print(f"page: {html}")


def _write_page(plan: Plan, path: Path, *, title: str, model: str) -> None:
    from trimtab.report.page.document import to_html, write_page
    from trimtab.report.page.predicted import plan_document

    operators = list(dict.fromkeys(name for role in plan.roles.values() for name in role.choices))
    document = plan_document(asdict(plan), title=title, model=model, operators=operators)
    write_page(to_html(document), path)


def parse_bits(text: str) -> Bits:
    """``4``, ``none``, ``adaptive`` or ``auto``."""
    words: dict[str, Bits] = {"none": None, "adaptive": "adaptive", "auto": "auto"}
    words |= {str(bits): bits for bits in range(1, 9)}
    if text in words:
        return words[text]
    raise TrimtabError(f"plan: --bits is 1 to 8, none, adaptive or auto; got {text!r}")


def rows(plan: Plan) -> list[dict[str, Any]]:
    """A table row for each role."""
    counts: dict[str, int] = {}
    for name, count in plan.ranks:
        counts[name] = counts.get(name, 0) + count
    return [
        {
            "role": name,
            "device": role.device,
            "ranks": counts[name],
            "samples": role.samples,
            "lowered": len(role.precisions),
            "of": len(role.choices) or None,  # unknown in tensor groups
            "to": ", ".join(sorted(set(role.precisions.values()))) or None,
            "compute_ms": role.compute_s * 1e3,
            "peak_gib": role.peak_bytes / 2**30,
            "memory_gib": None if role.memory_bytes is None else role.memory_bytes / 2**30,
        }
        for name, role in plan.roles.items()
    ]


def summary(plan: Plan) -> dict[str, Any]:
    """What the plan is predicted to achieve."""
    predicted = plan.predicted
    return {
        "step_ms": predicted.step_s * 1e3,
        "plain_ddp_ms": predicted.plain_step_s * 1e3,
        "gain": predicted.plain_step_s / predicted.step_s if predicted.step_s else 1.0,
        "samples_per_s": plan.batch_size / predicted.step_s if predicted.step_s else None,
        "damage": predicted.damage,
        "uniform_low_damage": predicted.uniform_damage,
        "bits": plan.bits,
        **({"wrapper": plan.wrapper} if plan.wrapper != "ddp" else {}),
    }


def adjustments(plan: Plan) -> list[dict[str, Any]]:
    """A table row for each adjustment, and for ranks that the job could do without."""
    alone, without = plan.predicted.alone, plan.predicted.without
    return [
        {
            "adjustment": name,
            **{f"{key}_ms": _ms(of.get(name)) for key, of in (("alone", alone), ("without", without))},
        }
        for name in dict.fromkeys((*alone, *without))
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def tradeoff(plan: Plan) -> list[dict[str, Any]]:
    """Time against damage: a row for each point of the curve."""
    own = (plan.predicted.step_s, plan.predicted.damage)
    return [
        {"step_ms": step_s * 1e3, "damage": damage, "chosen": (step_s, damage) == own}
        for step_s, damage in plan.predicted.tradeoff
    ]


def drawn(plan: Plan) -> list[str]:
    """The curve of step time against damage in plain characters; the plan's own point is a star."""
    points = tradeoff(plan)
    if len(points) < 2:
        return []
    slowest, fastest = points[0]["step_ms"], points[-1]["step_ms"]
    lines = ["step time against damage, from the fastest step (* is this plan)", "  damage   step ms"]
    for point in points:
        stem = "-" * round(WIDTH * (point["step_ms"] - fastest) / (slowest - fastest))
        lines.append(
            f"{point['damage']:8.2g}  {point['step_ms']:8.4g}  |{stem}{'*' if point['chosen'] else 'o'}"
        )
    return ["", *lines, ""]


def tree(plan: Plan, out: Path) -> dict[str, Any]:
    """The plan's summary for JSON; its file has all of it."""
    return {
        "out": str(out),
        "hash": plan.hash,
        "model": plan.model,
        "batch": plan.batch,
        **summary(plan),
        "adjustments": adjustments(plan),
        "tradeoff": tradeoff(plan),
        "roles": rows(plan),
        "ranks": plan.ranks,
        "reasons": plan.reasons,
    }
