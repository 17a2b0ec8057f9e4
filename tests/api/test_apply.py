"""`trimtab.apply`: a plan on real DDP jobs, and everything that is refused before training."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.control.plans.plan_cases import LINEARS, Net, corpus, net, plan_for, role
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.api.apply import apply
from trimtab.control.compression.ddp import compression_of
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.control.plans.follower import Follow
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.planning.plan import save_plan
from trimtab.precision.setting import precisions_of
from trimtab.predict.collectives import Route

if TYPE_CHECKING:
    from tests.support.pool import Pool

    from trimtab.planning.plan import Plan
    from trimtab.predict.collectives import Method


def lowered(model: torch.nn.Module) -> dict[str, str]:
    return {name: str(precision) for name, precision in precisions_of(model).items()}


def applied(changes: dict[str, Any], wrapped: bool) -> dict[str, Any]:
    """What each rank finds set after a few steps under a plan."""
    model = net()
    plan = plan_for(model, **changes)
    if not wrapped:
        assert apply(model, plan, follow=None) is model
    ddp = Ddp(model)
    if wrapped:
        assert apply(ddp, plan, follow=None) is ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = trimtab.loader(corpus(64), plan.batch_size, plan=ddp, adjust=None)
    sizes = []
    for (batch,) in data:
        sizes.append(len(batch))
        data.weigh((ddp(batch) - batch).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    compression = compression_of(ddp)
    return {
        "lowered": lowered(ddp),
        "sizes": sizes,
        "bits": None if compression is None else {bits for _, bits, _ in compression.pieces.values()},
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "explained": trimtab.explain(ddp),
    }


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "before ddp"])
def test_each_rank_does_its_part(ranks: Pool, wrapped: bool) -> None:
    fast, slow = ranks(2, applied, {}, wrapped)
    assert fast["lowered"] == {}
    assert slow["lowered"] == {"up": "fp16", "down": "bf16"}
    assert fast["sizes"] == [5] * 8
    assert slow["sizes"] == [3] * 8
    assert torch.equal(fast["parameters"], slow["parameters"])
    assert "1 in bf16, 1 in fp16" in fast["explained"]
    assert fast["bits"] is None


def test_gradients_travel_in_the_plans_bits(ranks: Pool) -> None:
    fast, slow = ranks(2, applied, {"bits": 4}, True, allow_groups=True)
    assert fast["bits"] == slow["bits"] == {0, 4}  # 0: biases, which travel as they are
    assert torch.equal(fast["parameters"], slow["parameters"])
    assert "4 bits" in fast["explained"]


def test_adaptive_bits(ranks: Pool) -> None:
    found = ranks(2, applied, {"bits": "adaptive"}, True, allow_groups=True)
    assert all("adaptive bits" in one["explained"] for one in found)


EXCHANGE: dict[str, Any] = {
    "bits": 4,
    "layer_bits": {"up.weight": 8, "down.weight": None},
    "accumulate": 2,
    "bucket_cap_mb": 5.0,
}


def exchanged(route: Route, agents: list[str]) -> dict[str, Any]:
    """What each rank finds after an epoch in micro-batches, with these hosts."""
    os.environ["GROUP_RANK"] = agents[dist.get_rank()]
    try:
        ddp = Ddp(net())
        plan = plan_for(ddp.module, route=route, **EXCHANGE)
        apply(ddp, plan, follow=None)
    finally:
        os.environ.pop("GROUP_RANK")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = trimtab.loader(corpus(32), plan.batch_size, plan=ddp, adjust=None)
    sizes = []
    for (batch,) in data:
        sizes.append(len(batch))
        with data.sync(ddp):
            data.weigh((ddp(batch) - batch).square().mean()).backward()
        if data.last:
            optimizer.step()
            optimizer.zero_grad()
    refused = ""
    try:
        trimtab.loader(corpus(32), plan.batch_size, plan=ddp, accumulate=3)
    except TrimtabError as error:
        refused = str(error)
    compression = compression_of(ddp)
    assert compression is not None
    return {
        "sizes": sizes,
        "bits": {name: bits for name, (_, bits, _) in compression.pieces.items() if "weight" in name},
        "parameters": torch.cat([p.detach().flatten() for p in ddp.module.parameters()]),
        "explained": trimtab.explain(ddp),
        "refused": refused,
    }


@pytest.mark.parametrize("method", ["ring", None])
def test_layer_bits_route_and_micro_batches_are_carried_out(ranks: Pool, method: Method | None) -> None:
    fast, slow = ranks(2, exchanged, Route(method=method), ["0", "1"], allow_groups=True)
    assert fast["sizes"] == [3, 2] * 4
    assert slow["sizes"] == [2, 1] * 4
    assert fast["bits"] == slow["bits"] == {"up.weight": 8, "middle.weight": 4, "down.weight": 0}
    assert torch.equal(fast["parameters"], slow["parameters"])
    assert f"flat {method or 'default'}, as planned" in fast["explained"]
    assert "bucket_cap_mb=5" in fast["explained"]
    assert "2 micro-batches" in fast["explained"]
    assert "multiple of 2" in fast["refused"]


def test_a_rank_that_the_route_spares_has_the_same_parameters(ranks: Pool) -> None:
    route = Route(method="scatter_reduce", spared=(1,))
    fast, slow = ranks(2, exchanged, route, ["0", "1"], allow_groups=True)
    assert torch.equal(fast["parameters"], slow["parameters"])
    assert "flat scatter-reduce, rank 1 owns no chunk, as planned" in fast["explained"]


def test_a_route_that_these_hosts_do_not_have_falls_back(ranks: Pool) -> None:
    found = ranks(2, exchanged, Route(inside="shared_memory"), ["0", "1"], allow_groups=True)
    assert torch.equal(found[0]["parameters"], found[1]["parameters"])
    assert "not two levels, default as planned: every host has one rank" in found[0]["explained"]


def alone(changes: dict[str, Any]) -> Plan:
    """A plan for one rank, which any process can be asked to apply."""
    return plan_for(net(), **{"ranks": (("slow", 1),), **changes})


def test_a_plan_from_its_file_without_a_group(tmp_path: Path) -> None:
    save_plan(alone({}), tmp_path / "plan.json")
    model = trimtab.apply(net(), tmp_path / "plan.json")
    assert lowered(model) == {"up": "fp16", "down": "bf16"}
    trimtab.apply(model, alone({"roles": {"slow": role("B", 8, middle="bf16")}}))
    assert lowered(model) == {"middle": "bf16"}, "a second plan takes the place of the first"


def test_loaders_of_a_model_take_up_the_next_plan() -> None:
    model = apply(net(), alone({}))
    data = trimtab.loader(corpus(16), 4, plan=model)
    first = active_plan_of(model)
    apply(model, alone({"roles": {"slow": role("B", 8, middle="bf16")}}))
    assert active_plan_of(model) is first
    assert first is not None
    assert list(first.loaders) == [data]


def test_disabled_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    assert lowered(trimtab.apply(net(), "no such file")) == {}


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(4, 4)


REFUSED: dict[str, tuple[torch.nn.Module, dict[str, Any], str]] = {
    "model": (Deeper(), {}, r"another model.*does not contain last"),
    "shapes": (Net(32), {}, r"another model.*other shapes"),
    "world": (net(), {"ranks": (("fast", 1), ("slow", 2))}, r"for 3 ranks \(1 x fast, 2 x slow\).*has 1"),
    "trimtab": (net(), {"trimtab": "0.0.7"}, r"made by trimtab 0\.0\.7, and this is"),
    "operator": (
        net(),
        {"roles": {"slow": role("B", 8, midle="fp16")}},
        r"lowers 'midle' of role slow.*mean middle",
    ),
    "precision": (
        net(),
        {"roles": {"slow": role("B", 8, up="fp8")}},
        r"role slow: up: this CPU.*not offer fp8",
    ),
    "no precision": (
        net(),
        {"roles": {"slow": role("B", 8, up="int3")}},
        r"up: there is no precision 'int3'",
    ),
    "device": (
        net(),
        {"roles": {"slow": replace(role("B", 8), kind="cuda")}},
        r"rank 0 has role slow, which is for cuda \(B\), but its model is on cpu",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_difference_shown(case: str) -> None:
    model, changes, message = REFUSED[case]
    with pytest.raises(TrimtabError, match=message):
        apply(model, alone(changes))
    assert lowered(model) == {}
    assert active_plan_of(model) is None


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 2}')
    with pytest.raises(TrimtabError, match=r"plan\.json"):
        apply(net(), tmp_path / "plan.json")
    with pytest.raises(TrimtabError, match="cannot be read"):
        apply(net(), tmp_path / "missing.json")
    with pytest.raises(TrimtabError, match="a Plan or the path"):
        apply(net(), {"ranks": 2})  # type: ignore[arg-type]


def refused_together(broken: int, what: str, folder: str) -> tuple[str, dict[str, str]]:
    """One rank of four has something else; all must raise, and go on together afterwards."""
    model = net()
    plan = plan_for(model, ranks=(("fast", 2), ("slow", 2)))
    given: Any = plan
    if dist.get_rank() == broken:
        if what == "hash":
            given = replace(plan, roles={**plan.roles, "slow": role("B", 4, up="fp16")})
        elif what == "file":
            given = Path(folder, "plan.json")
        else:
            model = Deeper()
    with pytest.raises(TrimtabError) as raised:
        apply(model, given)
    dist.barrier()
    return str(raised.value), lowered(model)


@pytest.mark.parametrize("what", ["hash", "file", "model"])
def test_one_rank_with_another_plan_stops_all(ranks: Pool, tmp_path: Path, what: str) -> None:
    (tmp_path / "plan.json").write_text('{"version": 2, "ranks"')
    found = ranks(4, refused_together, 2, what, str(tmp_path), timeout=30)
    assert all(not set_ for _, set_ in found)
    for rank, (said, _) in enumerate(found):
        if what == "hash":
            assert "on ranks 0, 1, 3" in said
            assert "on ranks 2" in said
        elif rank != 2:
            assert said.startswith("rank 2 cannot run its plan, so no rank starts: ")
        else:
            assert ("not valid JSON" if what == "file" else "another model") in said


def shared_out(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    model = net()
    data = trimtab.loader(corpus(64), plan=plan_for(model, **given), **settings)
    return {"shares": data.shares, "follows": data._adjust is not None}


def test_loaders_take_the_plans_shares(ranks: Pool) -> None:
    """In proportion where the batch is another one; equal shares stay unless asked."""
    assert ranks(2, shared_out, {}, {"batch_size": 8})[0] == {"shares": (5, 3), "follows": True}
    assert ranks(2, shared_out, {}, {"batch_size": 32})[1]["shares"] == (20, 12)
    equal = {"batch": "fixed", "roles": {"fast": role("A", 4), "slow": role("B", 4, up="fp16")}}
    assert ranks(2, shared_out, equal, {"batch_size": 8})[0] == {"shares": (4, 4), "follows": False}


def loader_refuses(settings: dict[str, Any]) -> str:
    with pytest.raises(TrimtabError) as raised:
        trimtab.loader(corpus(64), 8, **settings)
    return str(raised.value)


def test_loaders_refuse_what_contradicts(ranks: Pool) -> None:
    plan = plan_for(net())
    assert "give shares or plan, not both" in ranks(2, loader_refuses, {"plan": plan, "shares": [1, 2]})[0]
    assert "no plan was applied" in ranks(2, loader_refuses, {"plan": net()})[0]
    assert "for 2 ranks" in ranks(3, loader_refuses, {"plan": plan})[2]


def one_step(ddp: Ddp, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 64, generator=generator)
    (ddp(x) - x).square().mean().backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


def resumed(again: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, str]]:
    """Six steps at once, and three, a checkpoint, and three more in a fresh module."""
    ddp = apply(Ddp(net()), plan_for(net(), bits=4), follow=None)
    for step in range(3):
        one_step(ddp, step)
    state = {
        "model": {k: v.clone() for k, v in ddp.module.state_dict().items()},
        "trimtab": trimtab.state_dict(ddp),
    }
    for step in range(3, 6):
        one_step(ddp, step)
    other = Ddp(net())
    if again:  # under another plan of the same bits: the checkpoint's counts
        roles = {"fast": role("A", 4), "slow": role("B", 4, **dict.fromkeys(LINEARS, "bf16"))}
        apply(other, plan_for(net(), bits=4, roles=roles), follow=None)
    other.module.load_state_dict(state["model"])
    trimtab.load_state_dict(other, state["trimtab"])
    for step in range(3, 6):
        one_step(other, step)
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (ddp, other)]
    found = weights[0], weights[1], lowered(other)
    del ddp, other
    gc.collect()
    return found


@pytest.mark.parametrize("again", [False, True], ids=["fresh", "another plan"])
def test_a_resumed_job_continues_with_the_plan_and_its_bits(ranks: Pool, again: bool) -> None:
    for rank, (whole, parts, found) in enumerate(ranks(2, resumed, again, allow_groups=True)):
        assert torch.equal(whole, parts), "the same rounding, as if it had not been interrupted"
        assert found == ({}, {"up": "fp16", "down": "bf16"})[rank]


def other_world(batch: int) -> tuple[int, ...] | None:
    model = net()
    roles = {"fast": role("A", batch - 1), "slow": role("B", 1, up="fp16")}
    state = {"plan": {"plan": _text(plan_for(model, roles=roles)), "calls": 3}}
    trimtab.load_state_dict(model, state)
    active = active_plan_of(model)
    return None if active is None else active.plan.shares


def _text(plan: Plan) -> str:
    from trimtab.control.plans.active_plan import plan_text

    return plan_text(plan)


def test_a_checkpoints_plan_for_another_number_of_ranks_is_made_anew(ranks: Pool) -> None:
    (shares,) = set(ranks(3, other_world, 8))
    assert shares is not None
    assert (len(shares), sum(shares)) == (3, 8)
    # With fewer samples than ranks there is none.
    assert ranks(4, other_world, 3) == [None] * 4


def resumed_from(changes: dict[str, Any]) -> tuple[tuple[int, ...], list[int], str | None]:
    """The shares and sizes of a job that resumes with the plan of a checkpoint while another plan runs."""
    ddp = apply(Ddp(net()), plan_for(net()), follow=Follow(look=10))
    data = trimtab.loader(corpus(16), 8, plan=ddp, adjust=None)
    names = {"rapid": role("A", 6), "late": role("B", 2)}
    saved = plan_for(net(), **{"roles": names, "ranks": (("rapid", 1), ("late", 1)), **changes})
    follower = attach_state(ddp).plan_follower
    trimtab.load_state_dict(ddp, {"plan": {"plan": _text(saved), "calls": 0}})
    active = active_plan_of(ddp)
    assert active is not None
    now = attach_state(ddp).plan_follower
    assert now.rules == follower.rules
    assert (now is follower) == (active.plan.hash != saved.hash), (
        "what it learned of the old roles is forgotten"
    )
    sizes = []
    for (batch,) in data:
        sizes.append(len(batch))
        data.weigh(ddp(batch).square().mean()).backward()
    return active.plan.shares, sizes, trimtab.explain(ddp)


@pytest.mark.parametrize(
    ("changes", "continues"),
    [
        ({}, True),
        ({"accumulate": 2}, False),
        ({"bits": 4}, False),
        ({"wrapper": "fsdp"}, False),
        ({"tensor_groups": ((0, 1),), "ranks": (("rapid", 2),)}, False),
    ],
    ids=["roles", "micro-batches", "bits", "wrapper", "groups"],
)
def test_a_checkpoints_plan_that_the_running_job_cannot_follow_is_dropped(
    ranks: Pool, changes: dict[str, Any], continues: bool
) -> None:
    wanted = (6, 2) if continues else (5, 3)
    for rank, (shares, sizes, explained) in enumerate(ranks(2, resumed_from, changes)):
        assert shares == wanted
        assert sizes == [wanted[rank]] * 2
        assert explained is not None
        assert f"{wanted[0]} samples" in explained, "what runs, not what ran"
