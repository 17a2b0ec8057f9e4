"""Leased units are computed elsewhere, exactly; parameters, clipping and checkpoints know only their owner."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.sharding.jobs import Pair, adamw, difference, random_assignment
from tests.sharding.models import loss_of, make
from tests.support.faults import Delay, Die
from tests.support.pool import RanksError
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.control.tensor.resizing import clear_resize, set_resize
from trimtab.errors import TrimtabError
from trimtab.sharding import Checkpoint, clip_grad_norm_, move
from trimtab.sharding.lease import MESSAGES, _messages, end_leases, lease, leased, loans
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MLP = {"blocks.0.mlp": [80, 16], "blocks.1.mlp": [30, 66]}


def random_counts(model: Any, source: random.Random) -> dict[str, list[int]]:
    """Any counts of some blocks, empty ranks included; the same on every rank."""
    sharded = sharded_model(model, "test")
    chosen = {}
    for name, block in sharded.blocks.items():
        if source.random() < 0.7:
            cuts = sorted(source.randint(0, block.units) for _ in range(sharded.group.size - 1))
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


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5))
def test_loans_turn_what_is_owned_into_what_is_computed(pairs: list[tuple[int, int]]) -> None:
    owned, computed = [a for a, _ in pairs], [b for _, b in pairs]
    computed[-1] += max(0, sum(owned) - sum(computed))
    owned[-1] += max(0, sum(computed) - sum(owned))
    now = list(owned)
    lent: set[tuple[int, int]] = set()
    for loan in loans(owned, computed):
        now[loan.owner] -= loan.count
        now[loan.borrower] += loan.count
        assert loan.owner != loan.borrower
        slots = {(loan.owner, slot) for slot in range(loan.start, loan.start + loan.count)}
        assert not slots & lent, "no unit is lent twice"
        lent |= slots
    assert now == computed


def accumulate_and_clip() -> tuple[float, float]:
    """Two batches for one step, clipped; the norm counts a leased unit once, at its owner's."""
    pair = Pair.make("gpt")
    pair.step()
    lease(pair.spread, MLP)
    for step in (1, 2):
        for model in (pair.alone, pair.spread):
            loss_of("gpt", model, step).backward()
    worst = difference(pair.alone, pair.spread, lambda p: p.grad)
    expected = torch.nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.1)
    norm = clip_grad_norm_(pair.spread, 0.1)
    return max(worst, difference(pair.alone, pair.spread, lambda p: p.grad)), float((norm - expected).abs())


def test_gradients_are_complete_when_backward_ends_and_count_once(ranks: Pool) -> None:
    for worst, apart in ranks(2, accumulate_and_clip):
        assert worst < 1e-10
        assert apart < 1e-10


def evaluate() -> tuple[int, float]:
    pair = Pair.make("gpt")
    pair.step()
    lease(pair.spread, MLP)
    worst = pair.step()
    sent = []
    exchange = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        with torch.no_grad():
            losses = [loss_of("gpt", model, 5) for model in (pair.alone, pair.spread)]
    finally:
        dist.all_to_all_single = exchange
    return len(sent), max(worst, float((losses[0] - losses[1]).abs()), pair.step())


def test_evaluation_uses_no_lease(ranks: Pool) -> None:
    for sent, worst in ranks(2, evaluate):
        assert sent == 0
        assert worst < 1e-10


def traffic() -> list[int]:
    """Values that this rank sends in the all-to-alls of one training step."""
    pair = Pair.make("gpt")
    pair.step()
    lease(pair.spread, {"blocks.0.mlp": [58, 38]})
    sent = []
    exchange = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(args[1].numel())
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        pair.step()
    finally:
        dist.all_to_all_single = exchange
    return sent


def test_only_the_slices_of_leased_units_travel(ranks: Pool) -> None:
    width = 24
    unit = width + 1 + width
    # Gradients to the owner in backward, then the new weights to the borrower after the optimizer's step.
    assert ranks(2, traffic) == [[10 * unit, 0], [0, 10 * unit]]


def messages(passes: int) -> tuple[int, int, float]:
    """All-to-alls of a step with several backward passes and a lease of every block; messages; exactness after it."""
    pair = Pair.make("gpt")
    pair.step()
    blocks = sharded_model(pair.spread, "test").blocks
    lease(pair.spread, {name: [block.units, 0] for name, block in blocks.items()})
    sent = []
    exchange = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        return exchange(*args, **kwargs)

    for model in (pair.alone, pair.spread):
        model.zero_grad()
        dist.all_to_all_single = counted if model is pair.spread else exchange
        for step in range(passes):
            loss_of("gpt", model, step).backward()
    dist.all_to_all_single = counted
    pair.spread_optimizer.step()
    dist.all_to_all_single = exchange
    pair.alone_optimizer.step()
    with torch.no_grad():  # by other means than an optimizer
        for model in (pair.alone, pair.spread):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    leases = sharded_model(pair.spread, "test").leases
    assert leases is not None
    return len(sent), len(leases._messages), pair.step()


def test_weights_travel_once_per_change_in_few_messages(ranks: Pool) -> None:
    blocks, passes = 4, 3
    for sent, count, worst in ranks(2, messages, passes):
        assert count < blocks
        assert sent == passes * blocks + count  # gradients of each pass, weights after the step
        assert worst < 1e-9


def many_blocks() -> list[list[int]]:
    """Sizes of the messages for ten equal blocks and a small one."""
    blocks = [SimpleNamespace(tensors=[SimpleNamespace(parameter=torch.zeros(1))]) for _ in range(11)]
    loan = loans([2, 0], [1, 1])
    leases: Any = [
        SimpleNamespace(index=i, loans=loan, unit_size=10 if i else 1, block=b) for i, b in enumerate(blocks)
    ]
    every: Any = _messages(leases)
    return [[each.index for each in message] for message in every]


def test_messages_keep_the_order_of_blocks() -> None:
    grouped = many_blocks()
    assert len(grouped) == MESSAGES
    assert [each for message in grouped for each in message] == list(range(11))
    assert max(map(len, grouped)) - min(map(len, grouped)) <= 2  # the first blocks' weights are the smallest


def dropped_out() -> list[float]:
    """Masks are keyed by unit: the same with a lease and without."""
    losses = []
    for leases in ({}, MLP):
        spread = tensor_parallel(make("gpt", p=0.3), init_device_mesh("cpu", (2,)), seed=3)
        if leases:
            lease(spread, leases)
        losses.append(float(loss_of("gpt", spread, 0).detach()))
    return losses


def test_dropout_does_not_depend_on_leases(ranks: Pool) -> None:
    for first, second in ranks(2, dropped_out):
        assert first == pytest.approx(second, abs=1e-12)


def repeat_activations(reentrant: bool) -> float:
    pair = Pair.make("gpt")
    for model in (pair.alone, pair.spread):
        for layer in model.get_submodule("blocks").children():
            inner = layer.forward

            def forward(x: Any, inner: Any = inner) -> Any:
                return checkpoint(inner, x, use_reentrant=reentrant)

            layer.forward = forward
    worst = pair.step()
    lease(pair.spread, MLP)
    return max(worst, pair.step(), pair.step())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_with_the_same_weights(ranks: Pool, reentrant: bool) -> None:
    for worst in ranks(2, repeat_activations, reentrant):
        assert worst < 1e-9


def beside_data_parallelism() -> float:
    """DDP averages a gradient as soon as it is there: by then it must be whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = make("gpt")
    spread = copy.deepcopy(alone)
    tensor_parallel(spread, mesh)
    ddp = DistributedDataParallel(spread, process_group=mesh.get_group("dp"))
    lease(ddp, MLP)
    loss_of("gpt", ddp, mesh.get_local_rank("dp")).backward()
    losses = [loss_of("gpt", alone, step) for step in (0, 1)]
    (sum(losses[1:], losses[0]) / 2).backward()
    return difference(alone, spread, lambda p: p.grad)


def test_a_lease_beside_data_parallelism(ranks: Pool) -> None:
    for worst in ranks(4, beside_data_parallelism, allow_groups=True):
        assert worst < 1e-10


def saved(folder: Path) -> None:
    pair = Pair.make("gpt")
    pair.step()
    lease(pair.spread, MLP)
    pair.step()
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=folder)


def test_a_checkpoint_holds_each_unit_once_from_its_owner(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, saved, tmp_path / "last")
    alone = make("gpt")
    optimizer = adamw(alone)
    for step in range(2):
        optimizer.zero_grad()
        loss_of("gpt", alone, step).backward()
        optimizer.step()
    loaded = {name: torch.empty_like(value) for name, value in alone.state_dict().items()}
    load({"app": {"model": loaded}}, checkpoint_id=tmp_path / "last", no_dist=True)
    for name, value in alone.state_dict().items():
        assert torch.allclose(loaded[name], value, rtol=0, atol=1e-9), name


def random_life(sequences: int) -> float:
    """Leases, moves and resizes in any order between steps; every step that leaves nothing out is exact."""
    pair = Pair.make("shallow", headroom=0.2)
    source = random.Random(5)
    worst = 0.0
    for _ in range(sequences):
        act = source.random()
        if act < 0.3:
            lease(pair.spread, random_counts(pair.spread, source))
        elif act < 0.5:
            move(pair.spread, pair.spread_optimizer, random_assignment(pair.spread, source))
        elif act < 0.6:
            end_leases(pair.spread)
        elif act < 0.7:
            # A pass that leaves out part of one rank's units, undone before it would teach anything.
            slow = source.randrange(dist.get_world_size())
            if dist.get_rank() == slow:
                set_resize(pair.spread, 0.5, selection="random")
            loss_of("shallow", pair.spread, 0).backward()
            clear_resize(pair.spread)
            pair.spread_optimizer.zero_grad()
        if source.random() < 0.5:
            worst = max(worst, pair.step())
    total = torch.tensor(sum(block.count for block in sharded_model(pair.spread, "").blocks.values()))
    dist.all_reduce(total)
    assert total == 6 + 96, "a unit was lost or doubled"
    return worst


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.soak)])
def test_many_decisions_in_one_job_under_random_delays(ranks: Pool, count: int) -> None:
    for worst in ranks(3, random_life, count, timeout=110, faults=[Delay(0.0005, seed=3)]):
        assert worst < 1e-6  # rounding differences grow over some 250 steps of AdamW


def refused(what: str) -> str:
    pair = Pair.make("gpt")
    pair.step()
    rank = dist.get_rank()
    wrong: dict[str, Any] = {
        "block": {"blocks.7.mlp": [96, 0]},
        "sum": {"blocks.0.mlp": [96, 1]},
        "ranks": {"blocks.0.mlp": [96]},
        "differs": {"blocks.0.mlp": [80 + rank, 16 - rank]},
    }
    try:
        lease(pair.spread, wrong[what])
    except TrimtabError as error:
        assert pair.step() < 1e-10, "a refused lease must change nothing"
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("block", "no block 'blocks.7.mlp'"),
        ("sum", "does not distribute the 96 units of blocks.0.mlp"),
        ("ranks", "does not distribute the 96 units"),
        ("differs", "rank 1 has other counts than rank 0"),
    ],
)
def test_a_wrong_lease_is_refused_on_every_rank(ranks: Pool, what: str, expected: str) -> None:
    for message in ranks(2, refused, what):
        assert expected in message


def die_while_leasing(folder: Path) -> None:
    pair = Pair.make("gpt")
    pair.step()
    lease(pair.spread, MLP)
    pair.step()
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=folder / "last")
    loss = loss_of("gpt", pair.spread, 2)
    (folder / "now").touch()
    loss.backward()


def test_a_rank_that_dies_while_leasing_ends_the_job(ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RanksError) as error:
        ranks(2, die_while_leasing, tmp_path, timeout=20, faults=[Die(1, str(tmp_path / "now"))])
    assert "rank 1 of 2 died with exit code -9" in str(error.value)
    assert "not done in time" not in str(error.value), "nobody may wait for ever"
    loaded = {name: torch.empty_like(value) for name, value in make("gpt").state_dict().items()}
    load({"app": {"model": loaded}}, checkpoint_id=tmp_path / "last", no_dist=True)
    assert all(value.isfinite().all() for value in loaded.values())
