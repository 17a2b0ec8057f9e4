"""Plans with tensor groups, carried out: shares of units and samples, and the training of a single device."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import adamw, difference
from tests.sharding.models import LENGTH, VOCABULARY, make
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.control.plans.follower import Follow
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.model_state import attach_state
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role, save_plan
from trimtab.precision.setting import precisions_of
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

GROUPS = {2: ((0, 1),), 4: ((0, 3), (1, 2))}
SAMPLES = (4, 2)
SHARES = (2 / 3, 1 / 3)


def plan_for(model: torch.nn.Module, **changes: Any) -> Plan:
    """Groups of two, of which the first takes twice the samples and the first rank twice the units."""
    groups = GROUPS[dist.get_world_size()]
    roles, names = {}, {}
    for index, group in enumerate(groups):
        for place, rank in enumerate(group):
            names[rank] = f"g{index}p{place}"
            roles[names[rank]] = Role(
                device="A",
                kind="cpu",
                samples=SAMPLES[index],
                precisions={},
                compute_s=1e-3,
                peak_bytes=1,
                tensor_share=SHARES[place],
            )
    fields: dict[str, Any] = {
        "version": PLAN_VERSION,
        "trimtab": trimtab.__version__,
        "model": fingerprint(model),
        "batch": "free",
        "bits": None,
        "roles": roles,
        "ranks": tuple((names[rank], 1) for rank in sorted(names)),
        "tensor_groups": groups,
        "predicted": Predicted(step_s=1e-3, plain_step_s=1e-3, damage=0.0, uniform_damage=0.0),
    }
    return Plan(**(fields | changes))


def train(folder: str) -> tuple[list[int], list[tuple[int, ...]], float, list[str]]:
    """Follow a plan for a few steps; gives the samples of each step, the units, and how far a single device is."""
    alone = make("gpt")
    plan = plan_for(alone)
    path = f"{folder}/plan{dist.get_rank()}.json"
    save_plan(plan, path)
    mesh = trimtab.mesh(plan)
    model: Any = tensor_parallel(copy.deepcopy(alone), mesh, shares=path)
    if len(plan.tensor_groups) > 1:
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    trimtab.apply(model, path)
    tokens = torch.randint(VOCABULARY, (36, LENGTH), generator=torch.Generator().manual_seed(3))
    # A DDP module says which ranks share the batch.
    options = (
        {"plan": model} if len(plan.tensor_groups) > 1 else {"plan": path, "group": mesh.get_group("dp")}
    )
    data = trimtab.loader(torch.utils.data.TensorDataset(tokens), plan.batch_size, **options)
    optimizer, alone_optimizer = adamw(model), adamw(alone)
    sizes, worst = [], 0.0
    for (batch,) in data:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, batch)
        for group in plan.tensor_groups:
            assert all(torch.equal(everyone[rank], everyone[group[0]]) for rank in group)
        whole = torch.cat([everyone[group[0]] for group in plan.tensor_groups])
        assert len({tuple(row) for row in whole.tolist()}) == len(whole)
        data.weigh(model(batch)).backward()
        alone(whole).backward()
        for each in (optimizer, alone_optimizer):
            each.step()
            each.zero_grad()
        worst = max(worst, difference(alone, getattr(model, "module", model), lambda p: p.data))
        sizes.append(len(batch))
    counts = [block.table.counts for block in sharded_model(model, "").blocks.values()]
    return sizes, counts, worst, trimtab.explain(model).split("; ")


@pytest.mark.parametrize("world", [2, 4])
def test_a_plan_with_tensor_groups_trains_as_a_single_device(ranks: Pool, tmp_path: Path, world: int) -> None:
    for rank, (sizes, counts, worst, _) in enumerate(ranks(world, train, str(tmp_path), allow_groups=True)):
        own = next(index for index, group in enumerate(GROUPS[world]) if rank in group)
        assert set(sizes) == {SAMPLES[own]}
        assert set(counts) == {(4, 2), (64, 32)}  # of 6 heads, of 96 hidden units
        assert worst < 1e-9


LOWERED = {"g0p1": {"blocks.0.up": "bf16", "blocks.1.projection": "int8"}, "g1p1": {"blocks.0.up": "bf16"}}


def train_lowered(unlike: bool) -> tuple[dict[str, str], float, bool, list[float]]:
    """Train with lowered projections on the second rank of each group; gives what is set, and how far off it is."""
    alone = make("gpt").float()
    plan = plan_for(alone)
    roles = {
        name: replace(
            role, precisions=LOWERED.get(name, {}) | ({"head": "bf16"} if unlike and name == "g0p1" else {})
        )
        for name, role in plan.roles.items()
    }
    plan = replace(plan, roles=roles)
    mesh = trimtab.mesh(plan)
    model: Any = tensor_parallel(copy.deepcopy(alone), mesh, shares=plan)
    if len(plan.tensor_groups) > 1:
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    trimtab.apply(model, plan, follow=None)
    root = getattr(model, "module", model)
    tokens = torch.randint(VOCABULARY, (36, LENGTH), generator=torch.Generator().manual_seed(3))
    data = trimtab.loader(
        torch.utils.data.TensorDataset(tokens), plan.batch_size, plan=plan, group=mesh.get_group("dp")
    )
    optimizer, losses = adamw(model), []
    for (batch,) in data:
        loss = data.weigh(model(batch))
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    worst = difference(alone, root, lambda p: p.data)
    sharded = {id(tensor.parameter) for b in sharded_model(model, "").blocks.values() for tensor in b.tensors}
    whole = torch.cat([p.detach().flatten() for p in root.parameters() if id(p) not in sharded])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, whole)
    alike = all(torch.equal(everyone[0], other) for other in everyone)
    return {name: p.forward for name, p in precisions_of(model).items()}, worst, alike, losses


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_a_tensor_group_lower_their_own_projections(ranks: Pool, world: int) -> None:
    """What is not divided stays the same on all ranks, to the bit: only sums of projections reach it."""
    results = ranks(world, train_lowered, False, allow_groups=True)
    own = {rank: f"g{i}p{place}" for i, group in enumerate(GROUPS[world]) for place, rank in enumerate(group)}
    for rank, (chosen, worst, alike, losses) in enumerate(results):
        assert chosen == LOWERED.get(own[rank], {})
        assert alike
        assert worst > 1e-9  # something was rounded
        assert all(math.isfinite(loss) for loss in losses)
    assert results[0][3][-1] < results[0][3][0]


def test_what_every_rank_of_a_group_computes_must_be_lowered_alike(ranks: Pool) -> None:
    with pytest.raises(Exception, match=r"lowers 'head' on some of ranks \[0, 1\] only"):
        ranks(2, train_lowered, True, allow_groups=True)


def follow() -> tuple[list[int], list[int]]:
    """The second group takes three times as long from the fourth step on; gives samples and the steps of switches."""
    alone = make("gpt")
    plan = plan_for(alone)
    mesh = trimtab.mesh(plan)
    model = DistributedDataParallel(
        tensor_parallel(copy.deepcopy(alone), mesh, shares=plan), process_group=mesh.get_group("dp")
    )
    trimtab.apply(model, plan, follow=Follow(look=2, calibrate=1, patience=1, threshold=2.0))
    tokens = torch.randint(VOCABULARY, (72, LENGTH), generator=torch.Generator().manual_seed(3))
    data = trimtab.loader(torch.utils.data.TensorDataset(tokens), plan.batch_size, plan=model)
    optimizer = adamw(model)
    group = next(index for index, members in enumerate(plan.tensor_groups) if dist.get_rank() in members)
    follower: Any = attach_state(model).plan_follower
    sizes: list[int] = []
    # What a rank would measure: a second a sample at first.
    follower._clock.read = lambda: float(sizes[-1]) * (3.0 if group == 1 and len(sizes) > 3 else 1.0)
    for (batch,) in data:
        sizes.append(len(batch))
        data.weigh(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    active = active_plan_of(model)
    assert active is not None
    follower.close()
    return sizes, [switch.step for switch in active.history]


def test_samples_follow_the_pace_of_tensor_groups(ranks: Pool) -> None:
    found = ranks(4, follow, allow_groups=True)
    switches = found[0][1]
    assert len(switches) == 1
    for rank, (sizes, steps) in enumerate(found):
        assert steps == switches
        before, after = ((4, 5), (2, 1))[rank not in GROUPS[4][0]]
        assert sizes == sorted(sizes, reverse=before > after)
        assert set(sizes) == {before, after}
        assert sizes.count(before) == found[0][0].count(4)


def refused(case: str) -> str:
    model = make("gpt")
    plan = plan_for(model)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    try:
        if case == "another mesh":
            tensor_parallel(model, mesh, shares=plan)
        if case == "other groups":
            tensor_parallel(model, mesh)
        trimtab.apply(model, plan)
    except TrimtabError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not sharded", "this model is not sharded; build the plan's mesh"),
        ("another mesh", r"the mesh shards over ranks \(\d,\), and the plan's tensor groups are \(0, 1\)"),
        ("other groups", r"the model is sharded over ranks \(\d,\)"),
    ],
)
def test_other_layouts_are_refused_with_the_way_out(ranks: Pool, case: str, message: str) -> None:
    for error in ranks(2, refused, case, allow_groups=True):
        assert re.search(message, error), error
        assert "trimtab.mesh(plan)" in error


def averaged_by_all() -> str:
    """Two groups with equal shares: DDP over all ranks would average units that have nothing to do with each other."""
    alone = make("gpt")
    plan = plan_for(alone)
    plan = replace(plan, roles={name: replace(role, tensor_share=0.5) for name, role in plan.roles.items()})
    model = tensor_parallel(alone, trimtab.mesh(plan), shares=plan)
    with pytest.raises(TrimtabError) as error:
        trimtab.apply(DistributedDataParallel(model), plan)
    return str(error.value)


def test_ddp_over_ranks_with_other_units_is_refused(ranks: Pool) -> None:
    messages = ranks(4, averaged_by_all, allow_groups=True)
    assert all("averages the gradients of ranks [0, 1, 2, 3], which hold other units" in m for m in messages)
    assert "this rank averages with ranks [0, 1]" in messages[0]
    assert 'process_group=mesh.get_group("dp")' in messages[3]
