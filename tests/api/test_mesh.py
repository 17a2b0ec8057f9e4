"""`trimtab.mesh`: groups as the plan says, refused together otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from tests.control.plans.plan_cases import net, plan_for, role
from tests.support.pool import Pool

import trimtab
from trimtab.errors import TrimtabError


def groups_of(tensor_groups: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    plan = plan_for(net(), ranks=(("fast", 4),), roles={"fast": role("A", 4)}, tensor_groups=tensor_groups)
    mesh = trimtab.mesh(plan)
    assert mesh.mesh_dim_names == ("dp", "tp")
    members = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")]
    return members[0], members[1]


def test_the_groups_are_those_of_the_plan(ranks: Pool) -> None:
    assert ranks(4, groups_of, ((0, 3), (1, 2)), allow_groups=True) == [
        ([0, 1], [0, 3]),
        ([0, 1], [1, 2]),
        ([2, 3], [1, 2]),
        ([2, 3], [0, 3]),
    ]


def test_without_tensor_groups_every_rank_is_a_copy(ranks: Pool) -> None:
    assert ranks(4, groups_of, (), allow_groups=True) == [([0, 1, 2, 3], [rank]) for rank in range(4)]


def refused() -> str:
    plan = plan_for(net(), ranks=(("fast", 2), ("slow", 2)))
    if dist.get_rank() == 1:
        plan = replace(plan, ranks=(("fast", 2), ("slow", 1)))
    with pytest.raises(TrimtabError) as raised:
        trimtab.mesh(plan)
    return str(raised.value)


def test_a_plan_for_other_ranks_stops_all(ranks: Pool) -> None:
    errors = ranks(4, refused)
    assert "mesh: the plan is for 3 ranks, and there are 4" in errors[1]
    assert all("rank 1 cannot run its plan" in errors[rank] for rank in (0, 2, 3))


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(TrimtabError, match="init_process_group first"):
        trimtab.mesh(plan_for(net()))
