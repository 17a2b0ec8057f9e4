"""Resizing over windows of steps: fresh statistics, everything returns, the choice follows the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import adamw, convert
from tests.sharding.models import loss_of, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.control.tensor.resizing import clear_resize, resized, set_resize, watch_resize
from trimtab.errors import TrimtabError
from trimtab.sharding import move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool


def left_units(model: nn.Module) -> dict[str, list[int]]:
    """The units left out now, by block."""
    return {
        name: [block.owned[slot] for slot in block.cut.units.left.tolist()]
        for name, block in sharded_model(model, "test").blocks.items()
        if block.cut is not None and block.cut.units is not None
    }


def push(model: nn.Module, optimizer: torch.optim.Optimizer, units: list[int], much: float) -> None:
    """A window of two steps that change these units of every block far more than the others."""
    for _ in range(2):
        for block, tensor in sharded_model(model, "test").tensors():
            rows = torch.full((block.count, 1), 1.0, dtype=torch.float64)
            rows[[block.owned.index(unit) for unit in units if unit in block.owned]] = much
            like = tensor.by_unit(torch.zeros_like(tensor.parameter.data))
            like[: block.count] += rows
            tensor.parameter.grad = like.view_as(tensor.parameter)
        optimizer.step()


def not_stale() -> None:
    """On a rank that leaves nothing out, what counts is the last window and not the first."""
    model = convert(make("sequential"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch_resize(model, window=2)
    everyone = sharded_model(model, "test").blocks["layers.0"].owned
    half = len(everyone) // 2
    push(model, optimizer, everyone[:half], 9.0)
    push(model, optimizer, everyone[half:], 9.0)
    set_resize(model, half / len(everyone))
    for units in left_units(model).values():
        assert units == everyone[:half], "these moved least of late"


def test_statistics_are_fresh_where_nothing_is_left_out(ranks: Pool) -> None:
    ranks(1, not_stale)
    ranks(2, not_stale)


def follows_change() -> None:
    """Priority leaves out what moved least when it was last in, and forgets nothing of what is frozen meanwhile."""
    model = convert(make("sequential"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch_resize(model, window=2, returns=100)
    push(model, optimizer, list(range(7)), 9.0)
    set_resize(model, 6 / 13)
    least = left_units(model)
    assert set(least["layers.0"]) == set(range(7, 13))
    back = []
    for _ in range(4):
        push(model, optimizer, list(range(7)), 9.0)
        back.append(set(range(7, 13)) - set(left_units(model)["layers.0"]))
    assert all(len(each) == 1 for each in back), "one returns at a time"
    assert len(set.union(*back)) == 4, "and each time another"


def test_priority_follows_change(ranks: Pool) -> None:
    ranks(1, follows_change)


def waits(selection: Any, form: Any, returns: int) -> int:
    """The most windows in a row that anything was left out."""
    model = convert(make("gpt"))
    optimizer = adamw(model)
    watch_resize(model, window=1, returns=returns)
    if dist.get_rank() == 0:
        set_resize(model, 0.5, selection=selection, form=form)
    waited: dict[tuple[str, str, int], int] = {}
    most = 0
    for step in range(3 * returns + 2):
        optimizer.zero_grad()
        loss_of("gpt", model, step).backward()
        now = {
            (name, axis, index): waited.get((name, axis, index), 0) + 1
            for name, block in sharded_model(model, "test").blocks.items()
            for axis in ("units", "ins", "outs")
            if block.cut is not None and getattr(block.cut, axis) is not None
            for index in getattr(block.cut, axis).left.tolist()
        }
        waited, most = now, max(most, *now.values(), 0) if now else most
        optimizer.step()
    return most


@pytest.mark.parametrize(
    ("selection", "form"),
    [("priority", "unit"), ("priority-per-layer", "unit"), ("activation", "column"), ("random", "unit")],
)
def test_everything_returns(ranks: Pool, selection: str, form: str) -> None:
    slow, fast = ranks(2, waits, selection, form, 4)
    # With pooled scores the numbers of a layer change from window to window, and with them the pace.
    assert 1 <= slow <= (8 if selection == "priority-per-layer" else 4)
    assert fast == 0


def by_activation(form: Any) -> None:
    """What gives nearly nothing is left out, once a window has been seen."""
    model = convert(make("gpt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch_resize(model, window=1, returns=1000)
    quiet = list(range(0, 96, 2))
    with torch.no_grad():
        model.get_parameter("blocks.0.down.weight")[quiet] *= 1e-6
    set_resize(model, 0.5, selection="activation", form=form)
    for step in range(60):  # the first choice is at random; one of those returns in each window
        loss_of("gpt", model, step).backward()
        optimizer.step()
    cut = sharded_model(model, "test").blocks["blocks.0.mlp"].cut
    assert cut is not None
    slices = cut.units if form == "unit" else cut.outs
    assert slices is not None
    assert len(set(slices.left.tolist()) - set(quiet)) <= 1, "but for the one whose turn it is"


@pytest.mark.parametrize("form", ["unit", "column"])
def test_activations_bound_what_is_lost(ranks: Pool, form: str) -> None:
    ranks(1, by_activation, form)


def verbs() -> None:
    model = convert(make("gpt"))
    assert resized(model) == 0
    clear_resize(model)
    for wrong, said in (
        ({"ratio": 1.0}, "from 0 to below 1"),
        ({"ratio": 0.5, "selection": "best"}, "choose random, priority"),
        ({"ratio": 0.5, "form": "row"}, "choose unit, column"),
        ({"ratio": 0.5, "impute": "median"}, "choose zero, average, same"),
    ):
        with pytest.raises(TrimtabError, match=said):
            set_resize(model, **wrong)
    with pytest.raises(TrimtabError, match="at least 1"):
        watch_resize(model, window=0)
    with pytest.raises(TrimtabError, match="convert it first"):
        set_resize(nn.Linear(2, 2), 0.5)
    set_resize(sharded_model(model, "test"), 0.5, seed=1)
    assert resized(model) == pytest.approx(0.5)
    chosen = left_units(model)
    set_resize(model, 0.5, seed=1)
    assert left_units(model) == chosen, "the same setting again changes nothing"
    set_resize(model, 0.25, form="column")
    assert resized(model) == pytest.approx(0.25)
    set_resize(model, 0.0)
    assert resized(model) == 0
    clear_resize(model)
    assert all(block.cut is None for block in sharded_model(model, "test").blocks.values())
    set_resize(model, 0.5, seed=2)
    first = left_units(model)
    clear_resize(model)
    set_resize(model, 0.5, seed=2)
    assert sum(len(units) for units in left_units(model).values()) == sum(map(len, first.values()))
    waited = {
        int(known.waited.max())
        for listener in sharded_model(model, "test").listeners
        for (_, axis), known in listener._known.items()  # type: ignore[attr-defined]
        if axis == "units"
    }
    assert waited == {1}, "what was in again has not been away"


def test_verbs(ranks: Pool) -> None:
    ranks(1, verbs)


def keeps_what_is_known() -> None:
    """After a move, units that were here are judged by what was known of them, under their own number."""
    model = convert(make("sequential"), headroom=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch_resize(model, window=2)
    push(model, optimizer, [0, 2, 4, 6, 8, 10, 12], 9.0)
    lists = [[4, 2, 1, 5, 3], [0, 6, 7, 8, 9, 10, 11, 12]]
    move(model, optimizer, {"layers.0": lists})
    block = sharded_model(model, "test").blocks["layers.0"]
    set_resize(model, 3 / block.count)
    known_before = {0: range(7), 1: range(7, 13)}[dist.get_rank()]
    little = [unit for unit in block.owned if unit % 2 and unit in known_before]
    left = left_units(model)["layers.0"]
    assert len(left) == 3
    assert set(left) <= set(little) or set(little) <= set(left), (left, little)


def test_what_is_known_belongs_to_units_and_not_to_slots(ranks: Pool) -> None:
    ranks(2, keeps_what_is_known)


def copies_agree() -> float:
    """Both data-parallel copies of one rank leave out alike, and see different data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(make("gpt"), mesh)
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = adamw(ddp)
    watch_resize(ddp, window=2)
    if mesh["tp"].get_local_rank() == 1:
        set_resize(ddp, 0.5)
    worst = 0.0
    for step in range(5):
        optimizer.zero_grad()
        loss_of("gpt", ddp, 2 * step + mesh["dp"].get_local_rank()).backward()
        optimizer.step()
        for parameter in model.parameters():
            both = [torch.empty_like(parameter.data) for _ in range(2)]
            dist.all_gather(both, parameter.data, group=mesh["dp"].get_group())
            worst = max(worst, float((both[0] - both[1]).abs().max()))
    return worst


def test_data_parallel_copies_stay_the_same(ranks: Pool) -> None:
    assert max(ranks(4, copies_agree, allow_groups=True, timeout=120)) == 0
