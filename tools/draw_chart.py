"""Draw docs/assets/speedups.svg from benchmarks/results: python tools/draw_chart.py

No third-party package; the same results give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "assets" / "speedups.svg"

WIDTH, LABELS, BAR, GAP, TITLE = 860, 250, 22, 6, 46
OURS, FLOOR, OTHER = "#0b7285", "#adb5bd", "#868e96"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One method of a bench."""

    label: str
    method: str
    color: str = OTHER


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars of one run, all measured in turn."""

    title: str
    result: str
    key: str
    unit: str
    bars: tuple[Bar, ...]
    where: tuple[str, str] = ("", "")
    """A column and its value, where a result has rows of several settings."""


PANELS = (
    Panel(
        title="Step time, GPT of 25 M parameters, two hosts at 100 Mbit/s (shorter is better)",
        result="ddp-100mbit",
        key="step_ms",
        unit="ms",
        bars=(
            Bar(label="plain DDP", method="ddp"),
            Bar(label="DDP with the fp16 hook", method="fp16"),
            Bar(label="trimtab, AdamW", method="trimtab", color=OURS),
            Bar(label="trimtab, SGD", method="trimtab, sgd", color=OURS),
            Bar(label="PowerSGD-4 (higher loss)", method="powersgd4"),
            Bar(label="no communication at all", method="ideal", color=FLOOR),
        ),
    ),
    Panel(
        title="Throughput, GPT on two hosts at speeds 1 and 0.4 (longer is better)",
        result="hybrid-cpu",
        where=("cluster", "1.0/0.4"),
        key="samples_per_s",
        unit="samples/s",
        bars=(
            Bar(label="plain DDP", method="ddp"),
            Bar(label="batch shares by speed", method="shares"),
            Bar(label="slow host wholly in bf16 and int8", method="uniform-low"),
            Bar(label="trimtab plan", method="trimtab", color=OURS),
            Bar(label="both hosts alone, added up", method="ideal-plan", color=FLOOR),
        ),
    ),
    Panel(
        title="Step time, tensor parallel, one of two ranks at 1/4 speed, H200 (shorter is better)",
        result="straggler-quarter-h200",
        where=("setting", "gpt-quarter"),
        key="step_ms",
        unit="ms",
        bars=(
            Bar(label="equal shares", method="even"),
            Bar(label="trimtab, balanced while running", method="semi", color=OURS),
            Bar(label="ideal shares", method="ideal", color=FLOOR),
        ),
    ),
)


def values(panel: Panel) -> list[float]:
    """The figure of each bar."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{panel.result}.json").read_text())["rows"]
    column, value = panel.where
    return [
        next(
            float(row[panel.key])
            for row in rows
            if row["method"] == bar.method and (not column or row[column] == value)
        )
        for bar in panel.bars
    ]


def draw() -> str:
    """The whole picture."""
    parts: list[str] = []
    top = 0
    for panel in PANELS:
        figures = values(panel)
        scale = (WIDTH - LABELS - 120) / max(figures)
        parts.append(f'<text x="0" y="{top + 26}" class="title">{escape(panel.title)}</text>')
        top += TITLE
        for bar, figure in zip(panel.bars, figures, strict=True):
            middle, length = top + BAR // 2 + 5, max(2.0, figure * scale)
            parts.append(
                f'<text x="{LABELS - 10}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>'
                f'<rect x="{LABELS}" y="{top}" width="{length:.1f}" height="{BAR}" rx="3" fill="{bar.color}"/>'
                f'<text x="{LABELS + length + 8:.1f}" y="{middle}">{figure:,.0f} {panel.unit}</text>'
            )
            top += BAR + GAP
        parts.append(
            f'<text x="{LABELS}" y="{top + 12}" class="note">benchmarks/results/{panel.result}.json</text>'
        )
        top += 26
    style = (
        "text{font:14px system-ui,sans-serif;fill:#495057}"
        ".title{font-weight:600;font-size:15px;fill:#212529}.note{font-size:11px;fill:#868e96}"
        "@media(prefers-color-scheme:dark){text{fill:#ced4da}.title{fill:#f1f3f5}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" '
        f'aria-label="Bar charts of step time and throughput with and without trimtab">\n'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(draw())
    print(TARGET.relative_to(ROOT))
