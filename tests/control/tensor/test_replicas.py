"""Replicas that divide their units differently: tensor parallel inside a group, data parallel between groups."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.control.tensor.test_balancer import LINKS, Scripted
from tests.sharding.jobs import adamw, difference
from tests.sharding.models import loss_of, make
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.codec import Block, PowerSGD
from trimtab.control.tensor.balancer import balancer_of, decisions
from trimtab.errors import TrimtabError
from trimtab.planning.tensor.balance import Balance
from trimtab.sharding import Checkpoint, assignment, assignment_for, clip_grad_norm_, move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


def shares_of(replica: int, size: int) -> list[float]:
    """The second replica's are the reverse of the first's."""
    return [float(1 + place) for place in range(size)][:: -1 if replica else 1]


def wrapped(
    model: torch.nn.Module, size: int, **options: Any
) -> tuple[DistributedDataParallel, DeviceMesh, int]:
    mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    tensor_parallel(model, mesh, **{"shares": shares_of(replica, size), **options})
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), mesh, replica


def train(kind: str, size: int, folder: Path, vocabulary: bool) -> float:
    """Loss, gradients and parameters of 5 steps, one of them accumulated; then a checkpoint in another division.

    The ranks start with different values; those of the first rank are used.
    """
    alone = make(kind)
    ddp, mesh, replica = wrapped(make(kind, seed=dist.get_rank()), size, vocabulary=vocabulary)
    optimizers = [adamw(alone), adamw(ddp)]
    worst = 0.0
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2 if step == 3 else 1):
            seeds = [10 * step + 2 * micro + each for each in (0, 1)]
            losses = [loss_of(kind, alone, seed) for seed in seeds]
            sum(losses, torch.zeros(())).div(2).backward()
            with ddp.no_sync() if (step, micro) == (3, 0) else nullcontext():
                own = loss_of(kind, ddp, seeds[replica])
                own.backward()
            worst = max(worst, float((own - losses[replica]).detach().abs()))
        worst = max(worst, difference(alone, ddp.module, lambda p: p.grad))
        clip_grad_norm_(ddp, 0.5)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, difference(alone, ddp.module, lambda p: p.data))
        if step == 1:  # each replica moves to another division; only the first one the second time
            move(ddp, optimizers[1], reversed_owners(ddp))
        elif step == 2:
            move(ddp, optimizers[1], reversed_owners(ddp) if replica == 0 else {})
    save({"app": Checkpoint(ddp, optimizers[1])}, checkpoint_id=folder)
    again, _, _ = wrapped(
        make(kind, seed=5), size, shares=shares_of(1 - replica, size), vocabulary=vocabulary
    )
    loaded = adamw(again)
    load({"app": Checkpoint(again, loaded)}, checkpoint_id=folder)
    assert mesh.size() == 2 * size
    return max(worst, difference(alone, again.module, lambda p: p.data))


def reversed_owners(ddp: DistributedDataParallel) -> dict[str, list[list[int]]]:
    return {name: [owned[::-1] for owned in lists[::-1]] for name, lists in assignment(ddp).items()}


def test_replicas_with_other_shares_train_as_a_single_device(ranks: Pool, tmp_path: Path) -> None:
    assert max(ranks(4, train, "gpt", 2, tmp_path / "saved", True, allow_groups=True, timeout=110)) < 1e-10


def train_beside_an_idle_rank(bits: int | None) -> float:
    """The worst difference of gradients where one rank of one replica has no unit."""
    alone = make("gpt2") if bits is None else make("gpt2").float()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    model = tensor_parallel(copy.deepcopy(alone), mesh, shares=[[1.0, 0.0], [0.5, 0.5]][replica])
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    assert (min(len(owned) for lists in assignment(ddp).values() for owned in lists) == 0) == (replica == 0)
    if bits is not None:
        trimtab.compress(ddp, Block(bits=bits), min_numel=64)
    loss_of("gpt2", ddp, replica).backward()
    sum((loss_of("gpt2", alone, each) for each in (0, 1)), torch.zeros(())).div(2).backward()
    return difference(alone, ddp.module, lambda p: p.grad)


@pytest.mark.parametrize(("bits", "most"), [(None, 1e-10), (8, 1e-2)])
def test_a_rank_without_units_averages_nothing(ranks: Pool, bits: int | None, most: float) -> None:
    assert max(ranks(4, train_beside_an_idle_rank, bits, allow_groups=True)) < most


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_two_groups_of_three(ranks: Pool, tmp_path: Path, kind: str) -> None:
    assert max(ranks(6, train, kind, 3, tmp_path / "saved", False, allow_groups=True, timeout=300)) < 1e-10


def train_compressed(bits: int) -> tuple[list[float], float]:
    """The losses, and the error of the first step's gradients relative to their norm."""
    alone = make("gpt2").float()
    ddp, mesh, replica = wrapped(copy.deepcopy(alone), 2)
    trimtab.compress(ddp, Block(bits=bits), min_numel=64)
    optimizer = adamw(ddp)
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of("gpt2", ddp, replica)
        loss.backward()
        if step == 0:
            sum((loss_of("gpt2", alone, each) for each in (0, 1)), torch.zeros(())).div(2).backward()
            scale = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
            error = difference(alone, ddp.module, lambda p: p.grad) / scale
        optimizer.step()
        losses.append(float(loss.detach()))
        if step == 3:
            move(ddp, optimizer, reversed_owners(ddp) if replica == 0 else {})
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, rows_by_unit(ddp))
    first, second = every[0] | every[1], every[2] | every[3]
    assert first.keys() == second.keys()
    for key, row in first.items():
        assert torch.allclose(row, second[key], rtol=1e-5, atol=1e-7), f"{key}: the replicas differ"
    assert "in 8 bits" in trimtab.explain(ddp) or bits != 8
    assert mesh.size() == 4
    return losses, error


def rows_by_unit(ddp: DistributedDataParallel) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (tensor.name, unit): tensor.by_unit(tensor.parameter.data)[slot].clone()
        for block, tensor in sharded_model(ddp, "test").tensors()
        for slot, unit in enumerate(block.owned)
    }


def test_compressed_units_keep_the_replicas_alike(ranks: Pool) -> None:
    for losses, error in ranks(4, train_compressed, 8, allow_groups=True, timeout=110):
        assert losses[-1] < losses[0] - 0.1
        assert 1e-5 < error < 0.05, "8 bits round the gradients, and not much"


def follow() -> dict[str, Any]:
    """The second rank of the first group is four times slower; the second group is even."""
    alone = make("shallow")
    spread = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    tensor_parallel(spread, mesh, balance="auto")
    balancer = balancer_of(spread)
    balancer._clock = Scripted(spread, lambda _, rank: 4.0 if (replica, rank) == (0, 1) else 1.0)
    balancer.transfer = LINKS["fast"]
    ddp = DistributedDataParallel(spread, process_group=mesh.get_group("dp"))
    optimizers = [adamw(alone), adamw(ddp)]
    worst = 0.0
    for step in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum((loss_of("shallow", alone, 2 * step + each) for each in (0, 1)), torch.zeros(())).div(
            2
        ).backward()
        loss_of("shallow", ddp, 2 * step + replica).backward()
        worst = max(worst, difference(alone, spread, lambda p: p.grad))
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, difference(alone, spread, lambda p: p.data))
    return {
        "worst": worst,
        "counts": {name: list(map(len, lists)) for name, lists in assignment(ddp).items()},
        "modes": [record.decision.mode for record in decisions(ddp)],
    }


def test_a_straggler_in_one_group_moves_units_there_and_nowhere_else(ranks: Pool) -> None:
    results = ranks(4, follow, allow_groups=True, timeout=110)
    assert all(each["worst"] < 1e-8 for each in results), "balancing must not change the training"
    assert results[0]["modes"] == results[1]["modes"] == ["own"]
    assert results[2]["modes"] == results[3]["modes"] == []
    assert results[0]["counts"]["blocks.0.mlp"][1] < 40
    assert results[2]["counts"]["blocks.0.mlp"] == [48, 48]


def mistakes() -> list[str]:
    messages = []

    def caught(function: Any) -> None:
        try:
            function()
        except TrimtabError as error:
            messages.append(str(error))

    ddp, mesh, replica = wrapped(make("gpt"), 2)
    caught(lambda: loss_of("gpt", ddp.module, 0))
    caught(lambda: trimtab.compress(ddp, PowerSGD(rank=1)))
    caught(lambda: tensor_parallel(make("gpt"), mesh, balance=Balance(resize=0.5)))
    caught(lambda: move(ddp, None, assignment_for(ddp, {"blocks.0.mlp": [1, 2]})))
    assert replica in (0, 1)
    return messages


def test_mistakes_are_named(ranks: Pool) -> None:
    for messages in ranks(4, mistakes, allow_groups=True):
        expected = ["only DDP averages them", "needs whole parameters", "drift apart", "does not distribute"]
        assert [part in message for part, message in zip(expected, messages, strict=True)] == [True] * 4
