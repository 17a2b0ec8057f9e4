"""Corners of DDP in which a compressed job must train as a plain one does, or say why it cannot."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim.swa_utils import AveragedModel

import trimtab
from trimtab.codec import Block, Codec, PowerSGD, TopK

if TYPE_CHECKING:
    from tests.support.pool import Pool


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(64, 64, bias=False)
        self.sometimes = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) if use else y


def owed_after(codec: Codec, feedback: bool | None, every: int, used_by: tuple[int, ...]) -> float:
    """What error feedback still owes a layer after 40 uses, over one true gradient; its gradient is constant."""
    ddp = Ddp(TwoBranches(), find_unused_parameters=True)
    trimtab.compress(ddp, codec, error_feedback=feedback)
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    applied, true = torch.zeros(64, 64), torch.zeros(64, 64)
    for step in range(40 * every):
        anyone = step % every == 0
        use = anyone and dist.get_rank() in used_by
        ddp.zero_grad(set_to_none=True)
        (ddp(torch.eye(64), use) * target.t()).sum().backward()
        if anyone:
            assert ddp.module.sometimes.weight.grad is not None
            applied += ddp.module.sometimes.weight.grad
            true += target * len(used_by) / dist.get_world_size()
    return float((applied - true).norm() / target.norm())


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [(Block(2, 128, False), True), (TopK(0.05), None), (PowerSGD(1), None)],
    ids=["block", "topk", "powersgd"],
)
def test_what_is_owed_to_an_unused_layer_is_not_lost(
    ranks: Pool, codec: Codec, feedback: bool | None
) -> None:
    """DDP discards what is sent for a layer that no rank used; a quarter of the steps must owe no more than all."""
    always = ranks(2, owed_after, codec, feedback, 1, (0, 1), allow_groups=True)[0]
    rarely = ranks(2, owed_after, codec, feedback, 4, (0, 1), allow_groups=True)[0]
    assert rarely <= 1.5 * always


def test_a_layer_that_one_rank_uses(ranks: Pool) -> None:
    codec = Block(2, 128, False)
    both = ranks(2, owed_after, codec, True, 1, (0, 1), allow_groups=True)[0]
    one = ranks(2, owed_after, codec, True, 4, (1,), allow_groups=True)[0]
    assert one <= 1.5 * both


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64, sparse=True)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.table(x)).square().mean()
        return y


def sparse_gradients(compress: bool) -> torch.Tensor:
    torch.manual_seed(0)
    ddp = Ddp(Sparse())
    if compress:
        trimtab.compress(ddp, Block(bits=8))
    for step in range(3):  # the buckets of the first step are not those of later ones
        ddp.zero_grad()
        ddp(torch.arange(8) + step + dist.get_rank()).backward()
    gradient = ddp.module.table.weight.grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient.is_sparse
    return gradient.to_dense()


def test_sparse_gradients_are_reduced_as_by_plain_ddp(ranks: Pool) -> None:
    plain = ranks(2, sparse_gradients, False)
    for gradient in ranks(2, sparse_gradients, True, allow_groups=True):
        torch.testing.assert_close(gradient, plain[0], rtol=1e-5, atol=1e-8)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(64, 64)
        self.imaginary = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.real(x).to(torch.complex64) @ self.imaginary
        return y.abs().square().mean()


def complex_gradients(codec: Codec | None) -> torch.Tensor:
    torch.manual_seed(0)
    ddp = Ddp(Complex())
    if codec is not None:
        trimtab.compress(ddp, codec)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        ddp.zero_grad()
        ddp(inputs).backward()
    gradient = ddp.module.imaginary.grad
    assert isinstance(gradient, torch.Tensor)
    return torch.view_as_real(gradient)


@pytest.mark.parametrize("codec", [Block(bits=8), PowerSGD(64)], ids=["block", "powersgd"])
def test_complex_parameters_are_reduced_as_a_whole(ranks: Pool, codec: Codec) -> None:
    """DDP's buckets hold them as twice as many real values."""
    plain = ranks(2, complex_gradients, None)[0]
    first, second = ranks(2, complex_gradients, codec, allow_groups=True)
    assert torch.equal(first, second)
    assert (first - plain).norm() < 0.05 * plain.norm()


def frozen_between() -> bool:
    ddp = Ddp(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), find_unused_parameters=True)
    ddp.module[0].weight.requires_grad_(False)
    trimtab.compress(ddp, Block(bits=8))
    ddp(torch.ones(1, 64)).sum().backward()
    return ddp.module[0].weight.grad is None and ddp.module[1].weight.grad is not None


def test_a_parameter_frozen_between_ddp_and_compress(ranks: Pool) -> None:
    assert all(ranks(2, frozen_between, allow_groups=True))


def join_by_those_left() -> str:
    ddp = trimtab.compress(Ddp(nn.Linear(64, 64, bias=False)), Block(bits=8))
    try:
        with ddp.join(divide_by_initial_world_size=False):
            ddp(torch.ones(1, 64)).sum().backward()
    except trimtab.TrimtabError as error:
        return str(error)
    return ""


def test_join_that_divides_by_the_ranks_left_is_refused_on_all(ranks: Pool) -> None:
    assert all(
        "divide_by_initial_world_size" in text for text in ranks(2, join_by_those_left, allow_groups=True)
    )


def copies(codec: Codec | trimtab.Adaptive) -> dict[str, bool]:
    ddp: Any = trimtab.compress(Ddp(nn.Linear(64, 64)), codec)
    for _ in range(2):
        ddp(torch.ones(2, 64)).sum().backward()
    twin = copy.deepcopy(ddp)
    average = AveragedModel(ddp)
    saved = io.BytesIO()
    torch.save(ddp, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    outcome = {}
    others: dict[str, Any] = {"twin": twin, "average": average.module, "loaded": loaded}
    for name, other in others.items():
        outcome[name] = torch.equal(other.module.weight, ddp.module.weight)
    outcome["twin is plain"] = trimtab.explain(twin).startswith("trimtab was not")
    trimtab.compress(twin, Block(bits=4))  # a copy may be compressed in its own right
    twin(torch.ones(2, 64)).sum().backward()
    ddp(torch.ones(2, 64)).sum().backward()
    return outcome


@pytest.mark.parametrize("codec", [Block(bits=8), trimtab.Adaptive()], ids=["fixed", "adaptive"])
def test_copies_and_saved_modules(ranks: Pool, codec: Codec | trimtab.Adaptive) -> None:
    for outcome in ranks(2, copies, codec, allow_groups=True):
        assert all(outcome.values()), outcome
