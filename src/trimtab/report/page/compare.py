"""Two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.report.page.cards import Card, bars, columns, lines, table
from trimtab.report.page.document import Document, Section
from trimtab.report.page.run import FOOTER, controller, environment, name_of, notes, ranks_table
from trimtab.report.page.run_data import RunData
from trimtab.report.page.run_progress import bytes_cards, cost_cards, loss_cards, memory_cards
from trimtab.report.page.run_settings import settings_cards
from trimtab.report.page.run_step import step_cards
from trimtab.report.page.thinning import Samples, thinned
from trimtab.report.page.values import duration, mapping, size, text


def compared_document(first: RunData, second: RunData, points: int) -> Document:
    """The page of two runs, A and B."""
    both = [("A", first), ("B", second)]
    titles = [f"{letter}: {name_of(data)}" for letter, data in both]

    def beside(make: Callable[[RunData], Sequence[Card]]) -> list[Card]:
        return [columns(*((title, make(data)) for title, (_, data) in zip(titles, both, strict=True)))]

    points = max(20, points // 2)
    return Document(
        what="report",
        title=" and ".join(titles),
        subtitle="Two runs side by side; A is the one to compare with.",
        verdict=_verdict(first, second),
        notes=[(tone, f"{letter}: {note}") for letter, data in both for tone, note in notes(data)],
        footer=FOOTER,
        sections=[
            Section(
                id="overview",
                title="Overview",
                blocks=[_figures(first, second), *_bars(both), *_pace(both, points)],
            ),
            Section(id="loss", title="Loss", blocks=loss_cards(both, 2 * points)),
            Section(id="step", title="Step", blocks=beside(lambda data: step_cards(data, points))),
            Section(
                id="settings",
                title="Bits, precision, shares",
                blocks=beside(lambda data: settings_cards(data, points)),
            ),
            Section(id="controller", title="Controller", blocks=beside(lambda data: [controller(data)])),
            Section(
                id="resources",
                title="Memory, bytes, cost",
                blocks=beside(
                    lambda data: [*memory_cards(data, points), *bytes_cards(data, points), *cost_cards(data)]
                ),
            ),
            Section(
                id="environment",
                title="Environment",
                blocks=[
                    _differences(first, second),
                    *beside(lambda data: [ranks_table(data), *environment(data)]),
                ],
            ),
        ],
    )


def _common_loss(first: RunData, second: RunData) -> tuple[int, float, float] | None:
    """The last step that both sampled, with their losses."""
    one, other = ({sample["step"]: loss for sample, loss in data.losses} for data in (first, second))
    steps = [step for step in one if other.get(step) is not None and one[step] is not None]
    if not steps:
        return None
    step = max(steps)
    a, b = one[step], other[step]
    return None if a is None or b is None else (step, a, b)


def _verdict(first: RunData, second: RunData) -> str:
    if not first.step_s or not second.step_s:
        return "These runs cannot be compared: one of them has no recorded step."
    ratio = first.step_s / second.step_s
    if 0.98 < ratio < 1.02:
        said = "B is as fast as A"
    else:
        said = f"B is {max(ratio, 1 / ratio):.3g} times as {'fast' if ratio > 1 else 'slow'} as A"
    said += f": {duration(first.step_s)} → {duration(second.step_s)} a step"
    common = _common_loss(first, second)
    if common:
        said += f"; at step {common[0]:,} the losses are {common[1]:.4g} and {common[2]:.4g}"
    return f"{said}."


def _figures(first: RunData, second: RunData) -> Card:
    def last_loss(data: RunData) -> float | None:
        change = data.loss_change
        return None if change is None or math.isnan(change[1]) else change[1]

    rows: list[list[Any]] = []
    for label, unit, of in (
        ("step", "s", lambda data: data.step_s),
        ("samples a step", "", lambda data: data.batch_size),
        (
            "samples/s",
            "",
            lambda data: data.batch_size / data.step_s if data.batch_size and data.step_s else None,
        ),
        ("ideal step", "s", lambda data: data.ideal_s),
        ("plain DDP's step", "s", lambda data: data.plain_s and data.plain_s[0]),
        ("last loss", "", last_loss),
        ("bytes sent", "B", lambda data: data.sent[-1][1] if data.sent else None),
        ("steps", "", lambda data: data.last_step),
        ("whole run", "s", lambda data: data.seconds),
    ):
        a, b = of(first), of(second)
        change = f"{b / a - 1:+.1%}" if a and b is not None else "unknown"
        rows.append([label, *(_shown(value, unit) for value in (a, b)), change])
    return table("Figures", [("", ""), ("A", ""), ("B", ""), ("change", "")], rows)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    if unit:
        return duration(value) if unit == "s" else size(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _bars(both: Sequence[tuple[str, RunData]]) -> list[Card]:
    ranks = sorted({rank for _, data in both for rank in data.ranks})[:16]
    rows = [
        {"label": f"{letter}, rank {rank}", "values": data.parts[rank]}
        for rank in ranks
        for letter, data in both
        if rank in data.parts
    ]
    note = "Means over the last half of the steps."
    return [bars("Where the step went, by rank", "time of a step", rows, note=note)] if rows else []


def _pace(both: Sequence[tuple[str, RunData]], points: int) -> list[Card]:
    series = []
    for letter, data in both:
        samples = data.run.steps[data.ranks[0]] if data.ranks else []
        xs = ([s["step"] for s in samples], [data.since_start(s) for s in samples])
        one = Samples(xs, [s["seconds"] for s in samples], [float(s["steps"]) for s in samples])
        series += [{"name": letter, **thinned(one, points)}] if samples else []
    axes = [("step", ""), ("time", "s")]
    return [lines("Step time", axes, ("step time", "s"), series, zero=True)] if series else []


def _differences(first: RunData, second: RunData) -> Card:
    def flat(data: RunData) -> dict[str, str]:
        info = data.run.info
        known = mapping(info.get("environment"))
        pairs = {
            name: info.get(name)
            for name in ("command", "script", "trimtab", "world_size", "plan", "cluster")
            if not isinstance(info.get(name), dict)
        }
        pairs |= {name: known.get(name) for name in ("python", "platform", "host", "cpus")}
        pairs |= mapping(known.get("packages")) | mapping(known.get("variables"))
        command = pairs.get("command")
        pairs["command"] = " ".join(map(str, command)) if isinstance(command, list) else command
        return {text(name): text(value) for name, value in pairs.items() if value is not None}

    a, b = flat(first), flat(second)
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    rows = [[name, a.get(name, "none"), b.get(name, "none")] for name in names]
    note = "" if rows else "Command, versions and variables are the same."
    return table("What differs", [("", ""), ("A", ""), ("B", "")], rows, note=note)
