"""Any split of any kind of model trains as a single device does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import Pair, convert
from tests.sharding.models import KINDS, heads, make

from trimtab.sharding import assignment_for, lease, move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

CLOSE = 1e-10


def train(kind: str, options: dict[str, Any]) -> tuple[float, dict[str, tuple[int, ...]]]:
    pair = Pair.make(kind, **options)
    worst = max(pair.step() for _ in range(3))
    return worst, {name: block.table.counts for name, block in sharded_model(pair.spread, "").blocks.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world", "shares"),
    [(2, None), (2, [1.0, 4.0]), (3, None), (3, [1.0, 0.0, 2.0])],
    ids=["even", "uneven", "three", "empty"],
)
def test_trains_as_a_single_device(ranks: Pool, kind: str, world: int, shares: Any) -> None:
    for worst, counts in ranks(world, train, kind, {"shares": shares}):
        assert worst < CLOSE
        for name, each in counts.items():
            assert len(each) == world, name
            if shares is not None:
                assert each.index(max(each)) == shares.index(max(shares)), (name, each)
                assert all(each[rank] == 0 for rank in range(world) if shares[rank] == 0), (name, each)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_relatives_of_llama_train_as_a_single_device(ranks: Pool, kind: str) -> None:
    for worst, _ in ranks(2, train, kind, {"shares": [1.0, 2.0]}):
        assert worst < CLOSE


def eight(kind: str) -> float:
    """Uneven shares of eight ranks, some without a unit; then a move and a lease."""
    with heads(12):
        pair = Pair.make(kind, shares=[1, 2, 1, 0, 1, 3, 2, 1])
    worst = pair.step()
    blocks = {b.name: b for b in sharded_model(pair.spread, "").blocks.values() if not b.vocabulary}
    counts = {name: block.table.counts[::-1] for name, block in blocks.items()}
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, counts))
    worst = max(worst, pair.step())
    lease(pair.spread, {name: block.table.counts[::-1] for name, block in blocks.items()})
    return max(worst, pair.step())


@pytest.mark.soak
def test_eight_ranks_train_as_a_single_device(ranks: Pool) -> None:
    assert max(ranks(8, eight, "shallow", timeout=100)) < 1e-9


def test_units_need_not_be_neighbors(ranks: Pool) -> None:
    """Every third unit to the same rank, out of order."""
    shares = {
        f"blocks.{layer}.{part}": [list(range(units))[::-1][rank::3] for rank in range(3)]
        for layer in range(2)
        for part, units in (("attention", 6), ("mlp", 96))
    }
    for worst, _ in ranks(3, train, "gpt", {"shares": shares, "headroom": 0.3}):
        assert worst < CLOSE


def replicated_gradients() -> dict[str, torch.Tensor]:
    from tests.sharding.models import loss_of

    # Ranks begin with different parameters and random states: those of rank 0 must count.
    model = convert(make("gpt2", seed=dist.get_rank()), shares=[1, 3])
    loss_of("gpt2", model, 0).backward()
    spread = {tensor.name for _, tensor in sharded_model(model, "").tensors()}
    return {name: p.grad for name, p in model.named_parameters() if name not in spread and p.grad is not None}


def test_what_is_replicated_has_the_same_gradient_to_the_bit(ranks: Pool) -> None:
    first, second = ranks(2, replicated_gradients)
    assert "transformer.h.0.mlp.c_proj.bias" in first
    assert "transformer.h.0.mlp.c_fc.bias" not in first
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), name


def count_all_reduces(kind: str) -> int:
    from tests.sharding.models import loss_of

    model = convert(make(kind))
    calls = []
    plain = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    try:
        loss_of(kind, model, 0).backward()
    finally:
        dist.all_reduce = plain
    return len(calls)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_block_costs_one_all_reduce_each_way(ranks: Pool, kind: str) -> None:
    layers, blocks, ways = 2, 2, 2
    assert ranks(2, count_all_reduces, kind) == [layers * blocks * ways] * 2


def measured_shares() -> list[tuple[int, ...]]:
    model = convert(make("gpt"), shares="measured")
    return [block.table.counts for block in sharded_model(model, "").blocks.values()]


def test_measured_shares_are_the_same_on_every_rank(ranks: Pool) -> None:
    first, second = ranks(2, measured_shares)
    assert first == second
    assert [sum(counts) for counts in first] == [6, 96, 6, 96]
