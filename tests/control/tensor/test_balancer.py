"""The controller on real ranks: the same decisions everywhere, exact training, calm, and work that comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import Pair, convert
from tests.sharding.models import make
from tests.support.faults import Delay

from trimtab.control.tensor.balancer import balance, balancer_of, decisions
from trimtab.control.tensor.resizing import resized
from trimtab.control.training_steps import TrainingSteps
from trimtab.errors import TrimtabError
from trimtab.measure.tensor_ranks import UnitClock
from trimtab.planning.tensor.balance import Balance
from trimtab.predict.migration import Transfer
from trimtab.sharding import assignment
from trimtab.sharding.lease import leased
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

LINKS = {
    "fast": Transfer(fixed=0.0, per_byte=0.0, exposed=1.0),
    "slow": Transfer(fixed=1e3, per_byte=1.0, exposed=1.0),
    "free": Transfer(fixed=0.0, per_byte=0.0, exposed=0.0),
}


class Scripted(UnitClock):
    """Gives the times that ranks of given slowness would need, whatever this machine does."""

    def __init__(self, model: Any, slowness: Callable[[int, int], float]) -> None:
        super().__init__(torch.device("cpu"))
        self._sharded, self._slowness, self.steps = sharded_model(model, "test"), slowness, 0

    def end(self) -> None:
        self.steps += 1

    def samples(self) -> list[tuple[float, float, float]]:
        rank = self._sharded.group.rank
        parts = []
        for block in self._sharded.blocks.values():
            counts = block.table.counts if block.lease is None else block.lease.counts
            parts.append(counts[rank] / block.units)
        share = sum(parts) / len(parts) * (1 - resized(self._sharded))
        return [(share * self._slowness(self.steps, rank), 0.01, 0.0)] * 8


def follow(kind: str, link: str, resize: float, until: int, steps: int) -> dict[str, Any]:
    """Rank 1 is four times slower until a step."""
    pair = Pair.make(kind)
    clock = Scripted(pair.spread, lambda step, rank: 4.0 if rank == 1 and step < until else 1.0)
    balance(pair.spread, Balance(resize=resize, own=link != "free"), clock=clock)
    balancer_of(pair.spread).transfer = LINKS[link]
    worst = 0.0
    pruned = []
    for _ in range(steps):
        worst = max(worst, pair.step()) if resize == 0 else worst
        if resize:
            loss = pair.spread(torch.zeros(3, 7, dtype=torch.int64))
            loss.backward()
            pair.spread_optimizer.step()
            pair.spread_optimizer.zero_grad()
        pruned.append(resized(pair.spread))
    total = torch.tensor(sum(block.count for block in sharded_model(pair.spread, "").blocks.values()))
    dist.all_reduce(total)
    return {
        "worst": worst,
        "units": int(total),
        "pruned": max(pruned),
        "leased": leased(pair.spread),
        "counts": {name: list(map(len, lists)) for name, lists in assignment(pair.spread).items()},
        "records": [
            (record.step, record.decision.mode, record.decision.actions, record.decision.shares)
            for record in decisions(pair.spread)
        ],
        "effects": [(record.decision.predicted, record.measured) for record in decisions(pair.spread)],
    }


def test_a_slow_rank_gives_units_away_and_gets_them_back(ranks: Pool) -> None:
    found = ranks(3, follow, "shallow", "fast", 0.0, 40, 90)
    assert found[0]["records"] == found[1]["records"] == found[2]["records"]
    (first, mode, actions, _), *_, last = found[0]["records"]
    assert first <= 24
    assert (mode, actions) == ("own", ("helps", "own", "helps"))
    assert 40 < last[0] <= 70
    assert found[0]["counts"]["blocks.0.mlp"] == pytest.approx([32, 32, 32], abs=3)
    assert all(each["worst"] < 1e-8 for each in found), "balancing must not change the training"
    assert all(each["units"] == 6 + 96 for each in found)
    for predicted, measured in found[0]["effects"][:1]:
        assert measured == pytest.approx(predicted, rel=0.15)


def test_an_even_job_is_left_alone(ranks: Pool) -> None:
    assert ranks(2, follow, "shallow", "fast", 0.0, 0, 40)[0]["records"] == []


@pytest.mark.parametrize(
    ("link", "resize", "actions"),
    [
        ("fast", 0.5, ("helps", "own")),
        ("slow", 0.5, ("nothing", "resize")),
        ("slow", 0.0, None),
        ("free", 0.0, ("helps", "lease")),
    ],
)
def test_the_link_decides(ranks: Pool, link: str, resize: float, actions: Any) -> None:
    found = ranks(2, follow, "shallow", link, resize, 10**6, 40)
    assert [record[2] for record in found[0]["records"]] == ([actions] if actions else [])
    assert found[1]["pruned"] == pytest.approx(0.5, abs=0.1) if link == "slow" and resize else True
    assert bool(found[0]["leased"]) == (link == "free")
    assert all(each["worst"] < 1e-8 for each in found)


def test_a_straggler_that_vanishes_while_it_is_decided_about(ranks: Pool) -> None:
    # The second window ends at step 16 and is read at 17: what is decided then is out of date at once.
    found = ranks(2, follow, "shallow", "fast", 0.0, 17, 60, faults=[Delay(0.0005, seed=1)])
    assert found[0]["records"] == found[1]["records"]
    assert found[0]["records"][0][0] == 17
    assert found[0]["counts"]["blocks.0.mlp"] == pytest.approx([48, 48], abs=3)
    assert all(each["units"] == 6 + 96 and each["worst"] < 1e-8 for each in found)


def automatic() -> tuple[float, int]:
    pair = Pair.make("shallow", balance="auto")
    worst = max(pair.step() for _ in range(30))
    with torch.no_grad():
        pair.spread(torch.zeros(1, 7, dtype=torch.int64))
    return worst, len(decisions(pair.spread))


def test_the_verb_needs_no_change_of_the_loop(ranks: Pool) -> None:
    found = ranks(2, automatic)
    assert all(worst < 1e-8 for worst, _ in found)
    assert len({count for _, count in found}) == 1


def refused() -> list[str]:
    said = []
    for unknown in ("always", 0.5):
        try:
            convert(make("shallow"), balance=unknown)
        except TrimtabError as error:
            said.append(str(error))
    return said


def test_mistakes_are_named(ranks: Pool) -> None:
    (said,) = ranks(1, refused)
    assert ["'auto'" in said[0], "balance=0.5 is unknown" in said[1]] == [True] * 2


class Listening:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def between(self, model: torch.nn.Module) -> None:
        self.told.append("between")

    def begins(self) -> None:
        self.told.append("begins")

    def ends(self) -> None:
        self.told.append("ends")


def test_steps_are_seen_without_a_line_in_the_loop() -> None:
    model = torch.nn.Linear(2, 2)
    listening = Listening()
    steps = TrainingSteps(model, {id(model.weight)}, listening)
    ours = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.weight, model.bias])]
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    x = torch.ones(1, 2)
    for _ in range(2):
        for _ in range(2):  # gradients are accumulated
            model(x).sum().backward()
        for optimizer in (*ours, other):
            optimizer.step()
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
    assert listening.told == ["begins", "ends", "ends", "between", "begins", "ends", "ends"]
    assert steps.optimizers == ours
