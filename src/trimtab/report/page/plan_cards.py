"""Cards of a plan (the JSON of a plan file): roles, trade-off, what each adjustment is worth, precisions by depth."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from trimtab.report.page.cards import Card, bars, chart_map, lines, table
from trimtab.report.page.values import mapping, number, sequence, text

OWN = "as written"
"""The precision of operators that the plan does not lower."""

PRECISIONS = (
    "int4",
    "int8",
    "fp8",
    "float8",
    "fp16",
    "float16",
    "bf16",
    "bfloat16",
    "tf32",
    "fp32",
    "float32",
)
MOST_OPERATORS = 160


def roles_of(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {text(name): mapping(role) for name, role in mapping(plan.get("roles")).items()}


def rank_roles(plan: dict[str, Any], most: int = 4096) -> list[str]:
    """The role of every rank, in rank order."""
    names: list[str] = []
    for pair in sequence(plan.get("ranks")):
        name, count = (*sequence(pair), None, None)[:2]
        names += [text(name)] * int(min(most - len(names), max(0, number(count) or 0)))
    return names


def role_table(plan: dict[str, Any]) -> list[Card]:
    roles, ranks = roles_of(plan), rank_roles(plan)
    rows = [
        [
            name,
            text(role.get("device")),
            ranks.count(name),
            number(role.get("samples")),
            len(mapping(role.get("precisions"))),
            ", ".join(sorted({text(each) for each in mapping(role.get("precisions")).values()})) or "none",
            number(role.get("compute_s")),
            number(role.get("peak_bytes")),
            number(role.get("memory_bytes")),
        ]
        for name, role in roles.items()
    ]
    titles = [
        ("role", ""),
        ("device", ""),
        ("ranks", ""),
        ("samples", ""),
        ("operators lowered", ""),
        ("to", ""),
    ]
    titles += [("compute", "s"), ("peak memory", "iB"), ("limit", "iB")]
    return (
        [table("Roles: what each rank does", titles, rows, note="Ranks of one role do the same.")]
        if rows
        else []
    )


def tradeoff(plan: dict[str, Any]) -> list[Card]:
    """The curve of step time against damage, with the plan's own point."""
    predicted = mapping(plan.get("predicted"))
    points = [
        [number(value) for value in sequence(point)[:2]] for point in sequence(predicted.get("tradeoff"))
    ]
    known = sorted((d, s) for s, d in (p for p in points if len(p) == 2) if s is not None and d is not None)
    chosen = (number(predicted.get("damage")), number(predicted.get("step_s")))
    if len(known) < 2 or chosen[0] is None or chosen[1] is None:
        return []
    series = [{"name": "best plans", "x": [[d for d, _ in known]], "y": [s for _, s in known]}]
    return [
        lines(
            "Trade-off: step time against damage",
            [("damage: squared relative error of the gradient", "")],
            ("step", "s"),
            series,
            note="Each point is the fastest plan for the damage it does. The ring is the plan that was chosen.",
            dots=[{"x": chosen[0], "y": chosen[1], "label": "chosen"}],
            points=True,
            half=True,
        )
    ]


def adjustments(plan: dict[str, Any]) -> list[Card]:
    """The step with each adjustment alone, and without it."""
    predicted = mapping(plan.get("predicted"))
    alone, without = mapping(predicted.get("alone")), mapping(predicted.get("without"))
    rows = [
        [name, number(alone.get(name)), number(without.get(name))]
        for name in dict.fromkeys((*alone, *without))
    ]
    title = "What each adjustment is worth"
    shown = [("adjustment", ""), ("step with it alone", "s"), ("step without it", "s")]
    return [table(title, shown, rows, half=True)] if rows else []


def predicted_steps(plan: dict[str, Any], measured_s: float | None = None) -> list[Card]:
    """Plain DDP, the plan and, where it ran, what was measured, as bars."""
    predicted = mapping(plan.get("predicted"))
    known = [
        ("plain DDP, predicted", number(predicted.get("plain_step_s")), True),
        ("this plan, predicted", number(predicted.get("step_s")), True),
        ("this plan, measured", measured_s, False),
    ]
    rows = [{"label": label, "values": [s], "faint": faint} for label, s, faint in known if s]
    return [bars("Step time", "step", rows, parts=["step"], colors=[0])] if len(rows) > 1 else []


def precision_map(plan: dict[str, Any], layers: Sequence[Any] = ()) -> list[Card]:
    """The precision of every operator by depth and role; `layers` are the names of the model's parameters, if known."""
    roles = roles_of(plan)
    lowered = {
        name: {text(op): text(p) for op, p in mapping(role.get("precisions")).items()}
        for name, role in roles.items()
    }
    if not any(lowered.values()):
        return []
    known = dict.fromkeys(text(name).rpartition(".")[0] for name in layers)
    operators = [op for op in dict.fromkeys((*known, *(op for own in lowered.values() for op in own))) if op]
    operators = [op for op in operators if "*" not in op][:MOST_OPERATORS]
    values = [[_precision(own, op) for own in lowered.values()] for op in operators]
    used = {value for row in values for value in row}
    scale = sorted(
        used, key=lambda p: (p == OWN, PRECISIONS.index(p) if p in PRECISIONS else len(PRECISIONS), p)
    )
    return [
        chart_map(
            "Precision of each operator, by depth",
            "operator",
            operators,
            values,
            scale,
            axis="role",
            edges=list(range(len(lowered) + 1)),
            names=list(lowered),
            neutral=OWN,
            note="The first operator of the model is at the top.",
        )
    ]


def _precision(own: dict[str, str], operator: str) -> str:
    if operator in own:
        return own[operator]
    return next((p for pattern, p in own.items() if fnmatch.fnmatchcase(operator, pattern)), OWN)
