"""A plan for the ranks that are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.control.plans.plan_cases import net, plan_for, role
from tests.support.pool import Pool

from trimtab import environment
from trimtab.control.plans.active_plan import LaunchPlan, active_plan_for
from trimtab.control.plans.present_ranks import PresentRanks
from trimtab.errors import TrimtabError
from trimtab.planning.plan import save_plan
from trimtab.planning.replan import devices_of


def launched(folder: str, samples: int, elastic: str, classes: list[str] | None) -> object:
    """What a loader gets under `trimtab run --plan`; `classes` are what the nodes remember of the ranks."""
    rank, home = dist.get_rank(), Path(folder, f"node-{dist.get_rank()}")
    home.mkdir(exist_ok=True)
    before = dict(os.environ)
    os.environ.update({environment.ELASTIC: elastic, environment.RUN_FOLDER: str(home), "LOCAL_RANK": "0"})
    if classes is not None:
        (home / "device-0").write_text(classes[rank])
    path = Path(folder, f"plan-{rank}.json")
    roles = {"fast": role("A", samples - 1), "slow": role("B", 1)}
    save_plan(plan_for(net(), roles=roles), path)
    LaunchPlan.path = path
    try:
        active = active_plan_for(None, None)
        if active is None:
            return LaunchPlan.path
        return devices_of(active.plan), active.plan.shares, (home / "device-0").read_text()
    finally:
        LaunchPlan.path = LaunchPlan.active = None
        os.environ.clear()
        os.environ.update(before)


def test_ranks_keep_their_device_class_when_their_numbers_change(ranks: Pool, tmp_path: Path) -> None:
    for rank, (devices, shares, own) in enumerate(ranks(2, launched, str(tmp_path), 8, "1", ["B", "A"])):
        assert devices == ["B", "A"]
        assert sum(shares) == 8
        assert own == devices[rank]


def test_ranks_that_come_are_taken_for_what_the_plan_lacks(ranks: Pool, tmp_path: Path) -> None:
    for rank, (devices, shares, own) in enumerate(ranks(3, launched, str(tmp_path), 8, "1", None)):
        assert devices[:2] == ["A", "B"]
        assert (len(shares), sum(shares)) == (3, 8)
        assert own == devices[rank]


def test_a_launch_plan_that_cannot_be_made_for_them_is_given_up(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(4, launched, str(tmp_path), 3, "1", None) == [None] * 4
    assert ranks(2, launched, str(tmp_path), 8, "1", ["A", "C"]) == [None] * 2


def rejected() -> str:
    with pytest.raises(TrimtabError) as error:
        PresentRanks(None).fit(plan_for(net()))
    return str(error.value)


def test_a_job_of_fixed_size_refuses_a_plan_of_another(ranks: Pool) -> None:
    assert "the plan is for 2 ranks" in ranks(3, rejected)[0]
