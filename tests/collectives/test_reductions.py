"""Reductions on real ranks, against a simulation of the same steps in one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import torch.distributed as dist
from tests.collectives.simulate import (
    SEED,
    all_gather,
    mixed_pieces,
    residual_norm,
    scatter_reduce,
    values_of,
)

from trimtab.codec import Block, Codec, ErrorFeedback, PowerSGD, TopK, Uncompressed
from trimtab.collectives import Piece, all_reduce, finish, reduction_for

if TYPE_CHECKING:
    from tests.support.pool import Pool


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def reduce_bucket(numel: int, dtype: torch.dtype, scale: float, step: int) -> torch.Tensor:
    flat = values_of(dist.get_rank(), numel, dtype)
    pieces = [(piece, torch.Size([piece.numel])) for piece in mixed_pieces(numel)]
    groups = (world_group(),) * 2
    reduction = reduction_for(pieces, dtype, flat.device, groups, Block(), seed=SEED)
    finish(reduction.steps(flat, step=step, scale=scale))
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [100_003, 1_000])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_holds_exactly_the_simulated_bits(
    ranks: Pool, world: int, numel: int, dtype: torch.dtype
) -> None:
    scale = 1 / world
    reduced = ranks(world, reduce_bucket, numel, dtype, scale, 3)
    gathers = world == 2 or (dtype == torch.float32 and numel == 1_000)
    values = [values_of(rank, numel, dtype) for rank in range(world)]
    expected = (all_gather if gathers else scatter_reduce)(values, mixed_pieces(numel), 3, scale)
    for result in reduced:
        assert torch.equal(result, expected)


def reduce_sparing(numel: int, dtype: torch.dtype, spared: list[int]) -> tuple[torch.Tensor, ...]:
    """A bucket whose owners are the other ranks, without and with error feedback, twice."""
    pieces = [(piece, torch.Size([piece.numel])) for piece in mixed_pieces(numel)]
    groups = (world_group(),) * 2
    reduced = []
    for feedback in (None, ErrorFeedback()):
        reduction = reduction_for(
            pieces,
            dtype,
            torch.device("cpu"),
            groups,
            Block(),
            seed=SEED,
            feedback=feedback,
            method="scatter_reduce",
            spared=spared,
        )
        for step in (3, 4):
            flat = values_of(dist.get_rank(), numel, dtype)
            finish(reduction.steps(flat, step=step, scale=0.5))
            reduced.append(flat)
    return tuple(reduced)


@pytest.mark.parametrize(("world", "spared"), [(2, [0]), (3, [2]), (4, [0, 3])])
def test_ranks_that_are_spared_get_the_same_bits(ranks: Pool, world: int, spared: list[int]) -> None:
    for numel, dtype in ((100_003, torch.float32), (1_000, torch.bfloat16)):
        values = [values_of(rank, numel, dtype) for rank in range(world)]
        found = ranks(world, reduce_sparing, numel, dtype, spared)
        for step, result in zip((3, 4), found[0][:2], strict=True):
            assert torch.equal(result, scatter_reduce(values, mixed_pieces(numel), step, 0.5, spared))
        for own in found[1:]:
            assert all(torch.equal(one, other) for one, other in zip(own, found[0], strict=True))
        # With what the first step left out, the mean of two is closer than that of one step.
        exact = sum(value.float() for value in values) * 0.5
        assert isinstance(exact, torch.Tensor)
        first, second = (result.float() for result in found[0][2:])
        assert float(((first + second) / 2 - exact).norm()) < float((first - exact).norm())


def reduce_one(
    codec: Codec, numel: int, op: Literal["sum", "avg"], weights: list[float] | None, dtype: torch.dtype
) -> torch.Tensor:
    tensor = values_of(dist.get_rank(), numel, dtype)
    weight = weights[dist.get_rank()] if weights else None
    all_reduce(tensor, codec, op=op, weight=weight, name="w")
    return tensor


@pytest.mark.parametrize("numel", [0, 1, 7, 5000, 70_000])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_and_averages_are_close_for_any_size(ranks: Pool, world: int, numel: int) -> None:
    for op in ("sum", "avg"):
        reduced = ranks(world, reduce_one, Block(bits=8, block=128), numel, op, None, torch.float32)
        exact = sum(values_of(rank, numel) for rank in range(world)) / (world if op == "avg" else 1)
        assert isinstance(exact, torch.Tensor)
        for result in reduced:
            assert torch.equal(result, reduced[0])
            # 8 bits over a range of at most ~10 units, each value quantized at most world + 1 times
            torch.testing.assert_close(result, exact, rtol=0, atol=(world + 1) * 12 / 255)


@pytest.mark.parametrize("codec", [Uncompressed(), Block(bits=8), TopK(density=1.0), PowerSGD(rank=1000)])
def test_a_weighted_average_weighs_by_the_denominator(ranks: Pool, codec: Codec) -> None:
    weights = [3.0, 0.0, 1.0]
    reduced = ranks(3, reduce_one, codec, 4096, "sum", weights, torch.float32)
    exact = sum(w * values_of(rank, 4096) for rank, w in enumerate(weights)) / 4.0
    assert isinstance(exact, torch.Tensor)
    for result in reduced:
        assert torch.equal(result, reduced[0])
        torch.testing.assert_close(result, exact, rtol=0, atol=0.1 if isinstance(codec, Block) else 1e-4)


def test_weights_that_make_no_average_are_refused(ranks: Pool) -> None:
    for weights in ([0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(AssertionError, match="weight"):
            ranks(2, reduce_one, Block(), 100, "sum", weights, torch.float32)


def reduce_float64() -> torch.Tensor:
    tensor = torch.full((1000,), 0.1, dtype=torch.float64)
    all_reduce(tensor, Block(bits=1))
    return tensor


def test_types_the_codec_does_not_carry_are_reduced_exactly(ranks: Pool) -> None:
    for result in ranks(3, reduce_float64):
        assert torch.equal(result, torch.full((1000,), 0.1, dtype=torch.float64) * 3)


def reduce_in_subgroup() -> torch.Tensor:
    members = [0, 2]
    groups = [dist.new_group(members) for _ in range(2)]
    tensor = torch.full((5000,), float(dist.get_rank() + 1))
    if dist.get_rank() in members:
        all_reduce(tensor, Block(), groups=groups)
    return tensor


def test_only_the_ranks_of_a_group_take_part(ranks: Pool) -> None:
    reduced = ranks(3, reduce_in_subgroup, allow_groups=True)
    assert [float(result[0]) for result in reduced] == [4.0, 2.0, 4.0]


def reduce_with_a_nan(value: float) -> torch.Tensor:
    tensor = torch.ones(5000)
    if dist.get_rank() == 1:
        tensor[1234] = value
    all_reduce(tensor, Block(block=100))
    return tensor


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_overflow_on_one_rank_reaches_all_as_nan(ranks: Pool, world: int, value: float) -> None:
    for result in ranks(world, reduce_with_a_nan, value):
        assert bool(result[1234].isnan())
        assert bool((result[:1000] == world).all()), "other blocks are untouched"


def reduce_repeatedly(
    world_scale: float, steps: int, codec: Codec, feedback: bool
) -> tuple[torch.Tensor, float]:
    """The running sum of reductions of the same values, and the norm of what is still owed."""
    rank = dist.get_rank()
    values = values_of(rank, 64 * 96)
    memory = ErrorFeedback() if feedback else None
    piece = Piece(name="w", offset=0, numel=values.numel(), bits=getattr(codec, "bits", 1), block=128)
    groups = (world_group(),) * 2
    reduction = reduction_for(
        [(piece, torch.Size([64, 96]))],
        values.dtype,
        values.device,
        groups,
        codec,
        seed=1,
        feedback=memory,
    )
    total = torch.zeros_like(values)
    for step in range(steps):
        flat = values.clone()
        finish(reduction.steps(flat, step=step, scale=world_scale))
        total += flat
    return total, residual_norm(memory)


@pytest.mark.parametrize("codec", [Block(bits=2, block=128, stochastic=False), TopK(0.05), PowerSGD(4)])
@pytest.mark.parametrize("world", [2, 3])
def test_error_feedback_sends_in_the_end_everything_that_was_meant(
    ranks: Pool, world: int, codec: Codec
) -> None:
    steps = 40
    exact = sum(values_of(rank, 64 * 96) for rank in range(world)) / world * steps
    assert isinstance(exact, torch.Tensor)
    with_memory = ranks(world, reduce_repeatedly, 1 / world, steps, codec, True)
    totals = [total for total, _ in with_memory]
    owed = sum(norm for _, norm in with_memory)
    for total in totals:
        assert torch.equal(total, totals[0])
    # Everything meant was sent, but for what the memories still hold.
    missing = float((totals[0] - exact).norm())
    assert missing <= owed * 1.001 + 1e-3
    assert missing < 0.25 * float(exact.norm())
