"""A job plans for itself: measured between two steps, applied between two steps, kept for the next start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from trimtab.control.autopilot import pilot
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.environment import logger
from trimtab.model_state import state_of
from trimtab.selector import selected

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

STEPS = 14


class Uncopied(nn.Linear):
    """Refuses to be copied."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise RuntimeError("made of glass")


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(adjust: str | None, *, glass: bool = False, samples: int = 4) -> dict[str, Any]:
    """Steps of a model with dropout; with `adjust` under the autopilot."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    if glass:
        model.append(Uncopied(32, 32))
    ddp = Ddp(model)
    if adjust is not None:
        pilot.start_autopilot(ddp, selected(adjust), budget=1e9)
    active = active_plan_of(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.randn(STEPS, samples, 32, generator=torch.Generator().manual_seed(1))
    planned_at = 0 if active is not None else None
    for step, batch in enumerate(data):
        if planned_at is None and active_plan_of(ddp) is not None:
            planned_at = step
        F.mse_loss(ddp(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        own = state_of(ddp).autopilot
        if own is not None and own._future is not None:
            own._future.exception()  # planning takes longer than these steps
    active = active_plan_of(ddp)
    choices = {} if active is None else next(iter(active.plan.roles.values())).choices
    return {
        "planned_at": planned_at,
        "plan": None if active is None else active.plan.hash,
        "choices": {name: sorted(by) for name, by in choices.items()},
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


def jobs(cache: str) -> dict[str, Any]:
    log = Lines()
    logger().addHandler(log)
    results: dict[str, Any] = {"plain": train(None)}
    cases: dict[str, dict[str, Any]] = {
        "first": {"adjust": "exact"},
        "second": {"adjust": "exact"},
        "larger": {"adjust": "exact", "samples": 6},
        "precision": {"adjust": "precision"},
        "glass": {"adjust": "exact", "glass": True},
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", cache)
            patch.setattr(pilot, "usual_precisions", lambda *_: ("bf16",))  # also where it is slow
            for name, options in cases.items():
                log.lines.clear()
                results[name] = {**train(**options), "log": list(log.lines)}
    finally:
        logger().removeHandler(log)
    return results


def test_a_job_plans_for_itself(ranks: Pool, tmp_path: Path) -> None:
    first_rank, second_rank = ranks(2, jobs, str(tmp_path), timeout=300)
    plain, first, second = (first_rank[name] for name in ("plain", "first", "second"))
    assert pilot.OBSERVED_STEP < first["planned_at"] < STEPS
    assert first["planned_at"] == second_rank["first"]["planned_at"], "all ranks between the same two steps"
    assert first["plan"] == second_rank["first"]["plan"]
    assert any("operators timed in" in line and "the time of" in line for line in first["log"]), "its cost"
    assert any("predicted" in line for line in first["log"])
    assert torch.equal(first["parameters"], plain["parameters"]), "measuring leaves no trace in the training"

    assert second["planned_at"] == 0
    assert second["plan"] == first["plan"]
    assert any("applies from step one" in line for line in second["log"])
    assert torch.equal(second["parameters"], plain["parameters"])
    larger = first_rank["larger"]["log"]
    assert any("batches of 6/6 samples are not those of the cached plan" in line for line in larger)
    assert any("operators timed" in line for line in larger)

    lowerable = first_rank["precision"]["choices"]
    assert lowerable["0"] == ["bf16", "own"], "both were measured, with their damage"
    glass = first_rank["glass"]
    assert glass["plan"] is None
    assert [line for line in glass["log"] if "made of glass" in line and "training goes on as it is" in line]
