"""Bits over time: the spans, and the drawing."""

from __future__ import annotations

import json

from trimtab.report.bits import draw, timeline
from trimtab.runtime.adaptive import Change

CHANGES = [
    Change(step=10, bits={"a": 2}, reasons=("planned 2.50 bits a value",)),
    Change(step=15, bits={"a": 3, "b": 4}, reasons=("a from 2 to 3 bits: its error is 4 of its gradient",)),
]


def test_spans_follow_the_changes_and_cover_the_run() -> None:
    line = timeline({"a": 4, "b": 4}, CHANGES, 20)
    assert line["layers"]["a"] == [
        {"from": 0, "to": 10, "bits": 4},
        {"from": 10, "to": 15, "bits": 2},
        {"from": 15, "to": 20, "bits": 3},
    ]
    assert line["layers"]["b"] == [{"from": 0, "to": 20, "bits": 4}]
    assert json.loads(json.dumps(line)) == line


def test_the_drawing_shows_every_layer_and_every_reason() -> None:
    rows = draw(timeline({"a": 4, "b": 4}, CHANGES, 20), width=25).plain.splitlines()
    assert rows[0] == "   a " + "4" * 10 + "2" * 5 + "3" * 5
    assert set(rows[1].split()[1]) == {"4"}
    assert rows[2].endswith("20")
    assert rows[3] == "step 10: planned 2.50 bits a value"
    assert rows[4].startswith("step 15: a from 2 to 3 bits")


def test_a_run_without_a_step_or_a_layer_can_be_drawn() -> None:
    assert "4" in draw(timeline({"a": 4}, [], 0)).plain
    assert draw(timeline({}, [], 5)).plain
