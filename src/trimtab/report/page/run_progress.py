"""Loss, memory, bytes and cost of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.report.page.cards import Card, lines, table, words
from trimtab.report.page.plan_cards import rank_roles, roles_of
from trimtab.report.page.run_data import RunData
from trimtab.report.page.thinning import Samples, thinned
from trimtab.report.page.values import number, text

AXES = (("step", ""), ("time", "s"), ("bytes sent", "B"))
MOST_MARKS = 60


def loss_cards(runs: Sequence[tuple[str, RunData]], points: int) -> list[Card]:
    """The loss against steps, time and bytes; of several runs in one chart."""
    series, marks, broken = [], [], 0
    for name, data in runs:
        if not data.losses:
            continue
        by_step = {sample["step"]: sent for sample, sent, _ in data.sent}
        xs = (
            [sample["step"] for sample, _ in data.losses],
            [data.since_start(sample) for sample, _ in data.losses],
            [by_step.get(sample["step"]) for sample, _ in data.losses],
        )
        broken += sum(loss is None for _, loss in data.losses)
        series.append({"name": name, **thinned(Samples(xs, [loss for _, loss in data.losses]), points)})
        if len(runs) == 1:
            marks = _marks(data, by_step)
    if not series:
        note = (
            "The script's loss was not seen: it called no backward() on a loss, and not trimtab.observe_loss."
        )
        return [words("No loss was recorded", note)]
    note = "The mean over ranks, by samples. Triangles are decisions and guard events: point at them."
    if broken:
        note += f" In {broken} samples the loss was not finite; there the line is interrupted."
    return [lines("Loss", AXES, ("loss", ""), series, note=note, marks=marks, height=340)]


def _marks(data: RunData, by_step: dict[int, float]) -> list[dict[str, Any]]:
    marks = []
    for event in data.run.events("decision", "guard")[:MOST_MARKS]:
        step = event.get("step") or 0
        sent = max((bytes_ for at, bytes_ in by_step.items() if at <= step), default=0.0)
        label = event.get("reason") if event["kind"] == "guard" else event.get("decided") or event.get("what")
        marks.append(
            {
                "x": [step, data.since_start(event), sent],
                "label": f"{'guard: ' if event['kind'] == 'guard' else ''}{text(label, 160)}",
                "tone": "bad" if event["kind"] == "guard" else "",
            }
        )
    return marks


def memory_cards(data: RunData, points: int) -> list[Card]:
    """Memory of each rank against its limit."""
    series, rows = [], []
    limits: dict[float, list[int]] = {}
    roles, ranks = roles_of(data.plan), rank_roles(data.plan)
    for rank in data.ranks:
        samples = [s for s in data.run.steps[rank] if number(s.get("memory")) is not None]
        limit = number(data.devices[rank].get("memory_limit"))
        if not samples:
            continue
        one = Samples(([s["step"] for s in samples],), [s["memory"] for s in samples])
        series.append({"name": f"rank {rank}", **thinned(one, points)})
        peak = max(s["memory"] for s in samples)
        if limit:
            limits.setdefault(limit, []).append(rank)
        role = roles.get(ranks[rank], {}) if rank < len(ranks) else {}
        predicted = number(role.get("peak_bytes"))
        rows.append([f"rank {rank}", peak, predicted, limit, peak / limit if limit else None])
    if not series:
        return [words("Memory", "No memory figures were recorded.")]
    drawn = [
        {"y": limit, "label": f"limit of rank {', '.join(map(str, who))}" if len(who) < 6 else "limit"}
        for limit, who in limits.items()
    ]
    near = [one for one in drawn if one["y"] <= 20 * max(row[1] for row in rows)]
    note = "" if len(near) == len(drawn) else "Limits far above what was used are only in the table."
    titles = [("", ""), ("highest", "iB"), ("predicted", "iB"), ("limit", "iB"), ("of the limit", "%")]
    return [
        lines(
            "Memory", [("step", "")], ("memory", "iB"), series, limits=near, zero=True, half=True, note=note
        ),
        table("Memory of each rank", titles, rows, half=True),
    ]


def bytes_cards(data: RunData, points: int) -> list[Card]:
    """Bytes on the wire, beside those of a plain all-reduce."""
    if not data.sent or not data.sent[-1][1]:
        return [
            words(
                "Bytes on the wire", "No bytes were recorded: one rank, or a way to send that is not counted."
            )
        ]
    xs = ([s["step"] for s, _, _ in data.sent], [data.since_start(s) for s, _, _ in data.sent])
    series = [
        {"name": "sent", **thinned(Samples(xs, [sent for _, sent, _ in data.sent]), points)},
        {
            "name": "plain all-reduce",
            "dash": True,
            "color": 7,
            **thinned(Samples(xs, [p for *_, p in data.sent]), points),
        },
    ]
    rows = []
    for rank in data.ranks:
        samples = data.run.steps[rank]
        sent = sum((number(s.get("sent")) or 0.0) * s["steps"] for s in samples)
        plain = sum((number(s.get("sent_plain")) or 0.0) * s["steps"] for s in samples)
        rows.append([f"rank {rank}", sent, plain, 1 - sent / plain if plain else None])
    titles = [("", ""), ("sent", "B"), ("plain", "B"), ("saved", "%")]
    return [
        lines("Bytes sent by all ranks", AXES[:2], ("bytes", "B"), series, zero=True, half=True),
        table("Bytes of each rank", titles, rows, half=True),
    ]


def cost_cards(data: RunData) -> list[Card]:
    """What the run cost, where prices are known."""
    if not data.prices:
        return [
            words(
                "Cost",
                "No prices are known. Give them with --price T4=0.35, or as price_per_hour in a --cluster file.",
            )
        ]
    samples = sum(
        (number(s.get("samples")) or 0) * s["steps"] for own in data.run.steps.values() for s in own
    )
    hourly = sum(data.prices.values())
    total = hourly * data.seconds / 3600
    each = total / samples * 1e6 if samples else None
    rows: list[list[Any]] = [["this run", hourly, total, each]]
    if data.plain_s and data.step_s:
        factor = data.plain_s[0] / data.step_s
        rows.append(["plain DDP, for as many steps", hourly, total * factor, each and each * factor])
    titles = [("", ""), ("per hour", ""), ("in all", ""), ("per million samples", "")]
    return [
        table(
            "Cost", titles, rows, note="In the currency of the prices; all ranks are paid for the whole run."
        )
    ]
