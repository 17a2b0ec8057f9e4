"""DDP in two levels: the same gradients on every rank, near the exact ones, through a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab._compat import all_gather_single
from trimtab.codec import Block, Codec, Uncompressed
from trimtab.collectives import Hierarchy, Hosts
from trimtab.doors.ddp import DdpCompression

if TYPE_CHECKING:
    from tests.support.pool import Pool

CPU = torch.device("cpu")


def make(
    codec: Codec | None, hierarchy: Hierarchy | None, feedback: bool | None = None
) -> tuple[DistributedDataParallel, DdpCompression | None]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(6)]
    # With unused parameters looked for, DDP does not rebuild its buckets.
    ddp = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=0.08, find_unused_parameters=bool(feedback)
    )
    if codec is None:
        return ddp, None
    compression = DdpCompression(ddp, codec, hierarchy=hierarchy, error_feedback=feedback)
    ddp.register_comm_hook(None, compression.reduce)
    return ddp, compression


def train(ddp: DistributedDataParallel, steps: range) -> torch.Tensor:
    """The gradients of the last step, after training with all of them."""
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        ddp(torch.randn(8, 96, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def agree(flat: torch.Tensor) -> bool:
    assert dist.group.WORLD is not None
    everyone = torch.empty(dist.get_world_size() * flat.numel())
    all_gather_single(everyone, flat, dist.group.WORLD)
    return bool((everyone.view(-1, flat.numel()) == flat).all())


def levels(shared: bool = True) -> Hierarchy:
    assert dist.group.WORLD is not None
    return Hierarchy(dist.group.WORLD, CPU, hosts=Hosts(ranks=((0, 1), (2, 3))), shared_memory=shared)


def trained(codec: Codec, shared: bool) -> tuple[bool, float]:
    """Whether ranks agree over rebuilt buckets, and how far from plain DDP's first gradients."""
    hierarchy = levels(shared)
    exact = train(make(None, None)[0], range(1))
    ddp, compression = make(codec, hierarchy)
    first = train(ddp, range(1)).clone()
    same = agree(first) and agree(train(ddp, range(1, 4)))
    assert compression is not None
    compression.close()
    dist.barrier()
    hierarchy.close()
    return same, float((first - exact).norm() / exact.norm())


@pytest.mark.parametrize(("codec", "within"), [(Block(bits=8), 0.02), (Uncompressed(), 1e-6)])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_agree_and_are_near(ranks: Pool, codec: Codec, within: float, shared: bool) -> None:
    for same, error in ranks(4, trained, codec, shared, allow_groups=True):
        assert same
        assert error < within


def interrupted(feedback: bool) -> bool:
    hierarchy = levels()
    codec = Block(bits=2)
    whole, first = make(codec, hierarchy, feedback), make(codec, hierarchy, feedback)
    expected = train(whole[0], range(6))
    train(first[0], range(3))
    second = make(codec, hierarchy, feedback)
    assert first[1] is not None
    assert second[1] is not None
    second[0].module.load_state_dict(first[0].module.state_dict())
    second[1].load_state_dict(first[1].state_dict())
    same = torch.equal(train(second[0], range(3, 6)), expected)
    for _, compression in (whole, first, second):
        assert compression is not None
        compression.close()
    dist.barrier()
    hierarchy.close()
    return same


@pytest.mark.parametrize("feedback", [False, True])
def test_a_resumed_run_continues_with_the_same_bits(ranks: Pool, feedback: bool) -> None:
    """Over rebuilt buckets too, but for error feedback: who holds what is owed depends on the cuts."""
    assert ranks(4, interrupted, feedback, allow_groups=True) == [True] * 4
