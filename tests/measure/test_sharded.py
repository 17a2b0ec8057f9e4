"""What FSDP2 adds to a rank's work, measured on real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.measure.sharded import ShardedProbe

if TYPE_CHECKING:
    from tests.support.pool import Pool

    from trimtab.cluster.profile import ShardedTime


def measured() -> ShardedTime:
    return ShardedProbe(torch.device("cpu")).typical(3)


def test_copies_units_and_parameters_take_time(ranks: Pool) -> None:
    for times in ranks(2, measured, allow_groups=True):
        assert 0 < times.copy.a < 1e-6, "seconds of a value"
        # Where a busy machine hides which of both takes the time, it is counted as the unit's.
        assert 0 < times.unit_s + times.unit_parameter_s < 1
        assert min(times.unit_s, times.unit_parameter_s) >= 0
        assert 0 < times.parameter_s < 1
