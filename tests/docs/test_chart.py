"""The picture of the README is what the committed results give."""

from __future__ import annotations

from tools.draw_chart import TARGET, draw


def test_the_committed_chart_is_of_the_committed_results() -> None:
    assert TARGET.read_text() == draw(), "the chart is out of date; run: python tools/draw_chart.py"
