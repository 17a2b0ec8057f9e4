"""What was adjusted: bits by layer over time, precision by operator, batch shares, tensor shares, the trade-off."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from trimtab.report.page.cards import Card, chart_map, lines, words
from trimtab.report.page.plan_cards import adjustments, precision_map, role_table, tradeoff
from trimtab.report.page.run_data import RunData
from trimtab.report.page.thinning import Samples, thinned
from trimtab.report.page.values import mapping, number, sequence, text

MOST_ROWS, MOST_COLUMNS = 160, 120
RAW = "raw"
"""Shown for parameters that are sent uncompressed."""


def settings_cards(data: RunData, points: int) -> list[Card]:
    """All of the tab."""
    weights = [name for name, dims in data.layers if dims >= 2]
    made = [
        *bits_map(data),
        *bits_over_time(data, points),
        *batch_shares(data, points),
        *tensor_shares(data),
        *tradeoff(data.plan),
        *adjustments(data.plan),
        *precision_map(data.plan, weights),
        *role_table(data.plan),
    ]
    return made or [
        words("Nothing was adjusted", "No bits, shares, precisions or plan were recorded in this run.")
    ]


def bits_map(data: RunData) -> list[Card]:
    """Bits of every parameter over time; neighbors that always had the same are one row."""
    changes = [
        event for event in data.run.events("bits") if mapping(event.get("bits")) and event["step"] is not None
    ]
    if not changes:
        return []
    by_step = {event["step"]: mapping(event["bits"]) for event in changes}  # the last of a step counts
    steps = sorted(by_step)
    dropped = max(0, len(steps) - MOST_COLUMNS)
    if dropped:
        steps = [steps[at * len(steps) // MOST_COLUMNS] for at in range(MOST_COLUMNS)]
    named = {name for step in steps for name in by_step[step]}
    depth = {name: at for at, (name, _) in enumerate(data.layers)}
    names = sorted(named, key=lambda name: depth.get(name, len(depth)))
    history = {name: tuple(_bits(by_step[step].get(name)) for step in steps) for name in names}
    rows, values = [], []
    for same, group in groupby(names, key=history.__getitem__):
        members = list(group)
        rows.append(
            text(members[0]) if len(members) == 1 else f"{members[0]} … {members[-1]} ({len(members)})"
        )
        values.append(same)
    note = "The first layer of the model is at the top; neighbors with the same bits share a row."
    if dropped:
        note += f" {dropped} of {dropped + len(steps)} changes are left out."
    if len(rows) > MOST_ROWS:
        note += f" The first {MOST_ROWS} of {len(rows)} rows are shown."
    used = {value for row in values for value in row if value is not None}
    numbers = sorted(value for value in used if not isinstance(value, str))
    scale: list[Any] = [*numbers, *([RAW] if RAW in used else [])]
    end = max(data.last_step, steps[-1] + 1)
    edges = [*steps, end]
    title = "Bits of each layer's gradients over time"
    return [
        chart_map(
            title,
            "layer",
            rows[:MOST_ROWS],
            values[:MOST_ROWS],
            scale,
            axis="step",
            edges=edges,
            neutral=RAW,
            note=note,
        )
    ]


def _bits(value: Any) -> float | str | None:
    known = number(value)
    return RAW if known == 0 else known


def bits_over_time(data: RunData, points: int) -> list[Card]:
    samples = data.run.steps[data.ranks[0]] if data.ranks else []
    if not any(number(s.get("bits")) is not None for s in samples):
        return []
    one = Samples(([s["step"] for s in samples],), [s.get("bits") for s in samples])
    series = [{"name": "bits a value", "steps": True, **thinned(one, points)}]
    return [lines("Bits on average", [("step", "")], ("bits a value", ""), series, zero=True, half=True)]


def batch_shares(data: RunData, points: int) -> list[Card]:
    """Samples of each rank over time."""
    alike: dict[tuple[tuple[int, float], ...], list[int]] = {}
    for rank in data.ranks:
        known = tuple(
            (s["step"], s["samples"]) for s in data.run.steps[rank] if number(s.get("samples")) is not None
        )
        if known:
            alike.setdefault(known, []).append(rank)
    if not alike:
        return []
    series = [
        {
            "name": f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}",
            "steps": True,
            **thinned(Samples(([step for step, _ in known],), [samples for _, samples in known]), points),
        }
        for known, ranks in alike.items()
    ]
    title = "Batch shares: samples of each rank"
    return [lines(title, [("step", "")], ("samples a step", ""), series, zero=True, half=True)]


def tensor_shares(data: RunData) -> list[Card]:
    """Shares of the units by rank, at each decision that moved some."""
    moves = [
        (event["step"] or 0, [number(share) for share in sequence(event.get("after"))])
        for event in data.run.events("decision")
        if event.get("what") == "tensor" and sequence(event.get("after"))
    ]
    if not moves:
        return []
    ranks = min(32, max(len(shares) for _, shares in moves))
    steps = [step for step, _ in moves] + [max(data.last_step, moves[-1][0])]
    series = []
    for rank in range(ranks):
        own = [shares[rank] if rank < len(shares) else None for _, shares in moves]
        series.append({"name": f"rank {rank}", "steps": True, "x": [steps], "y": [*own, own[-1]]})
    return [lines("Tensor shares", [("step", "")], ("share of the units", ""), series, zero=True, half=True)]
