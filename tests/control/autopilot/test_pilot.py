"""A job plans for itself: measured between two steps, applied between two steps, kept for the next start."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler

from trimtab.control.autopilot import measuring, pilot
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.control.shares.script_hooks import take_over
from trimtab.control.shares.takeover import Takeover
from trimtab.environment import DEVICE_CLASS, logger
from trimtab.model_state import state_of
from trimtab.planning.shares.batch import Adjust
from trimtab.run_settings import OwnSteps
from trimtab.selector import selected

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

STEPS = 14


class Uncopied(nn.Linear):
    """Refuses to be copied."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise RuntimeError("made of glass")


class Fragile(nn.Module):
    """Fails on rank 1 where a copy of the model is measured: while it is captured, or at the second timed step."""

    def __init__(self, timed: bool) -> None:
        super().__init__()
        self.left = 2 if timed else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if OwnSteps.running and dist.get_rank() == 1:
            if self.left == 0:
                raise RuntimeError("out of luck")
            self.left -= type(x) is torch.Tensor and x.requires_grad
        return x


class Slow(nn.Module):
    """Takes a time for each sample on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.01 * len(x))
        return x


class Exchanging(nn.Module):
    """Needs the other ranks in every forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().sum()
        dist.all_reduce(total)
        return x + total.tanh()


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(adjust: str | None, *extra: nn.Module, samples: int = 4) -> dict[str, Any]:
    """Steps of a model with dropout; with `adjust` under the autopilot."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32), *extra)
    ddp = Ddp(model)
    if Takeover.current is not None:
        Takeover.current.watch(ddp)
    if adjust is not None:
        pilot.start_autopilot(ddp, selected(adjust), budget=1e9)
    active = active_plan_of(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.randn(2 * STEPS * samples, 32, generator=torch.Generator().manual_seed(1))
    sampler: Any = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(data, batch_size=samples, sampler=sampler)  # type: ignore[arg-type]
    planned_at = 0 if active is not None else None
    sizes = []
    for step, batch in enumerate(loader):
        sizes.append(len(batch))
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
        "shares": None if active is None else active.plan.shares,
        "sizes": sizes,
        "pilot": state_of(ddp).autopilot is not None,
        "choices": {name: sorted(by) for name, by in choices.items()},
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


def exchange(cache: str) -> tuple[dict[str, Any], list[str]]:
    log = Lines()
    logger().addHandler(log)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", cache)
            patch.setattr(measuring, "usual_precisions", lambda *_: ("bf16",))
            return train("precision", Exchanging(), nn.BatchNorm1d(32)), log.lines
    finally:
        logger().removeHandler(log)


def test_a_model_that_exchanges_tensors_in_its_forward_pass_trains_without_a_plan(
    ranks: Pool, tmp_path: Path
) -> None:
    for result, lines in ranks(2, exchange, str(tmp_path)):
        assert (result["plan"], result["pilot"]) == (None, False)
        assert not lines or "exchanges tensors with other ranks" in lines[0]


def jobs(cache: str) -> dict[str, Any]:
    log = Lines()
    logger().addHandler(log)
    results: dict[str, Any] = {"plain": train(None)}
    cases: dict[str, tuple[Any, ...]] = {
        "first": ("exact",),
        "second": ("exact",),
        "larger": ("exact",),
        "precision": ("precision",),
        "glass": ("exact", Uncopied(32, 32)),
        "captured": ("exact", Fragile(timed=False)),
        "timed": ("exact", Fragile(timed=True)),
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", cache)
            patch.setattr(measuring, "usual_precisions", lambda *_: ("bf16",))  # also where it is slow
            for name, (adjust, *extra) in cases.items():
                log.lines.clear()
                if name in ("captured", "timed"):
                    patch.setenv("XDG_CACHE_HOME", f"{cache}/{name}")
                results[name] = train(adjust, *extra, samples=6 if name == "larger" else 4)
                results[name]["log"] = list(log.lines)
            patch.setenv(DEVICE_CLASS, ("quick", "lame")[dist.get_rank()])
            _, give_back = take_over(None, Adjust(window=1000))
            results["shared"] = train("exact", Slow(), samples=8)
            give_back()
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
    for name in ("captured", "timed"):
        case, other = first_rank[name], second_rank[name]
        assert case["plan"] is other["plan"] is None
        assert [line for line in case["log"] if "rank 1: " in line and "out of luck" in line], case["log"]
        assert torch.equal(case["parameters"], plain["parameters"]), "training went on unadjusted"
    for name in ("first", "second", "glass", "captured", "timed"):
        assert not first_rank[name]["pilot"], "nothing is left to do in later steps"

    shared = first_rank["shared"]
    quick, lame = shared["shares"]
    assert quick + lame == 16
    assert quick > lame
    assert set(shared["sizes"]) == {8, quick}, "only the plan moved them"
    assert set(second_rank["shared"]["sizes"]) == {8, lame}
