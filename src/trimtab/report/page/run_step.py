"""Where the time of a step went: parts by rank, predicted beside measured, and the timeline of one step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trimtab.report.page.cards import Card, bars, lines, spans, table, words
from trimtab.report.page.plan_cards import predicted_steps, rank_roles, roles_of
from trimtab.report.page.run_data import MOST_RANKS, RunData
from trimtab.report.page.thinning import Samples, thinned
from trimtab.report.page.values import duration, mapping, number, sequence, text

LANES = {"data": 0, "compute": 1, "codec": 2, "wire": 3, "wait": 4, "waiting": 4, "optimizer": 5}
"""Index in `PARTS` of each lane of a traced step."""

MOST_SPANS = 4000


def step_cards(data: RunData, points: int) -> list[Card]:
    """All of the tab."""
    if not data.ranks:
        return [
            words("No steps were recorded", "This run has no step samples, so there is nothing to divide.")
        ]
    return [
        where_it_went(data),
        *predicted_steps(data.plan, data.step_s),
        predicted_and_measured(data),
        *timeline(data),
        step_times(data, points),
    ]


def where_it_went(data: RunData) -> Card:
    roles, ranks = roles_of(data.plan), rank_roles(data.plan)
    step_s = number(mapping(data.plan.get("predicted")).get("step_s"))
    rows: list[dict[str, Any]] = []
    for rank in data.ranks:
        rows.append({"label": f"rank {rank}", "values": data.parts[rank], "note": waits(data, rank)})
        role = roles.get(ranks[rank], {}) if rank < len(ranks) else {}
        compute_s = number(role.get("compute_s"))
        if compute_s and step_s and len(data.ranks) <= MOST_RANKS // 2:
            after = min(number(role.get("after_s")) or 0.0, compute_s)
            values = [None, compute_s - after, None, max(0.0, step_s - compute_s), None, after]
            note = "Predicted by the plan; exchange and waiting are drawn as wire."
            rows.append({"label": "predicted", "values": values, "faint": True, "note": note})
    more = len([1 for samples in data.run.steps.values() if samples]) - len(data.ranks)
    note = f"Means over the last half of the steps, up to step {data.last_step:,}. "
    note += "Wire and codec: only what training waits for."
    if more:
        note += f" {more} further ranks are not drawn."
    return bars("Where the step went, by rank", "time of a step", rows, note=note)


def waits(data: RunData, rank: int) -> str:
    """For whom a rank waits, in words; empty if it does not."""
    samples = [s for s in data.settled(rank) if s.get("waits_for") is not None and s["waiting"] > 0]
    if not samples:
        return ""
    other, count = Counter(sample["waits_for"] for sample in samples).most_common(1)[0]
    return f"waits for rank {other} in {count / len(data.settled(rank)):.0%} of the steps"


def predicted_and_measured(data: RunData) -> Card:
    roles, ranks = roles_of(data.plan), rank_roles(data.plan)
    rows = []
    for rank in data.ranks:
        measured = (data.mean_of(rank, "compute") or 0.0) + (data.mean_of(rank, "optimizer") or 0.0)
        role = roles.get(ranks[rank], {}) if rank < len(ranks) else {}
        predicted = number(role.get("compute_s"))
        exposed = sum(data.mean_of(rank, part) or 0.0 for part in ("wire", "waiting", "codec"))
        exchange = data.mean_of(rank, "exchange")
        overlap = max(0.0, 1 - exposed / exchange) if exchange else None
        rows.append(
            [
                f"rank {rank}",
                measured,
                predicted,
                measured / predicted - 1 if predicted else None,
                exchange,
                exposed,
                overlap,
                waits(data, rank) or "nobody",
            ]
        )
    titles = [("", ""), ("compute, measured", "s"), ("predicted", "s"), ("error", "%"), ("exchange", "s")]
    titles += [("exposed", "s"), ("overlap", "%"), ("waits for", "")]
    step_s, predicted_s = data.step_s, number(mapping(data.plan.get("predicted")).get("step_s"))
    note = "Overlap is the part of the exchange that is hidden behind the backward pass."
    if step_s and predicted_s:
        note = f"The whole step was measured at {duration(step_s)} and predicted at {duration(predicted_s)}. {note}"
    elif not data.plan:
        note = f"This run had no plan, so nothing was predicted. {note}"
    return table("Predicted beside measured", titles, rows, note=note)


def timeline(data: RunData) -> list[Card]:
    """The last step that most ranks traced, rank above rank on one clock."""
    traces: dict[int, dict[int, dict[str, Any]]] = {}
    for rank in data.ranks:
        for trace in data.run.ranks[rank].of("trace"):
            if trace.get("step") is not None and number(trace.get("began")) is not None:
                traces.setdefault(trace["step"], {})[rank] = trace
    if not traces:
        return []
    most = max(map(len, traces.values()))
    step = max(step for step, by_rank in traces.items() if len(by_rank) == most)
    first = min(trace["began"] for trace in traces[step].values())
    lanes: list[dict[str, Any]] = []
    budget = MOST_SPANS // most
    for rank, trace in sorted(traces[step].items()):
        known = [
            span
            for raw in sequence(trace.get("spans"))[:budget]
            if (span := _span(raw, trace["began"] - first))
        ]
        start = len(lanes)
        for lane, part in {
            "data": 0,
            "compute": 1,
            "codec": 2,
            "wire": 3,
            "waiting": 4,
            "optimizer": 5,
        }.items():
            own = sorted(span for span in known if span[2] == part)
            if own and lane in ("data", "compute", "optimizer"):  # one after another: one lane
                main = next((each for each in lanes[start:] if each["label"] == f"rank {rank}"), None)
                if main is None:
                    main = {"label": f"rank {rank}", "spans": [], "first": True}
                    lanes.append(main)
                main["spans"] = sorted([*main["spans"], *own])
            elif own:
                lanes.append({"label": f"{rank} · {lane}", "spans": own})
    if not lanes:
        return []
    note = "Drag, or press + and -, to zoom; double-click or 0 shows all. The ranks are on one clock."
    return [spans(f"Step {step:,}, rank by rank", lanes, note=note)]


def _span(raw: Any, shift: float) -> tuple[float, float, int, str] | None:
    lane, name, start, end = (*sequence(raw), None, None, None, None)[:4]
    first, last = number(start), number(end)
    part = LANES.get(lane) if isinstance(lane, str) else None
    if first is None or last is None or part is None or last < first:
        return None
    return shift + first, shift + last, part, text(name, 80)


def step_times(data: RunData, points: int) -> Card:
    """Step time over the run, on every rank if they are few."""
    series = []
    for rank in data.ranks[:8]:
        samples = data.run.steps[rank]
        one = Samples(
            ([s["step"] for s in samples], [data.since_start(s) for s in samples]),
            [s["seconds"] for s in samples],
            [float(s["steps"]) for s in samples],
        )
        series.append({"name": f"rank {rank}", **thinned(one, points)})
    predicted = number(mapping(data.plan.get("predicted")).get("step_s"))
    limits = [{"y": predicted, "label": "predicted"}] if predicted else []
    return lines(
        "Step time over the run",
        [("step", ""), ("time", "s")],
        ("step time", "s"),
        series,
        limits=limits,
        zero=True,
    )
