"""Sums of runs that lie on other ranks in each of two replicas, with 2 ranks each: ranks 0 and 1, ranks 2 and 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.codec import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.collectives import finish
from trimtab.collectives.scattered import Coding, ScatteredReduction, SharedRun

if TYPE_CHECKING:
    from tests.support.pool import Pool

ROW = 32
HOLDERS = [(0, 2), (0, 2), (0, 3), (1, 3), (1, 2), (1, 3)]
"""The two ranks that hold each unit of 32 values."""


def runs_of(rank: int, bits: int) -> list[SharedRun]:
    own = [unit for unit, members in enumerate(HOLDERS) if rank in members]
    return [
        SharedRun(
            name="weight",
            offset=own.index(unit) * ROW,
            numel=ROW,
            bits=bits,
            block=ROW,
            first_block=unit,
            members=HOLDERS[unit],
            reducer=HOLDERS[unit][unit % 2],
        )
        for unit in own
    ]


def values_of(rank: int, unit: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROW, generator=torch.Generator().manual_seed(10 * unit + rank)).to(dtype)


def reduce(bits: int, dtype: torch.dtype, steps: int, feedback: bool) -> list[torch.Tensor]:
    """The mean over the steps of what this rank has after each, by unit."""
    rank, device = dist.get_rank(), torch.device("cpu")
    coding = Coding(
        kernels=kernels_for(device),
        seed=1,
        stochastic=not feedback,
        feedback=ErrorFeedback() if feedback else None,
    )
    runs = runs_of(rank, bits)
    group = dist.group.WORLD
    assert group is not None
    reduction = ScatteredReduction(runs, dtype, device, (group, group), coding if bits else None)
    total = torch.zeros(len(runs) * ROW, dtype=dtype)
    for step in range(steps):
        flat = torch.cat([values_of(rank, run.first_block, dtype) for run in runs])
        finish(reduction.steps(flat, step=step, scale=0.5))
        total += flat / steps
    return list(total.view(-1, ROW))


def worst(results: list[list[torch.Tensor]], dtype: torch.dtype) -> float:
    """The largest error; all holders of a unit must have the same bits."""
    error = 0.0
    for unit, members in enumerate(HOLDERS):
        held = [results[m][[run.first_block for run in runs_of(m, 0)].index(unit)] for m in members]
        assert torch.equal(held[0], held[1]), f"unit {unit} differs between ranks {members}"
        expected = sum((values_of(m, unit, dtype) for m in members), torch.zeros(ROW, dtype=dtype)) / 2
        error = max(error, float((held[0] - expected).abs().max()))
    return error


def test_values_that_are_not_encoded_are_averaged_exactly(ranks: Pool) -> None:
    assert worst(ranks(4, reduce, 0, torch.float64, 1, False), torch.float64) < 1e-15


def test_encoded_values_have_the_same_bits_on_all_holders(ranks: Pool) -> None:
    one = worst(ranks(4, reduce, 4, torch.float32, 1, False), torch.float32)
    assert 1e-3 < one < 1.0, "4 bits round, and not wildly"
    assert worst(ranks(4, reduce, 4, torch.float32, 64, False), torch.float32) < one / 3


def test_error_feedback_adds_what_earlier_steps_left_out(ranks: Pool) -> None:
    one = worst(ranks(4, reduce, 2, torch.float32, 1, True), torch.float32)
    assert worst(ranks(4, reduce, 2, torch.float32, 32, True), torch.float32) < one / 4
