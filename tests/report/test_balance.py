"""The drawing of decisions shows shares, parts left out, and predicted beside measured times."""

from __future__ import annotations

import io

from rich.console import Console

from trimtab.plan.balance import Decision
from trimtab.report.balance import draw_decisions
from trimtab.runtime.balance import Record


def drawn(records: list[Record]) -> str:
    console = Console(file=io.StringIO(), width=140)
    draw_decisions(records, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_decision_is_a_line() -> None:
    decision = Decision(
        mode="own",
        shares=(0.75, 0.25),
        pruned=(0.0, 0.5),
        actions=("helps", "both"),
        before=0.4,
        predicted=0.1605,
    )
    record = Record(step=17, times=(0.1, 0.4), decision=decision, took=0.012, measured=0.1715)
    text = drawn([record])
    for part in ("17", "75%", "25%, 50% left out", "helps", "both", "400.0", "160.5", "171.5", "12"):
        assert part in text
    assert "█" * 12 + " 75%" in text
    assert "██░░ 25%" in text


def test_nothing_decided_is_said() -> None:
    assert "nothing was decided" in drawn([])
