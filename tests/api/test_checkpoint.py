"""Checkpoints across numbers of ranks: what continues, what is dropped, and that it is said."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block
from trimtab.control.compression.ddp import compression_of

CODEC = Block(bits=3, block=64)


class Lines(logging.Handler):
    """What trimtab logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(state: dict[str, Any] | None, bits: int | None, steps: int) -> tuple[dict[str, Any], Any, str]:
    """Resume, take some steps; the next checkpoint, what was restored (step, bits, residual), and what was logged."""
    torch.manual_seed(0)
    ddp = Ddp(nn.Linear(64, 64))
    trimtab.compress(ddp, CODEC, error_feedback=True)
    compression = compression_of(ddp)
    handler = Lines()
    trimtab.environment.logger().addHandler(handler)
    if state is not None:
        trimtab.load_state_dict(ddp, state)
    trimtab.environment.logger().removeHandler(handler)
    restored = None
    if compression is not None:
        saved = compression.state_dict()
        restored = saved["step"], saved["bits"], saved["residuals"]
        if bits is not None:
            compression.set_bits({"weight": bits}, at_step=compression.step)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
    after = trimtab.state_dict(ddp)
    del ddp, compression
    gc.collect()
    return after, restored, "; ".join(handler.lines)


def test_bits_and_steps_continue_on_fewer_and_on_more_ranks(ranks: Pool) -> None:
    three = [state for state, _, _ in ranks(3, trained, None, 5, 4)]
    assert [state["compression"]["rank"] for state in three] == [0, 1, 2]
    residual = three[0]["compression"]["residuals"]["weight"]
    assert residual.abs().sum() > 0
    # A script that saves on rank 0 alone: every rank loads that state.
    two = ranks(2, trained, three[0], None, 1)
    for rank, (_, (step, bits, residuals), line) in enumerate(two):
        assert (step, bits) == (4, {"weight": 5})
        if rank == 0:
            assert torch.equal(residuals["weight"], residual)
            assert "resumed on 2 ranks, from a checkpoint of 3" in line
            assert "that of rank 2 is dropped" in line
        else:
            assert residuals == {}, "what another rank owes must not be paid twice"
            assert line == ""
    (_, (step, bits, residuals), _) = ranks(4, trained, two[0][0], None, 1)[3]
    assert (step, bits, residuals) == (5, {"weight": 5}, {})


def test_one_rank_alone_passes_the_bits_on(ranks: Pool) -> None:
    (saved, _, _) = ranks(2, trained, None, 6, 2)[0]
    ((alone, restored, line),) = ranks(1, trained, saved, None, 2)
    assert restored is None, "there is nothing to compress"
    assert "kept for the next checkpoint" in line
    for _, (step, bits, _), _ in ranks(2, trained, alone, None, 1):
        assert (step, bits) == (2, {"weight": 6})


def test_a_rank_that_loads_another_ranks_state_says_that_its_feedback_is_dropped(ranks: Pool) -> None:
    states = [state for state, _, _ in ranks(2, trained, None, None, 2)]
    (_, (_, _, residuals), line) = ranks(2, trained, states[1], None, 1)[0]
    assert residuals == {}
    assert "error feedback is dropped: the state is rank 1's" in line
