"""Units move with their optimizer state, exactly, and only they travel."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import Pair, adamw, difference, random_assignment
from tests.support.faults import Delay, Die
from tests.support.pool import RanksError
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trimtab.errors import TrimtabError
from trimtab.sharding import Checkpoint, assignment, assignment_for, move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


def move_and_train(kind: str, optimizer: str, headroom: float) -> float:
    pair = Pair.make(kind, OPTIMIZERS[optimizer], headroom=headroom)
    objects = list(map(id, pair.spread.parameters()))
    source = random.Random(1)
    worst = 0.0
    for _ in range(6):
        worst = max(worst, pair.step())
        expected = random_assignment(pair.spread, source)
        move(pair.spread, pair.spread_optimizer, expected)
        now = assignment(pair.spread)
        assert all([sorted(units) for units in now[name]] == lists for name, lists in expected.items())
        worst = max(worst, difference(pair.alone, pair.spread, lambda p: p.data))
    assert list(map(id, pair.spread.parameters())) == objects, "the optimizer would update other tensors"
    return worst


@pytest.mark.parametrize(
    ("kind", "optimizer", "headroom"),
    [
        ("gpt", "adamw", 0.0),
        ("gpt", "momentum", 0.5),
        ("gpt2", "momentum", 0.0),
        ("llama", "adamw", 0.5),
        ("vit", "adamw", 0.0),
    ],
)
def test_a_moved_unit_goes_on_as_if_it_had_stayed(
    ranks: Pool, kind: str, optimizer: str, headroom: float
) -> None:
    for worst in ranks(3, move_and_train, kind, optimizer, headroom):
        assert worst < 1e-10


def traffic(steps: int) -> tuple[int, int, int, int]:
    pair = Pair.make("gpt")
    for _ in range(steps):
        pair.step()
    expected = assignment_for(pair.spread, {"blocks.0.mlp": [38, 58], "blocks.1.attention": [1, 5]})
    moved = move(pair.spread, pair.spread_optimizer, expected)
    width, head = 24, 4
    mlp_unit = 8 * (width + 1 + width)
    attention_unit = 8 * (3 * head * (width + 1) + head * width)
    copies = 1 if steps == 0 else 3  # with AdamW's two states
    return moved.units, moved.sent_bytes, moved.received_bytes, copies * (10 * mlp_unit + 2 * attention_unit)


@pytest.mark.parametrize("steps", [0, 2])
def test_only_the_slices_of_moving_units_travel(ranks: Pool, steps: int) -> None:
    (units, sent, received, exact), other = ranks(2, traffic, steps)
    assert units == 12
    assert (sent, received) == (exact, 0)
    assert other[1:3] == (0, exact)


def with_headroom() -> list[tuple[int, ...]]:
    pair = Pair.make("gpt", headroom=0.25)
    pointers = [(p.data_ptr(), p.shape) for p in pair.spread.parameters()]
    pair.step()
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"blocks.0.mlp": [40, 56]}))
    assert [(p.data_ptr(), p.shape) for p in pair.spread.parameters()] == pointers, "nothing allocated anew"
    assert pair.step() < 1e-10
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"blocks.0.mlp": [30, 66]}))
    assert pair.step() < 1e-10
    return [sharded_model(pair.spread, "").blocks["blocks.0.mlp"].capacity]


def test_headroom_is_used_before_memory_is_allocated(ranks: Pool) -> None:
    assert ranks(2, with_headroom) == [[(60, 83)]] * 2


def random_life(sequences: int) -> float:
    pair = Pair.make("shallow", headroom=0.2)
    source = random.Random(7)
    worst = 0.0
    for _ in range(sequences):
        for _ in range(source.randint(1, 2)):
            if source.random() < 0.6:
                move(pair.spread, pair.spread_optimizer, random_assignment(pair.spread, source))
            else:
                worst = max(worst, pair.step())
    owned = sum(block.count for block in sharded_model(pair.spread, "").blocks.values())
    total = torch.tensor(owned)
    dist.all_reduce(total)
    assert total == 6 + 96, "a unit was lost or doubled"
    return worst


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.soak)])
def test_many_sequences_of_moves_and_steps_under_random_delays(ranks: Pool, count: int) -> None:
    for worst in ranks(3, random_life, count, timeout=100, faults=[Delay(0.0005, seed=3)]):
        # Rounding differences grow over some 300 steps of AdamW.
        assert worst < 1e-6


def refused(what: str) -> str:
    pair = Pair.make("gpt")
    pair.step()
    model, optimizer = pair.spread, pair.spread_optimizer
    units = list(range(96))
    rank = dist.get_rank()
    wrong: dict[str, Any] = {
        "lost": {"blocks.1.mlp": [units[:40], units[41:]]},
        "doubled": {"blocks.1.mlp": [units[:41], units[40:]]},
        "strange": {"blocks.1.mlp": [units[:40], [*units[40:], 96]]},
        "ranks": {"blocks.1.mlp": [units]},
        "block": {"blocks.7.mlp": [units, []]},
        "differs": {"blocks.1.mlp": [units[: 40 + rank], units[40 + rank :]]},
        "optimizer": {"blocks.1.mlp": [units[:40], units[40:]]},
        "state": {"blocks.1.mlp": [units[:40], units[40:]]},
    }
    if what == "optimizer":
        optimizer = torch.optim.SGD(model.get_submodule("token").parameters())
    if what == "state":
        optimizer.state[model.get_parameter("blocks.0.up.weight")]["row_mean"] = torch.zeros(3)
    try:
        move(model, optimizer, wrong[what])
    except TrimtabError as error:
        if what == "state":
            del optimizer.state[model.get_parameter("blocks.0.up.weight")]["row_mean"]
        assert pair.step() < 1e-10, "a refused move must change nothing"
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("lost", "blocks.1.mlp: unit 40 is owned by no rank"),
        ("doubled", "blocks.1.mlp: unit 40 is owned more than once"),
        ("strange", "blocks.1.mlp: no unit 96"),
        ("ranks", "blocks.1.mlp: the assignment is for 1 ranks and there are 2"),
        ("block", "no block 'blocks.7.mlp'; the model has blocks.0.attention"),
        ("differs", "rank 1 has another assignment than rank 0"),
        ("optimizer", "blocks.0.qkv.weight is in none of the optimizers"),
        ("state", "'row_mean' of shape (3,) for blocks.0.up.weight"),
    ],
)
def test_a_wrong_move_is_refused_on_every_rank(ranks: Pool, what: str, expected: str) -> None:
    for message in ranks(2, refused, what):
        assert expected in message


def die_in_a_move(folder: Path) -> None:
    pair = Pair.make("gpt")
    pair.step()
    move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"blocks.0.mlp": [40, 56]}))
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=folder / "last")
    pair.step()
    # Only the exchange of units comes after the ranks' agreement.
    from trimtab.sharding import migration

    exchange = migration._all_to_all

    def exchange_with_a_death(*args: Any) -> Any:
        (folder / "now").touch()
        return exchange(*args)

    migration._all_to_all = exchange_with_a_death  # type: ignore[assignment]
    try:
        move(pair.spread, pair.spread_optimizer, assignment_for(pair.spread, {"blocks.0.mlp": [50, 46]}))
    finally:
        migration._all_to_all = exchange
        Checkpoint(pair.spread, pair.spread_optimizer).state_dict()


def test_a_rank_that_dies_in_a_move_ends_the_job_and_the_checkpoint_is_whole(
    ranks: Pool, tmp_path: Path
) -> None:
    from tests.sharding.models import loss_of, make

    with pytest.raises(RanksError) as error:
        ranks(2, die_in_a_move, tmp_path, timeout=20, faults=[Die(1, str(tmp_path / "now"))])
    assert "move: a rank was lost while units of blocks.0.mlp were in flight" in str(error.value)
    assert "rank 1 of 2 died with exit code -9" in str(error.value)
    alone = make("gpt")
    optimizer = adamw(alone)
    loss_of("gpt", alone, 0).backward()
    optimizer.step()
    loaded = {name: torch.empty_like(value) for name, value in alone.state_dict().items()}
    load({"app": {"model": loaded}}, checkpoint_id=tmp_path / "last", no_dist=True)
    for name, value in alone.state_dict().items():
        assert torch.allclose(loaded[name], value, rtol=0, atol=1e-10), name
