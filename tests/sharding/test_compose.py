"""Tensor parallelism on one axis of a mesh, data parallelism on the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import adamw, difference
from tests.sharding.models import loss_of, make
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.codec import Block
from trimtab.control.compression.ddp import adaptive_of
from trimtab.errors import TrimtabError
from trimtab.sharding import assignment_for, clip_grad_norm_, move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

COUNTS = {"transformer.h.0.mlp": [40, 56], "transformer.h.1.attn": [2, 4]}


def two_by_two(headroom: float, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(make("gpt2"), mesh, headroom=headroom, **options)
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return ddp, adamw(ddp), mesh["dp"].get_local_rank()


def train(shares: list[float]) -> float:
    """Each data-parallel copy has its own batch; a single device sees both."""
    ddp, optimizer, replica = two_by_two(1.0, shares=shares)
    alone = make("gpt2")
    alone_optimizer = adamw(alone)
    worst = 0.0
    for step in range(4):
        optimizer.zero_grad()
        alone_optimizer.zero_grad()
        loss_of("gpt2", ddp, 2 * step + replica).backward()
        sum((loss_of("gpt2", alone, 2 * step + i) for i in range(2)), torch.zeros(())).div(2).backward()
        worst = max(worst, difference(alone, ddp.module, lambda p: p.grad))
        clip_grad_norm_(ddp, 0.5)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        alone_optimizer.step()
        worst = max(worst, difference(alone, ddp.module, lambda p: p.data))
        if step == 1:
            move(ddp, optimizer, assignment_for(ddp, COUNTS))
    return worst


@pytest.mark.parametrize("shares", [[1.0, 1.0], [2.0, 3.0]])
def test_with_ddp_and_a_move_it_trains_as_a_single_device(ranks: Pool, shares: list[float]) -> None:
    assert max(ranks(4, train, shares, allow_groups=True)) < 1e-10


def train_compressed(codec: Block | trimtab.Adaptive) -> list[Any]:
    ddp, optimizer, replica = two_by_two(0.0, shares=[2, 3])
    trimtab.compress(ddp, codec, min_numel=64)
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of("gpt2", ddp, replica)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert step >= 0
    state: dict[str, Any] = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    spread = {tensor.name for _, tensor in sharded_model(ddp, "").tensors()}
    controller = adaptive_of(ddp)
    state["chosen bits"] = None if controller is None else [change.bits for change in controller.history]
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, state)
    chosen = [each.pop("chosen bits") for each in every]
    assert chosen[1:] == chosen[:-1]
    del state["chosen bits"]
    for name in state:
        assert torch.equal(every[0][name], every[2][name]), f"{name}: the copies on the data axis differ"
        if name not in spread:
            assert torch.equal(every[0][name], every[1][name]), f"{name}: the ranks on the tensor axis differ"
    return losses


@pytest.mark.parametrize(
    "codec",
    [Block(bits=8), trimtab.Adaptive(family="bits", start_bits=8, warmup=2, look=2, period=2)],
    ids=["8 bits", "adaptive"],
)
def test_compressed_gradients_keep_the_copies_alike(ranks: Pool, codec: Block | trimtab.Adaptive) -> None:
    """Statistics of sharded layers differ from rank to rank; what is replicated must still be rounded alike."""
    for losses in ranks(4, train_compressed, codec, allow_groups=True):
        assert losses[-1] < losses[0] - 0.1


def new_sizes() -> str:
    ddp, optimizer, _ = two_by_two(0.0)
    try:
        move(ddp, optimizer, assignment_for(ddp, COUNTS))
    except TrimtabError as error:
        return str(error)
    return ""


def test_a_move_that_ddp_cannot_follow_is_refused(ranks: Pool) -> None:
    for message in ranks(4, new_sizes, allow_groups=True):
        assert "transformer.h.0.mlp would have 40 units on rank 0, which has room for 48" in message
