"""Bits per layer over time: as data, and drawn in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.runtime.adaptive import Change, Controller

_COLOURS = (
    "grey23",
    "dark_green",
    "green4",
    "chartreuse4",
    "gold3",
    "dark_orange3",
    "red3",
    "red1",
    "magenta",
)
"""By bits: the fewer, the greener."""


def timeline(first: Mapping[str, int], changes: Sequence[Change], steps: int) -> dict[str, Any]:
    """The bits of every layer over the steps of a run, in JSON's types.

    `layers` maps a name to its spans, each with the step it begins at, the one it ends before, and the
    bits; `changes` lists the steps at which something changed, with the reasons.
    """
    layers: dict[str, list[dict[str, int]]] = {
        name: [{"from": 0, "to": steps, "bits": bits}] for name, bits in first.items()
    }
    for change in sorted(changes, key=lambda change: change.step):
        for name, bits in change.bits.items():
            last = layers[name][-1]
            if bits != last["bits"]:
                last["to"] = change.step
                layers[name].append({"from": change.step, "to": steps, "bits": bits})
    told = [{"step": change.step, "reasons": list(change.reasons)} for change in changes]
    return {"steps": steps, "layers": layers, "changes": told}


def draw(line: Mapping[str, Any], *, width: int = 100) -> Text:
    """One row for each layer, a digit for its bits in each stretch of steps, and the reasons below."""
    steps = max(line["steps"], 1)
    names = max(len(name) for name in ("step", *line["layers"]))
    columns = max(min(width - names - 1, steps), 1)
    text = Text(no_wrap=True)
    for name, spans in line["layers"].items():
        text.append(f"{name:>{names}} ")
        for column in range(columns):
            step = column * steps // columns
            bits = next((s["bits"] for s in reversed(spans) if s["from"] <= step), spans[0]["bits"])
            text.append(str(bits), style=f"white on {_COLOURS[bits]}")
        text.append("\n")
    text.append(f"{'step':>{names}} 0{steps:>{max(columns - 1, 1)}}\n")
    for change in line["changes"]:
        for reason in change["reasons"]:
            text.append(f"step {change['step']}: {reason}\n")
    return text


def print_bits(controller: Controller) -> None:
    """Draw the bits of a running job, from its `trimtab.runtime.compress.adaptive_of`."""
    console = Console()
    line = timeline(controller.first, controller.history, controller.steps)
    console.print(draw(line, width=console.width), soft_wrap=True)
