"""Local steps on a GPU: exchanges beside the training, compared with waiting for everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.ranks import WaitingRunner, agree, on_slices, summed
from tests.support.requirements import requires
from torch import nn

import trimtab
from trimtab.collectives import runner_for
from trimtab.collectives.groups import private_groups
from trimtab.control.rank_values import LaterNumbers
from trimtab.control.running_local_steps import local_steps_of
from trimtab.local.agreement import AgreedFragment
from trimtab.local.device import streams_for
from trimtab.local.fragments import Part
from trimtab.local.workers import HOST, Workers
from trimtab.planning.local_steps import local_settings

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


def exchange(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, float]:
    """One exchange of the same change on both devices; on the GPU also from a checkpoint made while it is under way."""
    assert dist.group.WORLD is not None
    cuda = torch.device("cuda", torch.cuda.current_device())
    workers, runner = Workers(dist.group.WORLD, cuda), runner_for(HOST)
    settings = local_settings(8, spec["bits"], workers.count, 1)
    start = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    change = 0.01 * torch.randn(300, 64, generator=torch.Generator().manual_seed(1 + dist.get_rank()))

    def fragment_on(device: torch.device) -> tuple[AgreedFragment, nn.Parameter]:
        p = nn.Parameter(start.to(device, copy=True))
        stream = streams_for(device, 1)[0]
        return AgreedFragment({Part("weight"): p}, workers, settings, seed=0, stream=stream), p

    taken = []
    for device in (HOST, cuda):
        fragment, p = fragment_on(device)
        p.data.add_(change.to(device))
        fragment.send(runner, 0, 4)
        state = fragment.state_dict()
        p.data.add_(1.0)
        resumed, its = fragment_on(device)
        its.data.copy_(p.data)
        agreed, momentum = ({"weight": state[key][Part("weight")]} for key in ("agreed", "momentum"))
        resumed.load_state_dict(agreed, momentum)
        resumed.load_own(state["own"])
        for each, values in ((fragment, p), (resumed, its)):
            each.take()
            taken.append(torch.cat([each.agreed, values.detach().cpu().flatten(), each.momentum]))
    workers.close()
    runner.close()
    return {
        "devices": float((taken[0] - taken[2]).abs().max()),
        "resumed": float((taken[2] - taken[3]).abs().max()),
        "moved": float((taken[2][: start.numel()] - start.flatten()).abs().max()),
    }


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


@pytest.mark.parametrize("bits", [4, None])
def test_an_exchange_is_that_of_the_cpu(bits: int | None) -> None:
    found = on_slices(2, exchange, bits=bits)
    assert found["devices"] < 1e-6, "they may round the outer step differently"
    assert found["resumed"] == 0.0
    assert found["moved"] > 1e-3


def test_overlapped_rounds_are_those_of_waiting_for_everything() -> None:
    assert on_slices(2, train, steps=30, bits=4) == {"differing_weights": 0, "disagreeing_ranks": 0}


def test_uncompressed_rounds_agree() -> None:
    assert on_slices(2, train, steps=20, bits=None) == {"differing_weights": 0, "disagreeing_ranks": 0}
