"""Pages of what is only predicted: a plan, and a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.cards import (
    Card,
    bars,
    event,
    events,
    figure,
    figures,
    lines,
    spans,
    table_of,
    words,
)
from trimtab.report.page.document import Document, Section
from trimtab.report.page.plan_cards import (
    adjustments,
    precision_map,
    predicted_steps,
    rank_roles,
    role_table,
    roles_of,
    tradeoff,
)
from trimtab.report.page.values import duration, mapping, number, sequence, text

PREDICTED = ("", "Everything on this page is predicted: nothing of it has run.")
FOOTER = "Made by trimtab. This file is complete in itself and loads nothing from any other place."
PHASES = ("forward", "backward", "codec", "wire", "optimizer")
PHASE_COLORS = (5, 0, 1, 4, 2)
MOST_SPANS = 6000


def plan_document(plan: dict[str, Any], *, title: str, model: str, operators: Sequence[str] = ()) -> Document:
    """The page of a plan file; `operators` are the model's, by depth."""
    predicted = mapping(plan.get("predicted"))
    step_s, plain_s = number(predicted.get("step_s")), number(predicted.get("plain_step_s"))
    batch = sum(number(roles_of(plan)[name].get("samples")) or 0 for name in rank_roles(plan, 1 << 20))
    gain = plain_s / step_s if plain_s and step_s else None
    items = [figure("Step, predicted", duration(step_s))]
    if gain is not None:
        tone = "good" if gain > 1.02 else ""
        items.append(figure("Plain DDP, predicted", duration(plain_s), f"{gain:.3g} times as fast", tone))
    items.append(figure("Bits of gradients", text(plan.get("bits") or "uncompressed")))
    damage = number(predicted.get("damage"))
    if damage is not None:
        note = "squared relative error of the gradient by lower precision"
        items.append(figure("Damage", f"{damage:.3g}", note))
    reasons = [event("", "", text(reason)) for reason in sequence(plan.get("reasons"))]
    verdict = f"{duration(step_s)} a step is predicted"
    if gain is not None:
        verdict += f", {gain:.3g} times as fast as plain DDP" if gain > 1.005 else ", as fast as plain DDP"
    cards: list[Card] = [figures(*items), *predicted_steps(plan), *_roles_bars(plan)]
    cards += [*tradeoff(plan), *adjustments(plan), *role_table(plan)]
    why = [events("Why the plan is as it is", reasons)] if reasons else []
    count = sum(
        int(number(sequence(pair)[1]) or 0)
        for pair in sequence(plan.get("ranks"))
        if len(sequence(pair)) == 2
    )
    return Document(
        what="plan",
        title=title,
        subtitle=f"{model} · {count:,} ranks · global batch {batch:,.0f}",
        verdict=f"{verdict}.",
        notes=[PREDICTED],
        footer=FOOTER,
        sections=[
            Section(id="overview", title="Overview", blocks=cards),
            Section(id="why", title="Why", blocks=why),
            Section(
                id="precision",
                title="Precision",
                blocks=precision_map(plan, [f"{op}.weight" for op in operators]),
            ),
        ],
    )


def _roles_bars(plan: dict[str, Any]) -> list[Card]:
    step_s = number(mapping(plan.get("predicted")).get("step_s"))
    rows = []
    for name, role in list(roles_of(plan).items())[:40]:
        compute_s = number(role.get("compute_s"))
        if compute_s and step_s:
            rows.append({"label": name, "values": [compute_s, max(0.0, step_s - compute_s)], "faint": True})
    parts = ["compute", "exchange and waiting"]
    return [bars("A step, by role", "time of a step", rows, parts=parts, colors=[0, 4])] if rows else []


def simulation_document(
    *, model: str, outcomes: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]], said: Sequence[str],
    roles: Sequence[str], timeline: Sequence[tuple[int | None, str, str, float, float]],
) -> Document:  # fmt: skip
    """The page of a simulation: its what-ifs, and the replayed step of the cluster as given.

    Args:
        timeline: (role or None for a transfer, phase, name, start, end) of every span.
    """
    given = outcomes[0]
    step_s = (number(given.get("step_ms")) or 0.0) / 1e3
    titled = [dict(row) for row in outcomes]
    rows = [
        {
            "label": text(row.get("what"), 60),
            "values": [(number(row.get("step_ms")) or 0.0) / 1e3],
            "faint": True,
        }
        for row in (*outcomes, *cases)
        if number(row.get("step_ms"))
    ]
    parts = _parts(roles, timeline)
    overview: list[Card] = [
        bars("Step time of every what-if", "step", rows, parts=["step"], colors=[0]),
        table_of("What if", [_flat(row) for row in titled]),
    ]
    overview += [table_of("Each planned anew", [_flat(row) for row in cases])] if cases else []
    overview += [events("In words", [event("", "", text(line, 1000)) for line in said])] if said else []
    return Document(
        what="simulation",
        title=f"one step of {model}",
        subtitle=f"{text(given.get('ranks') or '')} ranks".strip(),
        verdict=f"{duration(step_s)} a step is predicted for the cluster as given.",
        notes=[PREDICTED],
        footer=FOOTER,
        sections=[
            Section(id="overview", title="Overview", blocks=overview),
            Section(id="step", title="Step", blocks=parts),
            Section(id="cost", title="Cost", blocks=_costs([*outcomes, *cases])),
        ],
    )


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, dict | list | tuple)}


def _parts(roles: Sequence[str], timeline: Sequence[tuple[int | None, str, str, float, float]]) -> list[Card]:
    lanes: dict[str, dict[str, Any]] = {}
    for role, phase, name, start, end in timeline[:MOST_SPANS]:
        if phase not in PHASES:
            continue
        label = (
            "wire"
            if role is None
            else roles[role]
            if phase not in ("codec", "wire")
            else f"{roles[role]} · {phase}"
        )
        lane = lanes.setdefault(
            label, {"label": label, "spans": [], "first": role is not None, "faint": True}
        )
        lane["spans"].append((start, end, PHASES.index(phase), text(name, 80)))
    if not lanes:
        return [words("No timeline", "This step has no operators.")]
    note = "Drag, or press + and -, to zoom; double-click or 0 shows all."
    if len(timeline) > MOST_SPANS:
        note += f" The first {MOST_SPANS} of {len(timeline)} spans."
    return [spans("The predicted step", list(lanes.values()), parts=PHASES, colors=PHASE_COLORS, note=note)]


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[Card]:
    priced = [
        (number(row.get("price_per_hour")), number(row.get("samples_per_s")), text(row.get("what"), 60))
        for row in rows
    ]
    known = [(price, rate, name) for price, rate, name in priced if price is not None and rate is not None]
    if not known:
        return []
    series = [{"name": name, "x": [[price]], "y": [rate]} for price, rate, name in known]
    axes = [("price of an hour", "")]
    return [lines("Speed against price", axes, ("samples a second", ""), series, points=True, zero=True)]
