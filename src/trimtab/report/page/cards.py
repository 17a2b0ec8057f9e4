"""What a page is made of: each function makes the JSON of one card, which `assets/page.js` and `kinds.js` draw.

A card is a dictionary with its `kind`; the page's text is always data, never markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.report.page.values import text

Card = dict[str, Any]

PARTS = ("data", "compute", "codec", "wire", "waiting", "optimizer")
"""What the time of a step is divided into."""

PART_COLORS = (3, 0, 1, 4, 7, 2)
MOST_ROWS = 500
"""Rows of the longest table or list."""


def figure(label: str, value: str, note: str = "", tone: str = "") -> Card:
    """One number that matters; `tone` is good, warn or bad."""
    return {"label": label, "value": value, "note": note, "tone": tone}


def figures(*items: Card) -> Card:
    return {"kind": "figures", "items": list(items)}


def words(title: str, note: str) -> Card:
    return {"kind": "text", "title": title, "note": note}


def code(title: str, content: str, note: str = "") -> Card:
    return {"kind": "code", "title": title, "text": text(content, 4000), "note": note}


def table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[Any]],
    *,
    note: str = "",
    chosen: int | None = None,
    half: bool = False,
) -> Card:
    """Columns are (name, unit); units s, B (powers of ten), iB (powers of two) and % are scaled by the page.

    Columns without any value are left out.
    """
    if len(rows) > MOST_ROWS:
        note = f"{note} The first {MOST_ROWS} of {len(rows)} rows.".strip()
    used = [
        at
        for at in range(len(columns))
        if at == 0 or not rows or any(row[at] not in (None, "") for row in rows)
    ]
    columns, rows = [columns[at] for at in used], [[row[at] for at in used] for row in rows]
    cells = [[text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows[:MOST_ROWS]]
    return {
        "kind": "table",
        "title": title,
        "note": note,
        "half": half,
        "columns": [{"name": name, "unit": unit} for name, unit in columns],
        "rows": [{"cells": row, "chosen": True} if at == chosen else row for at, row in enumerate(cells)],
    }


def table_of(title: str, rows: Sequence[Mapping[str, Any]], *, note: str = "") -> Card:
    """A table of dictionaries; a suffix of the key (`_ms`, `_s`, `_bytes`) says the unit."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    known = [(*_unit(key), key) for key in keys]
    return table(
        title,
        [(name, unit) for name, unit, _, _ in known],
        [[_scaled(row.get(key), factor) for _, _, factor, key in known] for row in rows],
        note=note,
    )


def _unit(key: str) -> tuple[str, str, float]:
    for ending, unit, factor in (
        ("_ms", "s", 1e-3),
        ("_bytes", "B", 1),
        ("_gib", "iB", 2**30),
        ("_mb", "B", 1e6),
    ):
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " "), unit, factor
    if key.endswith("_s") and not key.endswith("per_s"):
        return key.removesuffix("_s").replace("_", " "), "s", 1
    return key.replace("_per_s", "/s").replace("_", " "), "", 1


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value * factor if isinstance(value, int | float) and factor != 1 else value


def lines(
    title: str,
    x: Sequence[tuple[str, str]],
    y: tuple[str, str],
    series: Sequence[Mapping[str, Any]],
    *,
    note: str = "",
    half: bool = False,
    **more: Any,
) -> Card:
    """Lines over one or several x axes.

    Each series has `name`, `x` (a list for each axis), `y`, if merged `low` and `high`, and may have `dash`, `steps`
    and `color`. `more`: `marks` ({x: by axis, label, tone}), `limits` ({y, label}), `dots` ({x, y, label}), `zero`,
    `points`, `log`.
    """
    if any("low" in one for one in series):
        note = f"{note} Lines are means; bands are the lowest and highest values merged into a point.".strip()
    return {
        "kind": "lines",
        "title": title,
        "note": note,
        "half": half,
        "x": [{"name": name, "unit": unit} for name, unit in x],
        "y": {"name": y[0], "unit": y[1]},
        "series": list(series),
        **more,
    }


def bars(
    title: str,
    axis: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    parts: Sequence[str] = PARTS,
    colors: Sequence[int] = PART_COLORS,
    unit: str = "s",
    note: str = "",
) -> Card:
    """Stacked horizontal bars: rows have `label`, `values` by part, and may have `faint` (predicted) and `note`."""
    return {
        "kind": "bars",
        "title": title,
        "note": note,
        "axis": axis,
        "unit": unit,
        "parts": list(parts),
        "colors": list(colors),
        "rows": list(rows),
    }


def spans(
    title: str,
    lanes: Sequence[Mapping[str, Any]],
    *,
    parts: Sequence[str] = PARTS,
    colors: Sequence[int] = PART_COLORS,
    note: str = "",
) -> Card:
    """A timeline: lanes have `label`, `spans` of (start, end, index of the part, name), and may have `first`."""
    return {
        "kind": "spans",
        "title": title,
        "note": note,
        "axis": "time in the step",
        "unit": "s",
        "parts": list(parts),
        "colors": list(colors),
        "lanes": list(lanes),
    }


def chart_map(
    title: str,
    what: str,
    rows: Sequence[str],
    values: Sequence[Sequence[Any]],
    scale: Sequence[Any],
    *,
    axis: str,
    edges: Sequence[float],
    names: Sequence[str] | None = None,
    neutral: str | None = None,
    note: str = "",
) -> Card:
    """Colored cells by row (`what`, such as layers) and column.

    `scale` has every value from low to high; `neutral` is the one that stands for nothing adjusted and comes last.
    """
    return {
        "kind": "map",
        "title": title,
        "note": note,
        "what": what,
        "rows": list(rows),
        "values": [list(row) for row in values],
        "scale": list(scale),
        "axis": axis,
        "edges": list(edges),
        "names": None if names is None else list(names),
        "neutral": neutral,
        "unit": "",
    }


def event(when: str, label: str, said: str, *, more: Sequence[str] = (), tone: str = "") -> Card:
    return {
        "when": when,
        "label": label,
        "text": text(said, 1000),
        "more": [text(line, 1000) for line in more],
        "tone": tone,
    }


def events(title: str, items: Sequence[Card], *, note: str = "") -> Card:
    if len(items) > MOST_ROWS:
        half = MOST_ROWS // 2
        note = f"{note} The first and last {half} of {len(items)} are shown.".strip()
        items = [*items[:half], *items[-half:]]
    return {"kind": "events", "title": title, "note": note, "items": list(items)}


def columns(*items: tuple[str, Sequence[Card]]) -> Card:
    """Side by side, below each other on a phone."""
    return {"kind": "columns", "items": [{"title": title, "blocks": list(blocks)} for title, blocks in items]}
