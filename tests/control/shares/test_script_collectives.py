"""A script that exchanges tensors of its batch between ranks needs equal batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from tests.control.shares.test_takeover import net, samples, taken_over
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

    from trimtab.control.shares.takeover import Takeover

    Exchange = Callable[[int, torch.Tensor, torch.Tensor], object]


def gathered(tensor: torch.Tensor) -> None:
    dist.all_gather([torch.zeros_like(tensor) for _ in range(2)], tensor)


def train(takeover: Takeover, exchange: Exchange, early: bool = False) -> list[int]:
    data, ddp = samples(160), Ddp(net())
    takeover.watch(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sizes = []
    for step, (inputs, targets) in enumerate(
        DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    ):
        outputs = ddp(inputs)
        loss = F.cross_entropy(outputs, targets)
        if early:
            exchange(step, outputs.detach(), loss.detach())
        loss.backward()
        if not early:
            exchange(step, outputs.detach(), loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(inputs))
    return sizes


def evaluate(ddp: Ddp) -> None:
    ddp.eval()
    with torch.no_grad():
        gathered(ddp(samples(8)[:][0]))
    ddp.train()


def on_rank() -> None:
    own = (11, 5)[dist.get_rank()]
    for name, exchange in {
        "all_gather": lambda step, outputs, loss: gathered(outputs),
        "all_gather, with a gradient": lambda step, outputs, loss: differentiable.all_gather(outputs),
        "all_gather_into_tensor": lambda step, outputs, loss: dist.all_gather_into_tensor(
            torch.zeros(2 * len(outputs), 4, dtype=outputs.dtype), outputs
        ),
        "broadcast": lambda step, outputs, loss: dist.broadcast(outputs, 0),
    }.items():
        with taken_over((11, 5)) as takeover:
            assert set(train(takeover, exchange)) == {8}, name
        (said,) = takeover.texts
        assert f"exchanges tensors of its batch with other ranks ({name.split(',')[0]})" in said
    for exchange in (
        lambda step, outputs, loss: gathered(loss.repeat(8)),  # to log it, as scripts for diffusion models do
        lambda step, outputs, loss: dist.all_gather_object([None, None], outputs.tolist()),
        lambda step, outputs, loss: gathered(outputs.sum(0)),
        lambda step, outputs, loss: dist.all_reduce(loss),
        lambda step, outputs, loss: dist.broadcast(outputs[:2].clone(), 0, dist.group.WORLD),
    ):
        with taken_over((11, 5)) as takeover:
            assert own in train(takeover, exchange)
    for early in (True, False):  # what is summed afterwards is for the log
        with taken_over((11, 5)) as takeover:
            sizes = train(
                takeover, lambda step, outputs, loss: dist.all_reduce(outputs.sum(0).repeat(8)), early
            )
        assert set(sizes) == ({8} if early else {8, own})
        assert any("sums values of its batch" in said for said in takeover.texts) == early
    with taken_over((11, 5)) as takeover:
        assert own in train(takeover, lambda step, outputs, loss: dist.all_reduce(outputs.sum(0)), early=True)
    with (
        taken_over((11, 5)) as takeover,
        pytest.raises(TrimtabError, match=r"11/5 rows .* --batch-sizes equal"),
    ):
        train(takeover, lambda step, outputs, loss: gathered(outputs) if step == 8 else None)


def test_what_a_script_exchanges_by_itself(ranks: Pool) -> None:
    before = dist.all_gather
    ranks(2, on_rank)
    assert dist.all_gather is before
