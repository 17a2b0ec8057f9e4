"""Local steps on a GPU: exchanges beside the training, compared with waiting for everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.gpu.ranks import WaitingRunner, agree, on_slices, summed
from tests.support.requirements import requires
from torch import nn

import trimtab
from trimtab.collectives.groups import private_groups
from trimtab.control.local_steps import local_steps_of
from trimtab.control.rank_values import LaterNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).cuda()


def train(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, int]:
    models = [model(), model()]
    for each in models:
        trimtab.local_steps(each, every=6, fragments=3, bits=spec["bits"])
    waiting = local_steps_of(models[1])
    assert waiting is not None
    assert waiting.worker is not None
    waiting.worker._runner = WaitingRunner()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in models]
    differing, disagreeing = 0, 0
    for step in range(spec["steps"]):
        generator = torch.Generator("cuda").manual_seed(step * 10 + dist.get_rank())
        inputs = torch.randn(64, 512, device="cuda", generator=generator)
        for each, optimizer in zip(models, optimizers, strict=True):
            each(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        differing += sum(not torch.equal(a, b) for a, b in pairs)
        with trimtab.agreed_weights(models[0]):
            disagreeing += not agree(torch.cat([p.detach().flatten() for p in models[0].parameters()]))
    differing, disagreeing = summed(differing, disagreeing)
    return {"differing_weights": differing, "disagreeing_ranks": disagreeing}


def numbers(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[list[list[float]] | None]:
    assert dist.group.WORLD is not None
    groups = private_groups(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()), 1)
    later = LaterNumbers(groups[0])
    rows = [later.exchange([dist.get_rank(), value]) for value in spec["values"]]
    torch.cuda.synchronize()
    return rows


def test_numbers_arrive_at_the_next_call() -> None:
    first, second = [[0.0, 1.0], [1.0, 1.0]], [[0.0, 2.0], [1.0, 2.0]]
    assert on_slices(2, numbers, values=[1.0, 2.0, 3.0]) == [None, first, second]


def test_overlapped_rounds_are_those_of_waiting_for_everything() -> None:
    assert on_slices(2, train, steps=30, bits=4) == {"differing_weights": 0, "disagreeing_ranks": 0}


def test_uncompressed_rounds_agree() -> None:
    assert on_slices(2, train, steps=20, bits=None) == {"differing_weights": 0, "disagreeing_ranks": 0}
