"""What a run did, in a few lines: printed when it ends."""

from __future__ import annotations

from typing import Any

from trimtab.report.run_folder import Run


def summary_lines(run: Run) -> list[str]:
    """At most three lines: steps and time, what was saved, what was decided; none for a run without steps."""
    steps = run.steps.get(min(run.ranks, default=0), [])
    if not steps:
        return []
    count = steps[-1]["step"]
    seconds = sum(sample["seconds"] * sample["steps"] for sample in steps)
    lines = [f"{count:,} steps in {duration(seconds)}, {_rate(run, count, seconds)}{_where(steps)}"]
    decisions = [event for event in run.events("decision") if isinstance(event.get("what"), str)]
    saved = [text for text in (_bytes_saved(steps), _time_saved(decisions, count), _bits(steps)) if text]
    if saved:
        lines.append("; ".join(saved))
    changes = [text for text in (_shares(run), _replans(decisions), _dropped(run)) if text]
    if changes:
        lines.append("; ".join(changes))
    return lines


def duration(seconds: float) -> str:
    """In the units that suit it."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def throughput(run: Run) -> float | None:
    """Samples a second of all ranks together, at the last sample; None where a rank's samples are unknown."""
    last = [samples[-1] for samples in run.steps.values() if samples]
    if not last or any(not sample["samples"] for sample in last):
        return None
    return float(sum(sample["samples"] / max(sample["seconds"], 1e-9) for sample in last))


def _rate(run: Run, count: int, seconds: float) -> str:
    samples = throughput(run)
    rate = f"{count / max(seconds, 1e-9):.3g} steps/s"
    return rate if samples is None else f"{rate}, {samples:.3g} samples/s"


def _where(steps: list[dict[str, Any]]) -> str:
    """How much of rank 0's time was not computing."""
    total = sum(sample["seconds"] * sample["steps"] for sample in steps) or 1.0
    waiting = sum(sample["waiting"] * sample["steps"] for sample in steps) / total
    wire = sum((sample["wire"] or 0.0) * sample["steps"] for sample in steps) / total
    return f"; rank 0: {waiting:.0%} waiting for ranks, {wire:.0%} for the link"


def _bytes_saved(steps: list[dict[str, Any]]) -> str:
    known = [sample for sample in steps if sample["sent"] is not None and sample["sent_plain"]]
    sent = sum(sample["sent"] * sample["steps"] for sample in known)
    plain = sum(sample["sent_plain"] * sample["steps"] for sample in known)
    return f"sent {size(sent)} a rank instead of {size(plain)}" if plain > sent else ""


def _time_saved(decisions: list[dict[str, Any]], steps: int) -> str:
    for decision in reversed(decisions):
        expected = decision.get("expected")
        if decision["what"] != "compress" or not isinstance(expected, dict) or decision.get("after") is None:
            continue
        plain, compressed = expected.get("plain_s"), expected.get("compressed_s")
        if isinstance(plain, int | float) and isinstance(compressed, int | float):
            return f"about {duration((plain - compressed) * steps)} of exchanges saved (predicted)"
    return ""


def _bits(steps: list[dict[str, Any]]) -> str:
    bits = steps[-1]["bits"]
    return "" if bits is None else f"{bits:.1f} bits a value"


def _shares(run: Run) -> str:
    first, last = (
        [samples[place]["samples"] for samples in run.steps.values() if samples] for place in (0, -1)
    )
    if None in last or len(set(last)) == 1:
        return ""
    before = "" if first == last or None in first else f" ({'/'.join(map(str, first))} at first)"
    return f"batch shares {'/'.join(map(str, last))}{before}"


def _replans(decisions: list[dict[str, Any]]) -> str:
    count = sum(decision["what"] == "plan" and decision.get("before") is not None for decision in decisions)
    return f"{count} new plan{'s' if count > 1 else ''}" if count else ""


def _dropped(run: Run) -> str:
    dropped = sum(int(rank.end.get("dropped") or 0) for rank in run.ranks.values())
    return f"{dropped} events were dropped" if dropped else ""
