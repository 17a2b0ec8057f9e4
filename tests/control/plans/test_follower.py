"""Another plan while the job runs: all ranks take it up between the same two steps, and only when pace changed."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.plans.plan_cases import WIDTH, corpus, net, plan_for, role
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.api.set_precision import set_precision
from trimtab.codec import Block
from trimtab.control.plans import sensitivity_watch
from trimtab.control.plans.active_plan import ActivePlan, active_plan_of
from trimtab.control.plans.follower import Follow, Follower
from trimtab.environment import logger
from trimtab.model_state import attach_state
from trimtab.planning.plan import Choice
from trimtab.planning.replan import replan
from trimtab.precision.setting import precisions_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.pool import Pool

    from trimtab.planning.plan import Plan, Role

QUICK = Follow(look=4, calibrate=2, patience=2, threshold=2.0)
AT_FIRST = 0.015
"""Seconds that a forward pass takes on either rank."""


class Slowed(nn.Module):
    """Takes as long as it is told, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seconds = AT_FIRST

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        y: torch.Tensor = self.model(x)
        return y


def lower_all(plan: Plan, observed: Mapping[str, float]) -> Plan:
    """What a planner could do: the role that became slower is lowered, and has fewer samples."""
    drift = {name: observed[name] / of.compute_s for name, of in plan.roles.items()}
    assert drift["slow"] > 2 * drift["fast"]
    roles = {"fast": role("A", 6), "slow": role("B", 2, **{"model.up": "fp16", "model.middle": "fp16"})}
    return replace(plan, roles=roles, reasons=("slow has 2 operators in fp16",))


def fails(plan: Plan, observed: Mapping[str, float]) -> Plan:
    raise ZeroDivisionError("no plan today")


def job(settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 becomes four times slower at step 10 of 40; rank 0's prediction is wrong by a factor of 50."""
    torch.manual_seed(0)
    model = Slowed(net())
    rank = dist.get_rank()
    roles = {"fast": replace(role("A", 5), compute_s=0.5), "slow": role("B", 3, **{"model.up": "bf16"})}
    plan = plan_for(model, roles=roles, batch="free")
    active = ActivePlan(plan)
    wrapped: Any = model
    if settings.get("sharded"):
        inner: Any = model.model
        for module in (inner.up, inner.middle, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    else:
        wrapped = Ddp(model)
    if settings.get("bits"):
        trimtab.compress(wrapped, Block(bits=4))
    attach_state(model).active_plan = active

    def switch(new: Plan) -> None:
        set_precision(model, new.roles[new.role_of(rank)].precisions)

    switch(plan)
    follower = Follower(wrapped, active, QUICK, switch=switch, make_plan=settings.get("anew", lower_all))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    data = trimtab.loader(corpus(8 * 40), 8, plan=wrapped, adjust=None)
    lowered, dealt = [], []
    for step, (batch,) in enumerate(data):
        if step == settings.get("slow_at", 10) and rank == 1:
            model.seconds = 4 * AT_FIRST
        loss = (wrapped(batch) - batch).square().mean()
        lowered.append(len(precisions_of(model)))
        dealt.append(len(batch))
        data.weigh(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    follower.close()
    return {
        "lowered": lowered,
        "dealt": dealt,
        "history": [(switch.step, switch.before, switch.after) for switch in active.history],
        "explained": trimtab.explain(wrapped),
        "parameters": torch.cat([_whole(p).detach().flatten() for p in model.parameters()]),
    }


def _whole(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole


def test_all_ranks_take_up_another_plan_at_one_step(ranks: Pool) -> None:
    fast, slow = ranks(2, job, {})
    assert fast["history"] == slow["history"]
    assert len(fast["history"]) == 1, "a wrong prediction is no change, and a change is answered once"
    at = fast["history"][0][0]
    assert at > 10
    assert fast["lowered"] == [0] * 40
    assert slow["lowered"] == [1] * at + [2] * (40 - at)
    assert fast["dealt"] == [5] * (at + 1) + [6] * (39 - at), "the batch of that step was dealt out already"
    assert slow["dealt"] == [3] * (at + 1) + [2] * (39 - at)
    assert "slow has 2 operators in fp16" in slow["explained"]
    assert torch.equal(fast["parameters"], slow["parameters"])


def test_with_compressed_gradients(ranks: Pool) -> None:
    fast, slow = ranks(2, job, {"bits": 4}, allow_groups=True)
    assert fast["history"] == slow["history"]
    assert len(fast["history"]) == 1
    assert torch.equal(fast["parameters"], slow["parameters"])


def test_sharded_by_fsdp2(ranks: Pool) -> None:
    # Both ranks wait for the slow one in every unit; what each needs itself is seen all the same.
    fast, slow = ranks(2, job, {"sharded": True}, allow_groups=True)
    assert fast["history"] == slow["history"]
    assert len(fast["history"]) == 1
    at = fast["history"][0][0]
    assert at > 10
    assert fast["dealt"] == [5] * (at + 1) + [6] * (39 - at)
    assert slow["lowered"] == [1] * at + [2] * (40 - at)
    assert torch.equal(fast["parameters"], slow["parameters"])


def test_a_steady_job_keeps_its_plan(ranks: Pool) -> None:
    for settings in ({"slow_at": None}, {"slow_at": None, "sharded": True}):
        for one in ranks(2, job, settings, allow_groups=True):
            assert one["history"] == []


def test_a_planner_that_fails_does_not_end_the_job(ranks: Pool) -> None:
    for one in ranks(2, job, {"anew": fails}):
        assert one["history"] == []
        assert one["dealt"] in ([5] * 40, [3] * 40)


def under_a_planned_job(batch: str) -> dict[str, Any]:
    """As a user has it: `apply` alone, batches of the script's own, rank 1 slower from step 10 on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger().addHandler(handler)
    torch.manual_seed(0)
    model = Slowed(net())
    shares = (4, 4) if batch == "fixed" else (5, 3)
    roles = {
        "fast": inside(role("A", shares[0])),
        "slow": inside(role("B", shares[1], **{"model.up": "bf16"})),
    }
    ddp = trimtab.apply(Ddp(model), plan_for(model, roles=roles, batch=batch), follow=QUICK)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(40):
        if step == 10 and dist.get_rank() == 1:
            model.seconds = 4 * AT_FIRST
        ddp(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    logger().removeHandler(handler)
    active = active_plan_of(model)
    assert active is not None
    return {
        "lowered": {name: str(precision) for name, precision in precisions_of(model).items()},
        "planned": active.plan.roles["slow"].precisions,
        "hash": active.plan.hash,
        "switches": len(active.history),
        "said": said,
    }


def inside(of: Role) -> Role:
    return replace(of, choices={f"model.{name}": several for name, several in of.choices.items()})


def test_apply_plans_anew_with_the_plans_own_choices(ranks: Pool) -> None:
    fast, slow = ranks(2, under_a_planned_job, "fixed")
    assert fast["switches"] == slow["switches"] == 1
    assert fast["hash"] == slow["hash"]
    assert fast["lowered"] == {}
    assert (
        slow["lowered"]
        == slow["planned"]
        == dict.fromkeys(("model.up", "model.middle", "model.down"), "fp16")
    )
    assert any("slow takes" in line for line in fast["said"])


def test_shares_that_the_script_does_not_use_are_said_and_not_planned_with(ranks: Pool) -> None:
    fast, slow = ranks(2, under_a_planned_job, "free")
    assert fast["switches"] == slow["switches"] == 0
    unused = "the plan divides a batch as 5/3, but this script divides it itself"
    assert sum(line.startswith(unused) for line in fast["said"]) == 1
    assert slow["said"] == []


def applied_twice() -> list[tuple[str, str, str]]:
    """Rank 1 becomes slow and the job switches its plan; then the user applies the plan of the file again."""
    model = Slowed(net())
    roles = {"fast": inside(role("A", 4)), "slow": inside(role("B", 4, **{"model.up": "bf16"}))}
    plan = plan_for(model, roles=roles, batch="fixed")
    ddp = Ddp(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    outcomes = []
    for _ in range(2):
        model.seconds = AT_FIRST
        trimtab.apply(ddp, plan, follow=QUICK)
        active = active_plan_of(model)
        assert active is not None
        applied = active.plan.hash, trimtab.explain(ddp)
        for step in range(30):
            if step == 10 and dist.get_rank() == 1:
                model.seconds = 4 * AT_FIRST
            ddp(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((*applied, active.plan.hash))
    return outcomes


def test_a_plan_applied_again_replaces_the_followed_one_on_all_ranks(ranks: Pool) -> None:
    fast, slow = ranks(2, applied_twice)
    assert fast == slow
    for applied, explained, followed in fast:
        assert applied != followed, "the job switched again, by its own decision"
        assert explained.startswith(f"plan {applied}")
        assert followed not in explained


class Branches(nn.Module):
    """Two layers; how much each counts can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.counts = [0.1, 1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.counts
        return torch.tanh(a * self.left(x) + b * self.right(x.relu()))


def at_the_same_pace(plan: Plan, observed: Mapping[str, float]) -> Plan:
    return replan(plan, {})


def learns_otherwise(changes: bool) -> list[dict[str, str]]:
    """The slow rank has the layer in bf16 that counts less; from step 10 on it may be the other one that does."""
    torch.manual_seed(0)
    inner = Branches()
    model = Slowed(inner)
    choices = {
        f"model.{name}": {
            "own": Choice(seconds=3e-3, damage=0.0),
            "bf16": Choice(seconds=5e-4, damage=damage),
        }
        for name, damage in (("left", 1.0), ("right", 4.0))
    }
    roles = {
        "fast": replace(role("A", 4), compute_s=9.8e-3, choices={}),
        "slow": replace(role("B", 4, **{"model.left": "bf16"}), compute_s=8.5e-3, choices=choices),
    }
    active = ActivePlan(plan_for(model, roles=roles, batch="fixed"))
    ddp = Ddp(model)
    lowered = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity_watch, "SHARE", 10.0)  # the job is short

        def switch(new: Plan) -> None:
            set_precision(model, new.roles[new.role_of(dist.get_rank())].precisions)

        switch(active.plan)
        follower = Follower(ddp, active, QUICK, switch=switch, make_plan=at_the_same_pace)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(40):
            if step == 10:
                inner.counts = [1.0, 0.1] if changes else inner.counts
                model.seconds *= 4 if dist.get_rank() == 1 else 1
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            F.mse_loss(ddp(x), x[:, :16].sin()).backward()
            optimizer.step()
            optimizer.zero_grad()
            lowered.append({name: str(own) for name, own in precisions_of(model).items()})
        follower.close()
    return [lowered[0], lowered[-1]]


def test_the_next_plan_lowers_what_is_least_sensitive_by_then(ranks: Pool) -> None:
    left, right = {"model.left": "bf16"}, {"model.right": "bf16"}
    assert ranks(2, learns_otherwise, True) == [[{}, {}], [left, right]]
    assert ranks(2, learns_otherwise, False) == [[{}, {}], [left, left]]
