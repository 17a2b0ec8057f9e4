"""Batch shares of tensor groups that follow their measured pace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.tensor.resample import resample


def plan(*samples: int, **changes: Any) -> Plan:
    """Groups of two ranks with so many samples; a rank computes a second and a second for each sample."""
    roles = {
        f"g{index}": Role(
            device="A",
            samples=own,
            precisions={},
            compute_s=1.0 + own,
            fixed_s=1.0,
            peak_bytes=100 + 10 * own,
            bytes_per_sample=10.0,
            tensor_share=0.5,
            **changes,
        )
        for index, own in enumerate(samples)
    }
    return Plan(
        version=PLAN_VERSION,
        trimtab="0",
        model="m",
        batch="free",
        bits=4,
        roles=roles,
        ranks=tuple((name, 2) for name in roles),
        tensor_groups=tuple((2 * index, 2 * index + 1) for index in range(len(samples))),
        predicted=Predicted(step_s=2.0, plain_step_s=4.0, damage=0.0, uniform_damage=0.0),
        reasons=("because",),
    )


def test_groups_that_keep_pace_keep_their_samples() -> None:
    old = plan(4, 4)
    assert resample(old, (5.0, 5.0)) is old
    assert resample(old, (10.0, 10.0)) is old, "all alike slower"
    assert resample(old, (5.0, 5.1)) is old, "too little to gain"


def test_a_group_that_became_slower_gets_fewer_samples() -> None:
    old = plan(4, 4)
    new = resample(old, (5.0, 10.0))
    # 1 + 6 seconds and 2 + 2 * 2; one sample more or less would be slower.
    assert new.shares == (6, 2)
    assert new.batch_size == old.batch_size
    assert (new.tensor_groups, new.bits, new.world_size) == (old.tensor_groups, 4, 4)
    assert new.predicted.step_s == pytest.approx(2.0 * 7 / 10)
    assert [new.roles[new.role_of(rank)].peak_bytes for rank in range(4)] == [160, 160, 120, 120]
    assert new.reasons == (
        "because",
        "replanned during training: tensor groups share the batch as 6/2 instead of 4/4: 43% faster",
    )
    back = resample(new, (7.0, 3.0))
    assert back.shares == (4, 4)
    assert len(back.reasons) == 2


def test_groups_of_one_role_may_part() -> None:
    one = plan(4)
    old = replace(one, ranks=(("g0", 4),), tensor_groups=((0, 2), (1, 3)))
    new = resample(old, (5.0, 10.0))
    assert new.shares == (6, 2)
    assert [new.roles[new.role_of(rank)].samples for rank in range(4)] == [6, 2, 6, 2]


def test_memory_bounds_what_a_group_takes() -> None:
    assert resample(plan(4, 4, memory_bytes=150), (5.0, 10.0)).shares == (5, 3)
