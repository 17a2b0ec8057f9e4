"""Dropout belongs to units: its masks do not depend on who owns them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import adamw, convert, random_assignment
from tests.sharding.models import WIDTH, loss_of, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.sharding import move
from trimtab.sharding.dropout.keyed import KeyedDropout
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool


def train(kind: str, shares: Any, moves: bool) -> list[float]:
    model = convert(make(kind, p=0.3), shares=shares)
    optimizer = adamw(model)
    torch.manual_seed(dist.get_rank())  # torch's own random numbers must not matter
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(kind, model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if moves:
            move(model, optimizer, random_assignment(model, random.Random(step)))
    return losses


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "llama", "vit", "sequential"])
def test_masks_do_not_depend_on_the_assignment(ranks: Pool, kind: str) -> None:
    (alone,) = ranks(1, train, kind, None, False)
    for losses in [*ranks(2, train, kind, [1, 3], False), *ranks(3, train, kind, None, True)]:
        assert losses == pytest.approx(alone, abs=1e-10)


def properties() -> None:
    model = convert(make("sequential", p=0.25), seed=3)
    dropout = next(module for module in model.modules() if isinstance(module, KeyedDropout))
    ones = torch.ones(400, 300, dtype=torch.float64)
    first, second = dropout(ones), dropout(ones)
    assert not torch.equal(first, second), "each forward pass has its own mask"
    assert set(first.unique().tolist()) == {0.0, 4 / 3}
    assert abs(float(first.mean()) - 1) < 0.01
    assert abs(float((first * second).mean()) - 1) < 0.01, "and they are independent"
    sharded = sharded_model(model, "")
    sharded.inside = block = next(iter(sharded.blocks.values()))
    units = dropout(torch.ones(5000, block.count, dtype=torch.float64))
    assert not any(torch.equal(units[:, 0], units[:, i]) for i in range(1, block.count)), "so has each unit"
    sharded.inside = None
    model.eval()
    assert dropout(ones) is ones


def test_masks_are_random_unbiased_and_only_for_training(ranks: Pool) -> None:
    ranks(1, properties)


def repeated(recompute: bool) -> list[torch.Tensor]:
    model = convert(make("sequential", p=0.3))
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for layer in model.get_submodule("layers").children():
        x = x + (checkpoint(layer, x, use_reentrant=False) if recompute else layer(x))
    x.sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_activation_checkpointing_repeats_the_same_masks(ranks: Pool) -> None:
    for with_, without in zip(ranks(2, repeated, True), ranks(2, repeated, False), strict=True):
        assert len(with_) == 6
        assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))


def attention_against_torch() -> float:
    """With dropout the attention is written out: with masks of ones it must be torch's own."""
    from trimtab.sharding.dropout import keyed as module

    model = convert(make("llama", p=0.3))
    reference = float(loss_of("llama", convert(make("llama", p=0.0)), 0).detach())
    plain = module._mask

    def ones(shape: Any, *_: Any) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float64)

    module._mask = ones  # type: ignore[assignment]
    try:
        return abs(float(loss_of("llama", model, 0).detach()) - reference)
    finally:
        module._mask = plain


def test_attention_written_out_is_torchs(ranks: Pool) -> None:
    assert max(ranks(2, attention_against_torch)) < 1e-12


def replicas_differ() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    from trimtab.api.tensor_parallel import tensor_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(make("gpt", p=0.3), mesh)
    loss = float(loss_of("gpt", model, 0).detach())
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, loss)
    return every


def test_data_parallel_copies_have_their_own_masks(ranks: Pool) -> None:
    every = ranks(4, replicas_differ, allow_groups=True)[0]
    assert every[0] == every[1]
    assert every[2] == every[3]
    assert every[0] != every[2]


def test_dropout_where_units_cannot_be_told_apart_is_refused(ranks: Pool) -> None:
    assert "which has no axis for the" in ranks(1, odd_shape)[0]


def odd_shape() -> str:
    from trimtab.errors import TrimtabError

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> Any:
            return self.down(self.dropout(self.up(x).unflatten(-1, (-1, 1))).flatten(-2))

    model = convert(nn.ModuleList([Odd()]))
    try:
        model.get_submodule("0")(torch.ones(3, 4))
    except TrimtabError as error:
        return str(error)
    return ""
