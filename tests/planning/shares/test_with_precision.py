"""Shares and precisions together."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import share_batch
from trimtab.planning.shares.with_precision import PRECISE, pace_for, quickest


@dataclass
class Lines:
    """Times proportional to samples; a rank can be up to `gain` times as fast, at a damage that grows with that."""

    per_sample: dict[str, float]
    gain: float = 2.0
    worst: float = 1.0
    most: dict[str, int] | None = None
    lean: dict[str, int] | None = None

    def own_s(self, device: str, samples: int) -> float:
        if self.most is not None and samples > self.most.get(device, samples):
            return inf
        return self.per_sample[device] * samples

    def damage(self, device: str, samples: int, seconds: float) -> float:
        if self.lean is not None and samples > self.lean.get(device, samples):
            return inf
        needed = self.per_sample[device] * samples / seconds if seconds > 0 else inf
        forced = 1.2 if self.most is not None and samples > self.most.get(device, samples) else 1.0
        needed = max(needed, forced)
        if needed > self.gain:
            return inf
        return self.worst * (needed - 1) * (samples / 100) ** 2


def test_shares_alone_do_no_damage_and_are_the_best_shares() -> None:
    trades = Lines({"fast": 1.0, "slow": 2.5})
    found = quickest(trades, {"fast": 1, "slow": 1}, 14, budget=0.0)
    assert found.damage == 0
    assert (found.samples["fast"][0], found.samples["slow"][0]) == share_batch(14, [1.0, 2.5])
    assert found.seconds == pytest.approx(10.0, rel=2 * PRECISE)


def test_damage_buys_speed_beyond_shares() -> None:
    trades = Lines({"fast": 1.0, "slow": 2.5})
    counts = {"fast": 1, "slow": 1}
    none, some, all_ = (quickest(trades, counts, 14, budget=b) for b in (0.0, 1e-3, 10.0))
    assert none.seconds > some.seconds > all_.seconds
    assert some.damage <= 1e-3
    assert all_.seconds == pytest.approx(5.0, rel=2 * PRECISE)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(0, 60),
    st.sampled_from([0.0, 1e-3, 1e-1]),
)
def test_every_rank_has_a_sample_and_they_add_up(
    classes: list[tuple[float, int]], more: int, budget: float
) -> None:
    counts = {f"d{i}": count for i, (_, count) in enumerate(classes)}
    trades = Lines({f"d{i}": seconds for i, (seconds, _) in enumerate(classes)})
    total = sum(counts.values()) + more
    found = quickest(trades, counts, total, budget=budget)
    assert {device: len(own) for device, own in found.samples.items()} == counts
    assert sum(map(sum, found.samples.values())) == total
    assert min(map(min, found.samples.values())) >= 1
    assert all(own[0] - own[-1] <= 1 for own in found.samples.values())
    assert found.damage <= budget
    each = [trades.per_sample[d] for d, count in counts.items() for _ in range(count)]
    if budget == 0:
        ideal = share_batch(total, each)
        makespan = max(s * n for s, n in zip(each, ideal, strict=True))
        assert found.seconds <= makespan * (1 + 2 * PRECISE)


def test_what_a_device_takes_beside_counts() -> None:
    trades = Lines({"fast": 1.0, "slow": 1.0})
    found = quickest(trades, {"fast": 1, "slow": 1}, 10, budget=0.0, beside_s={"slow": 4.0})
    assert found.samples == {"fast": (7,), "slow": (3,)}


def test_memory_bounds_shares_and_may_force_lowering() -> None:
    trades = Lines({"fast": 1.0, "slow": 1.0}, most={"slow": 2})
    assert quickest(trades, {"fast": 1, "slow": 1}, 10, budget=0.0).samples == {"fast": (8,), "slow": (2,)}
    both = Lines({"fast": 1.0, "slow": 1.0}, most={"fast": 3, "slow": 3})
    with pytest.raises(TrimtabError, match=r"fits only with operators lowered whose damage is 0\.00"):
        quickest(both, {"fast": 1, "slow": 1}, 10, budget=0.0)
    assert quickest(both, {"fast": 1, "slow": 1}, 10, budget=1.0).damage > 0
    full = Lines({"fast": 1.0, "slow": 1.0}, lean={"fast": 3, "slow": 3})
    with pytest.raises(TrimtabError, match="the batch does not fit"):
        quickest(full, {"fast": 1, "slow": 1}, 10, budget=1.0)


def test_precisions_for_given_shares() -> None:
    trades = Lines({"fast": 1.0, "slow": 2.0})
    even = {"fast": (4,), "slow": (4,)}
    free = pace_for(trades, even, budget=10.0)
    assert free is not None
    assert free.seconds == pytest.approx(4.0, rel=2 * PRECISE)
    assert free.samples == even
    none = pace_for(trades, even, budget=0.0)
    assert none is not None
    assert none.seconds == pytest.approx(8.0, rel=2 * PRECISE)
    assert pace_for(Lines({"fast": 1.0, "slow": 2.0}, lean={"slow": 1}), even, budget=10.0) is None
