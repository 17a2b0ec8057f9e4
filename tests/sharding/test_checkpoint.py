"""A checkpoint knows units and no ranks: it goes on with any assignment, on any number of ranks, or on one device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import Pair, adamw, convert, random_assignment
from tests.sharding.models import loss_of, make
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trimtab.sharding import Checkpoint, move

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train_move_save(kind: str, path: Path, p: float) -> list[float]:
    """Two steps, a move, a checkpoint, two more steps; gives the losses of the last two."""
    model = convert(make(kind, p=p), shares=[1, 2], headroom=0.3)
    optimizer = adamw(model)
    losses = []
    for step in range(4):
        if step == 2:
            move(model, optimizer, random_assignment(model, random.Random(5)))
            save({"app": Checkpoint(model, optimizer)}, checkpoint_id=path)
        losses.append(_step(kind, model, optimizer, step))
    return losses[2:]


def resume(kind: str, path: Path, p: float, shares: Any) -> list[float]:
    model = convert(make(kind, seed=9, p=p), shares=shares)
    optimizer = adamw(model)
    load({"app": Checkpoint(model, optimizer)}, checkpoint_id=path)
    return [_step(kind, model, optimizer, step) for step in (2, 3)]


def _step(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(kind, model, step)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("kind", "p"), [("gpt", 0.0), ("gpt2", 0.0), ("llama", 0.0), ("vit", 0.2), ("gpt2", 0.3)]
)
def test_goes_on_with_other_ranks_and_shares(ranks: Pool, tmp_path: Path, kind: str, p: float) -> None:
    expected = ranks(2, train_move_save, kind, tmp_path / "c", p)[0]
    for world, shares in ((3, [3, 1, 2]), (1, None)):
        for losses in ranks(world, resume, kind, tmp_path / "c", p, shares):
            assert losses == pytest.approx(expected, abs=1e-10), (world, shares)


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "llama"])
def test_plain_torch_reads_it_on_one_device(ranks: Pool, tmp_path: Path, kind: str) -> None:
    expected = ranks(2, train_move_save, kind, tmp_path / "c", 0.0)[0]
    model = make(kind, seed=9)
    optimizer = adamw(model)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    load({"app": state}, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [_step(kind, model, optimizer, step) for step in (2, 3)] == pytest.approx(expected, abs=1e-10)


def test_a_checkpoint_of_one_device_is_read(ranks: Pool, tmp_path: Path) -> None:
    model = make("gpt2")
    optimizer = adamw(model)
    for step in (0, 1):
        _step("gpt2", model, optimizer, step)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save({"app": state}, checkpoint_id=tmp_path / "c", no_dist=True)
    expected = [_step("gpt2", model, optimizer, step) for step in (2, 3)]
    assert ranks(2, resume, "gpt2", tmp_path / "c", 0.0, [1, 3])[0] == pytest.approx(expected, abs=1e-10)


def save_and_go_on(path: Path) -> float:
    pair = Pair.make("gpt")
    pair.step()
    save({"app": Checkpoint(pair.spread, pair.spread_optimizer)}, checkpoint_id=path)
    dist.barrier()
    return pair.step()


def test_saving_changes_nothing(ranks: Pool, tmp_path: Path) -> None:
    assert max(ranks(2, save_and_go_on, tmp_path / "c")) < 1e-10
