"""The same slow rank on a fast and on a slow link: what the controller chooses, and how long each choice takes.

Two hosts; the second repeats its matrix products until it has a quarter of its speed. The controller may leave out
half. `migrate` and `resize` do from the first step what the controller has to choose between; the time of the move
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from trimtab.bench.harness import Progress, part
from trimtab.bench.ranks import run_on_cluster, two_hosts
from trimtab.bench.scenarios.straggler.method import GAMMA_MAX, Method
from trimtab.control.tensor.resizing import set_resize
from trimtab.errors import TrimtabError
from trimtab.measure.timing import slowest_seconds
from trimtab.planning.tensor.rebalance import counts_for
from trimtab.sharding import assignment_for, move

LINKS = {"fast": None, "slow": "60mbit"}
_SPEED = 0.25
_STEPS = 18
"""How long the rank is slow, as the controller expects: it needs 17 steps to decide."""
_BLOCK = 6
"""Steps of a method before the next has its turn."""
_SPEC: dict[str, Any] = {
    "model": "gpt", "device": "cpu", "speeds": [1.0, 1.0],
    # Few activations and large matrices, so that the links differ in the cost of moving.
    "width": 1024, "heads": 16, "layers": 1, "batch": 4, "length": 64,
    "balance": {"horizon": _STEPS},
}  # fmt: skip


def links(device: str, progress: Progress) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of both links, and what was chosen; slices of a GPU have no link that could be made slow."""
    if device != "cpu":
        return [], {"links": "only with --device cpu: slices of a GPU have no link that could be made slow"}
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for index, (link, rate) in enumerate(LINKS.items()):
        try:
            measured = run_on_cluster(
                two_hosts(rate), on_rank, {**_SPEC, "steps": _STEPS}, part(progress, index, len(LINKS))
            )
        except TrimtabError as error:
            if rate is None:
                raise
            figures[f"link_{link}"] = f"not measured: {error}"
            continue
        rows += [{"setting": f"link-{link}", **row} for row in measured]
        times = {row["method"]: row["step_ms"] for row in measured}
        figures |= {
            f"link_{link}_chosen": next(row["chosen"] for row in measured if row["method"] == "semi-resize"),
            f"link_{link}_faster": min(("migrate", "resize"), key=times.__getitem__),
            f"link_{link}_migrate_over_resize": times["migrate"] / times["resize"],
        }
    return rows, figures


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Each method for the same steps, in blocks that take turns, from where the rank has become slow."""
    from trimtab.emulate.throttling.repeated_products import RepeatedProducts

    state: Any = SimpleNamespace(speed=1.0)
    _kept = RepeatedProducts(state, "cpu")
    # Trained from the start on equal ranks, so that optimizers have states and there are statistics.
    trainers = {method: Method(spec, method) for method in ("even", "migrate", "resize", "semi-resize")}
    for trainer in trainers.values():
        trainer.step()
    slow = dist.get_rank() == 1
    state.speed = _SPEED if slow else 1.0
    extra = dict.fromkeys(trainers, 0.0)
    extra["migrate"] = _move(trainers["migrate"])
    if slow:
        set_resize(trainers["resize"].model, GAMMA_MAX)
    for begin in range(0, spec["steps"], _BLOCK):
        for trainer in trainers.values():
            for _ in range(min(_BLOCK, spec["steps"] - begin)):
                trainer.step()
        report(begin + _BLOCK, spec["steps"])
    state.speed = 1.0
    rows = []
    for method, trainer in trainers.items():
        seconds = sum(trainer.seconds[1:]) + extra[method]
        row: dict[str, Any] = {
            "method": method,
            "step_ms": seconds / spec["steps"] * 1e3,
            "move_ms": extra[method] * 1e3,
            "final_loss": trainer.losses[-1],
        }
        if method == "semi-resize":
            records = trainer.records()
            chosen = records[0].decision.actions[1] if records else "nothing"
            row["chosen"] = "migrate" if chosen in ("own", "lease") else chosen
            row["decided_at"] = records[0].step if records else None
        rows.append(row)
    return rows


def _move(trainer: Method) -> float:
    """Give the slow rank the share that its speed asks for; returns the seconds until the last rank has finished."""
    units = {name: sum(counts) for name, counts in trainer.counts.items()}
    there = assignment_for(trainer.model, counts_for(units, [1.0, _SPEED]))
    return slowest_seconds(lambda: move(trainer.model, trainer.optimizer, there), trainer.device)
