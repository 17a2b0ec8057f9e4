"""Leased units are computed elsewhere, exactly; parameters, clipping and checkpoints know only their owner."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.tensor_parallel.jobs import Pair, adamw

from trimtab.tensor_parallel.block import elastic_of
from trimtab.tensor_parallel.lease import end_leases, lease, leased

if TYPE_CHECKING:
    from tests.support.pool import Pool


def random_counts(model: Any, source: random.Random, empty: bool = True) -> dict[str, list[int]]:
    """Any counts of some blocks, empty ranks included; the same on every rank."""
    elastic = elastic_of(model, "test")
    chosen = {}
    for name, block in elastic.blocks.items():
        if source.random() < 0.7:
            cuts = sorted(source.randint(0, block.units) for _ in range(elastic.group.size - 1))
            chosen[name] = [b - a for a, b in zip([0, *cuts], [*cuts, block.units], strict=True)]
    return chosen


def lease_and_train(kind: str, headroom: float) -> float:
    pair = Pair.make(kind, adamw, headroom=headroom)
    source = random.Random(1)
    worst = 0.0
    for round_ in range(6):
        worst = max(worst, pair.step())
        lease(pair.spread, random_counts(pair.spread, source))
        worst = max(worst, pair.step())
        if round_ == 3:
            end_leases(pair.spread)
            assert leased(pair.spread) == {}
    return worst


@pytest.mark.parametrize(
    ("kind", "headroom"), [("gpt", 0.0), ("gpt2", 0.5), ("llama", 0.0), ("vit", 0.0), ("sequential", 0.0)]
)
def test_a_leased_unit_trains_as_if_it_had_stayed(ranks: Pool, kind: str, headroom: float) -> None:
    for worst in ranks(3, lease_and_train, kind, headroom):
        assert worst < 1e-9  # twelve steps of AdamW let rounding grow
