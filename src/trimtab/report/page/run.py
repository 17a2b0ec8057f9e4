"""The page of a run: what happened, what was decided, and why."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence

from trimtab.report.page.cards import Card, event, events, figure, figures, table, words
from trimtab.report.page.cards import code as code_card
from trimtab.report.page.document import Document, Section
from trimtab.report.page.plan_cards import rank_roles
from trimtab.report.page.run_data import RunData
from trimtab.report.page.run_progress import bytes_cards, cost_cards, loss_cards, memory_cards
from trimtab.report.page.run_settings import settings_cards
from trimtab.report.page.run_step import step_cards, waits, where_it_went
from trimtab.report.page.values import duration, mapping, number, sequence, size, text

FOOTER = "Made by trimtab report. This file is complete in itself and loads nothing from any other place."


def run_document(data: RunData, points: int, *, cluster: Sequence[Card] = ()) -> Document:
    """The page; series have at most `points` points."""
    overview = [headline(data), *([where_it_went(data)] if data.ranks else []), ranks_table(data), *cluster]
    return Document(
        what="report",
        title=name_of(data),
        subtitle=subtitle(data),
        verdict=verdict(data),
        notes=notes(data),
        footer=FOOTER,
        sections=[
            Section(id="overview", title="Overview", blocks=overview),
            Section(id="step", title="Step", blocks=step_cards(data, points)),
            Section(id="loss", title="Loss", blocks=loss_cards([("loss", data)], points)),
            Section(id="settings", title="Bits, precision, shares", blocks=settings_cards(data, points)),
            Section(id="controller", title="Controller", blocks=[controller(data)]),
            Section(
                id="resources",
                title="Memory, bytes, cost",
                blocks=[*memory_cards(data, points), *bytes_cards(data, points), *cost_cards(data)],
            ),
            Section(id="environment", title="Environment", blocks=environment(data)),
        ],
    )


def name_of(data: RunData) -> str:
    return text(data.run.folder.resolve().name)


def subtitle(data: RunData) -> str:
    started = number(data.run.info.get("started")) or data.started
    when = ""
    if 0 < started < 1e11:
        when = time.strftime("%Y-%m-%d %H:%M UTC, ", time.gmtime(started))
    hosts = {text(rank.start.get("host")) for rank in data.run.ranks.values() if rank.start.get("host")}
    parts = [
        f"{when}{text(data.run.info.get('script') or 'unknown script', 120)}",
        _count(data.run.world_size, "rank"),
        _count(len(hosts), "host"),
        _count(data.last_step, "step"),
        duration(data.seconds),
    ]
    return " · ".join(parts)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def verdict(data: RunData) -> str:
    """Measured, plain DDP, ideal and the change of the loss, in one line."""
    if data.step_s is None:
        return "No training step was recorded."
    said = f"{duration(data.step_s)} a step"
    if data.plain_s and data.plain_s[0] > 0:
        said += f", {data.plain_s[0] / data.step_s:.3g} times as fast as plain DDP ({data.plain_s[1].split(' ')[0]})"
    if data.ideal_s and data.run.world_size > 1:
        said += f", {data.ideal_s / data.step_s:.0%} of the ideal"
    change = data.loss_change
    if change:
        said += f"; loss {change[0]:.4g} → {'not finite' if math.isnan(change[1]) else f'{change[1]:.4g}'}"
    return f"{said}."


def notes(data: RunData) -> list[tuple[str, str]]:
    """What a reader must know before the figures."""
    made: list[tuple[str, str]] = []
    statuses = {rank.rank: rank.end.get("status") for rank in data.run.ranks.values() if rank.end}
    failed = [rank for rank, status in statuses.items() if status not in (0, None)]
    missing = [rank.rank for rank in data.run.ranks.values() if not rank.end]
    if not data.run.ranks:
        made.append(
            (
                "warn",
                "No rank has written any event: the job did not start, or stopped before its first step.",
            )
        )
    elif failed:
        which = ", ".join(f"rank {rank} (exit status {text(statuses[rank], 20)})" for rank in failed[:8])
        made.append(("bad", f"The run crashed: {which}."))
    if missing:
        ranks = f"{'Rank' if len(missing) == 1 else 'Ranks'} {', '.join(map(str, missing[:16]))}"
        made.append(
            (
                "warn",
                f"{ranks} wrote no end: still running, or killed. The page shows what was recorded so far.",
            )
        )
    if data.run.ranks and len(data.run.ranks) < data.run.world_size:
        made.append(
            ("warn", f"Of {data.run.world_size} ranks only {len(data.run.ranks)} have events in this folder.")
        )
    if data.run.ranks and data.run.world_size == 1:
        made.append(("", "One rank: there is nothing to exchange, to balance or to wait for."))
    dropped = sum(int(number(rank.end.get("dropped")) or 0) for rank in data.run.ranks.values())
    if dropped:
        made.append(("warn", f"{dropped} events were dropped because the disk was slower than the job."))
    made += [("warn", text(problem)) for problem in data.run.problems[:8]]
    return made


def headline(data: RunData) -> Card:
    step_s, items = data.step_s, []
    if step_s:
        rate = f"{data.batch_size / step_s:.4g} samples/s" if data.batch_size else ""
        items.append(figure("Step, measured", duration(step_s), rate))
    if data.plain_s and step_s:
        gain = data.plain_s[0] / step_s
        tone = "good" if gain > 1.02 else "warn" if gain < 0.98 else ""
        items.append(
            figure(
                "Plain DDP", duration(data.plain_s[0]), f"{gain:.3g} times as fast; {data.plain_s[1]}", tone
            )
        )
    if data.ideal_s and step_s and data.run.world_size > 1:
        note = f"{data.ideal_s / step_s:.0%} reached; no exchange, no waiting"
        items.append(figure("Ideal", duration(data.ideal_s), note))
    predicted = number(mapping(data.plan.get("predicted")).get("step_s"))
    if predicted and step_s:
        items.append(figure("Step, predicted", duration(predicted), off(predicted, step_s)))
    if data.loss_change:
        first, last = data.loss_change
        broken = math.isnan(last)
        items.append(
            figure(
                "Loss",
                "not finite" if broken else f"{last:.4g}",
                f"from {first:.4g}",
                "bad" if broken else "",
            )
        )
    if data.sent and data.sent[-1][1]:
        _, sent, plain = data.sent[-1]
        items.append(figure("Sent", size(sent), f"{1 - sent / plain:.0%} less than plain" if plain else ""))
    decisions = data.run.events("decision", "guard")
    items.append(figure("Decisions", str(len([e for e in decisions if e["kind"] == "decision"]))))
    return figures(*items)


def off(predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return f"{abs(error):.1%} {'above' if error > 0 else 'below'} the measured"


def ranks_table(data: RunData) -> Card:
    """The cluster as the ranks saw it."""
    roles = rank_roles(data.plan)
    rows = []
    for rank in data.run.ranks.values():
        device = data.devices[rank.rank]
        own = sum(data.mean_of(rank.rank, part) or 0.0 for part in ("data", "compute", "optimizer"))
        samples = data.mean_of(rank.rank, "samples")
        name = device.get("name") or device.get("device") or "unknown"
        rows.append(
            [
                f"rank {rank.rank}",
                text(rank.start.get("host") or "unknown"),
                text(name, 80),
                roles[rank.rank] if rank.rank < len(roles) else "",
                number(device.get("memory_limit")),
                samples,
                samples / own if samples and own else None,
                waits(data, rank.rank) or "no",
            ]
        )
    titles = [("", ""), ("host", ""), ("device", ""), ("role", ""), ("memory limit", "iB"), ("samples", "")]
    titles += [("samples/s alone", ""), ("waits", "")]
    if not rows:
        return words("The cluster", "No rank has written what it runs on.")
    note = "Samples/s alone: what the rank computes in a second if it never waits."
    return table("The cluster, as it ran", titles, rows, note=note)


def controller(data: RunData) -> Card:
    """What was noticed and decided, and what it brought."""
    items = []
    plans = data.run.events("plan")
    for one in data.run.events("decision", "guard", "plan", "warning", "start"):
        when = f"step {one['step']:,}" if one.get("step") is not None else ""
        when = f"{when} · {duration(data.since_start(one))}"
        brought = data.run.brought(one) if one["kind"] in ("decision", "plan") and one.get("step") else None
        effect = []
        if brought and brought[0] > 0:
            change = brought[1] / brought[0] - 1
            effect = [f"brought: step {duration(brought[0])} → {duration(brought[1])} ({change:+.0%})"]
        if one["kind"] == "decision":
            if one.get("what") == "plan" and plans:
                continue  # the plan itself says more
            more = [f"noticed: {text(one['noticed'])}"] if one.get("noticed") else []
            more += [f"why: {text(one['why'])}"] if one.get("why") else []
            said = one.get("decided") or f"{text(one.get('before'))} → {text(one.get('after'))}"
            items.append(
                event(when, text(one.get("what") or "decision", 24), text(said), more=[*more, *effect])
            )
        elif one["kind"] == "guard":
            items.append(event(when, "guard", text(one.get("reason")), tone="bad"))
        elif one["kind"] == "plan":
            step_s = number(mapping(mapping(one.get("plan")).get("predicted")).get("step_s"))
            more = [text(reason) for reason in sequence(mapping(one.get("plan")).get("reasons"))[:12]]
            said = f"plan {text(one.get('hash'), 20)} in force, predicted step {duration(step_s)}"
            items.append(event(when, "plan", said, more=[*more, *effect]))
        elif one["kind"] == "warning":
            items.append(
                event(when, "warning", f"rank {one['rank']}: {text(one.get('message'))}", tone="warn")
            )
        elif one.get("restart"):
            items.append(event(when, "restart", f"rank {one['rank']}: {text(one['restart'])}", tone="warn"))
    if not items:
        return words("The controller decided nothing", "No decision, guard event or warning was recorded.")
    return events("What was noticed, decided, and what it brought", items, note="Oldest first.")


def environment(data: RunData) -> list[Card]:
    info = data.run.info
    known = mapping(info.get("environment"))
    command = sequence(info.get("command"))
    made = []
    if command:
        directory = f"cd {shlex.quote(text(info['directory']))}\n" if info.get("directory") else ""
        variables = "".join(
            f"{k}={shlex.quote(text(v))} " for k, v in mapping(known.get("variables")).items()
        )
        line = " ".join(shlex.quote(text(word)) for word in command)
        made.append(code_card("How to reproduce it", f"{directory}{variables}{line}"))
    rows = [[name, text(known[name])] for name in ("python", "platform", "host", "cpus") if name in known]
    rows += [[text(name), text(version)] for name, version in mapping(known.get("packages")).items()]
    rows += [["trimtab", text(info["trimtab"])]] if "trimtab" in info else []
    rows += [[name, text(info[name])] for name in ("plan", "cluster") if isinstance(info.get(name), str)]
    if rows:
        made.append(table("Environment", [("", ""), ("version or value", "")], rows, half=True))
    costs = [
        [f"rank {rank.rank}", number(rank.end.get("writer_cpu_seconds")), len(rank.events), rank.broken_lines]
        for rank in data.run.ranks.values()
        if rank.end or rank.events
    ]
    titles = [("", ""), ("CPU time of recording", "s"), ("events", ""), ("lines left out", "")]
    made += [table("Recording", titles, costs, half=True)] if costs else []
    return made or [
        words("Environment", "run.json is missing or cannot be read, so nothing is known about it.")
    ]
