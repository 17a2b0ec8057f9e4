"""What moving work costs is measured on the link there is, and every rank gets the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.support.faults import Throttle

from trimtab.measure.tensor_ranks import measure_transfer
from trimtab.predict.migration import Transfer
from trimtab.sharding.group import TensorGroup

if TYPE_CHECKING:
    from tests.support.pool import Pool

_RATE = 2e7


def measured() -> Transfer:
    world = dist.group.WORLD
    assert world is not None
    group = TensorGroup(process_group=world, rank=dist.get_rank(), size=dist.get_world_size())
    return measure_transfer(group, torch.device("cpu"))


def test_every_rank_measures_the_same(ranks: Pool) -> None:
    found = ranks(3, measured, faults=[Throttle(_RATE)])
    assert found[0] == found[1] == found[2]
    assert found[0].per_byte >= 0.5 / _RATE, "a transfer cannot be faster than its link"
    assert 0 <= found[0].exposed <= 1


def test_costs_of_owning_and_leasing() -> None:
    transfer = Transfer(fixed=0.001, per_byte=1e-9, exposed=0.5)
    assert transfer.own(1e9, 3, 4)(0.25) == pytest.approx(0.004 + 0.75)
    # 2 messages out and 4 back: the first one out and the last one back are waited for, half of the others.
    lease = transfer.lease(1e9, 4, 2)
    assert lease(0.25, 9.0) == pytest.approx(0.002 + 0.5 * 0.004 + 0.125 + 0.0625 + 0.5 * (0.125 + 0.1875))
    assert transfer.lease(1e9, 4, 9) == transfer.lease(1e9, 4, 4)
    # With nothing to compute meanwhile, everything is waited for.
    assert lease(0.25, 0.0) == pytest.approx(0.004 + 0.5)
    assert lease(0.0, 1.0) == 0
    assert transfer.own(1e9, 3, 4)(0.0) == 0
