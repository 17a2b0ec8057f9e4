"""The page of a bench: its rows as a table, and a chart of each figure that rows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.cards import Card, bars, code, table, table_of
from trimtab.report.page.document import Document, Section
from trimtab.report.page.predicted import FOOTER
from trimtab.report.page.values import mapping, number, text

CHARTED = (
    ("step_ms", "s", 1e-3, "step"),
    ("samples_per_s", "", 1, "samples/s"),
    ("seconds", "s", 1, "seconds"),
)
"""Keys of rows that are drawn, with unit, factor and name; the first that rows have."""


def bench_document(
    *,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    settings: Mapping[str, Any],
    command: str,
) -> Document:
    """The page of what `trimtab bench NAME` measured."""
    figures_ = [
        [text(key).replace("_", " "), value if number(value) is not None else text(value)]
        for key, value in summary.items()
    ]
    cards: list[Card] = [*_charts(rows)]
    if figures_:
        cards.append(table("Summary", [("figure", ""), ("value", "")], figures_))
    cards.append(table_of("Rows", [_flat(row) for row in rows]))
    known = [[text(key), text(value)] for key, value in _leaves(settings)]
    first = next(((key, value) for key, value in summary.items() if number(value) is not None), None)
    verdict = f"{len(rows)} rows were measured."
    if first:
        verdict = f"{text(first[0]).replace('_', ' ')}: {first[1]:.4g}."
    return Document(
        what="bench",
        title=f"trimtab bench {name}",
        subtitle="Measured on this machine in one run.",
        verdict=verdict,
        footer=FOOTER,
        sections=[
            Section(id="overview", title="Overview", blocks=cards),
            Section(
                id="environment",
                title="Environment",
                blocks=[
                    code("How to reproduce it", command),
                    table("Environment", [("", ""), ("value", "")], known),
                ],
            ),
        ],
    )


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Card]:
    for key, unit, factor, shown in CHARTED:
        drawn = [
            {"label": _label(row), "values": [value * factor]}
            for row in rows
            if (value := number(row.get(key))) is not None and value > 0
        ]
        if len(drawn) > 1:
            return [bars(f"Every row: {shown}", shown, drawn[:60], parts=[shown], colors=[0], unit=unit)]
    return []


def _label(row: Mapping[str, Any]) -> str:
    named = [text(value, 40) for value in row.values() if isinstance(value, str)]
    return ", ".join(named[:3]) or "row"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: text(value) if isinstance(value, dict | list | tuple) else value for key, value in row.items()
    }


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inner = mapping(value)
        found += _leaves(inner, f"{prefix}{key} · ") if inner else [(f"{prefix}{key}", value)]
    return found
