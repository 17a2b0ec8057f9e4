"""The benches' trainer: what it trains, what it counts, and the floor that it computes from an even split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.trainer import LoaderTrainer, Trainer, ideal, take_turns
from trimtab.codec import Block
from trimtab.models import tasks
from trimtab.sharding import LocalTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.pool import Pool

SIZE: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "context": 8, "samples": 2}


def a_trainer(kind: str) -> Trainer:
    task = tasks.gpt(**SIZE)
    ddp = DistributedDataParallel(task.model)
    if kind == "compressed":
        trimtab.compress(ddp, Block(bits=8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batch = lambda step: task.batch(step=step, rank=dist.get_rank())  # noqa: E731
    return Trainer(ddp, optimizer, batch, silent=kind == "silent")


def weights_after_steps(kind: str) -> tuple[list[float], list[float], float]:
    trainer = a_trainer(kind)
    for _ in range(3):
        trainer.step()
    flat = torch.cat([p.detach().flatten() for p in trainer.module.parameters()])
    return trainer.losses, trainer.seconds, float(flat.double().square().sum())


def test_ranks_agree_on_weights_and_on_the_slowest_time(ranks: Pool) -> None:
    (losses, seconds, first), (_, other_seconds, second) = ranks(2, weights_after_steps, "plain")
    assert first == second
    assert seconds == other_seconds, "the time of a step is the slowest rank's"
    assert len(losses) == 3
    compressed = ranks(2, weights_after_steps, "compressed", allow_groups=True)[0][2]
    assert compressed == pytest.approx(first, rel=1e-3)
    assert compressed != first
    apart = [weights for _, _, weights in ranks(2, weights_after_steps, "silent")]
    assert apart[0] != apart[1], "without communication each rank learns from its own batches"


def trained_in_turns() -> tuple[list[int], float, float]:
    task = tasks.gpt(**SIZE)
    trainers = {}
    for method in ("a", "alone"):
        ddp = DistributedDataParallel(tasks.gpt(**SIZE).model)
        trainers[method] = LoaderTrainer(ddp, task, lr=1e-3)
    counts = []
    timings = take_turns(
        trainers,
        ("alone",),
        ("alone",),
        warmup=2,
        repeats=3,
        steps=2,
        report=lambda *at: counts.append(at[0]),
    )
    assert {method: len(timing.samples) for method, timing in timings.items()} == {"a": 3, "alone": 3}
    return counts, trainers["a"].held_out_loss(), trainers["alone"].held_out_loss()


def test_methods_take_turns_in_blocks(ranks: Pool) -> None:
    (counts, *losses), (_, *other) = ranks(2, trained_in_turns)
    assert counts == [1, 2, 3, 4, 5]
    assert losses[0] == other[0]
    assert losses[0] != losses[1]


def floor_of(times: Sequence[Sequence[tuple[float, float, float]]]) -> tuple[float, ...]:
    own = [
        (total, LocalTimes(compute=compute, collectives=collectives))
        for total, compute, collectives in times[dist.get_rank()]
    ]
    return ideal(own, torch.device("cpu")).samples


def test_the_floor_levels_the_ranks_own_work(ranks: Pool) -> None:
    """In the second step the other rank is three times slower: a quarter of the work is its fair share."""
    first = [(4.0, 2.0, 1.0), (8.0, 2.0, 5.0)]
    second = [(4.0, 2.0, 1.0), (8.0, 6.0, 1.0)]
    for samples in ranks(2, floor_of, [first, second]):
        # One second of other work and one of collectives that nobody waited for; the work is leveled at 2 s,
        # then at 3 s: three quarters of it on a rank that needs 4 s for all of it, a quarter on one that needs 12 s.
        assert samples == pytest.approx([4.0, 1 + 1 + 3.0])
