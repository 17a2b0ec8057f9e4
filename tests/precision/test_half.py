"""Attention and embeddings in half types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}


class Attention(nn.Module):
    """Both ways of writing it, and a linear layer that must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)
        self.seen = [q.dtype]
        first = F.scaled_dot_product_attention(q, x, x, attn_mask=torch.zeros(8, 8))
        scores = torch.matmul(q, x.transpose(-1, -2)) / 4
        self.seen += [first.dtype, scores.dtype]
        return first + scores.softmax(-1) @ x + torch.bmm(scores, x)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e8])
def test_attention_is_close_and_its_linear_layer_untouched(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    x = torch.randn(3, 8, 16, requires_grad=True)
    g = torch.randn(3, 8, 16) * scale
    exact = [model(x), *torch.autograd.grad(model(x), [x, *model.parameters()], g)]
    set_precision(model, {"0/attention": name})
    y = model(x)
    outputs = [y, *torch.autograd.grad(y, [x, *model.parameters()], g)]
    for actual, true in zip(outputs, exact, strict=True):
        error = float((actual - true).detach().norm() / true.detach().norm())
        assert error < LARGEST[name]
        assert error > 0 or name == "fp32"
    handed_on = torch.bfloat16 if name == "bf16" else torch.float32
    assert model[0].seen == [torch.float32, handed_on, handed_on]
    assert y.dtype == torch.float32


def test_fp32_attention_withstands_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Attention()))
    q = torch.randn(2, 8, 16)
    expected = F.scaled_dot_product_attention(q, q, q)

    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Sequential(Plain()))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = model(q)
        set_precision(model, {"0.0/attention": "fp32"})
        kept = model(q)
    assert kept.dtype == lowered.dtype == torch.bfloat16
    assert torch.equal(kept, expected.bfloat16())
    assert not torch.equal(lowered, kept)


class Spelled(nn.Module):
    """One product of activations, written in one way, inside a model."""

    def __init__(self, product: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.table, self.product = nn.Parameter(torch.ones(())), product
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x * self.table, x.transpose(-1, -2))
        self.seen = [y]
        return y.abs().float() * self.table


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": lambda x, t: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "matmul": lambda x, t: torch.matmul(input=x, other=t),
    "bmm": lambda x, t: x.bmm(mat2=t),
    "baddbmm": lambda x, t: torch.zeros(1).baddbmm(batch1=x, batch2=t),
    "mm": lambda x, t: x[0].mm(t[0]),
    "einsum": lambda x, t: torch.einsum("bij,bjk->bik", x, t),
    "einsum of a list": lambda x, t: torch.einsum("bij,bjk->bik", [x, t]),
}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_products_are_lowered_however_they_are_written(way: str, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Spelled(WAYS[way]))
    x = torch.randn(3, 8, 16, requires_grad=True)
    exact = [model(x), *torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]
    set_precision(model, {"0/attention": name})
    y = model(x)
    for actual, true in zip(
        [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])], exact, strict=True
    ):
        assert 0 < float((actual - true).detach().norm() / true.detach().norm()) < LARGEST[name]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_products_of_other_types_keep_them(dtype: torch.dtype, name: str) -> None:
    """As of positions: 4999 is no number in bf16."""
    spelled = Spelled(lambda *_: torch.full((5, 1), 4999).to(dtype) @ torch.ones(1, 2).to(dtype))
    model = nn.Sequential(spelled)
    set_precision(model, {"0/attention": name})
    model(torch.randn(2, 3, 4))
    assert torch.equal(spelled.seen[0], torch.full((5, 2), 4999).to(dtype))


def test_products_that_the_model_keeps_from_autocast_are_kept() -> None:
    def product(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.full((5, 1), 4999.0) @ torch.ones(1, 2)

    spelled = Spelled(product)
    model = nn.Sequential(nn.Linear(4, 4), spelled)
    set_precision(model, {"*/attention": "bf16", "0": "bf16"})
    model(torch.randn(2, 3, 4))
    assert torch.equal(spelled.seen[0], torch.full((5, 2), 4999.0))


def test_a_forward_that_was_replaced_is_lowered_and_comes_back() -> None:
    """As those of libraries are that move a module's weights around its forward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()), torch.randn(3, 8, 16)
    own = model[0].forward
    model[0].forward = replaced = lambda x: own(x) * 100
    exact = model(x).detach()
    for name in ("bf16", "fp16"):
        set_precision(model, {"0/attention": name})
        assert 0 < float((model(x).detach() - exact).norm() / exact.norm()) < LARGEST[name]
    set_precision(model, {})
    assert model[0].forward is replaced
    assert torch.equal(model(x), exact)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_embedding_is_rounded_and_its_gradient_is_not(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, padding_idx=3))
    table = next(model.parameters())
    set_precision(model, {"0": name})
    index = torch.tensor([[1, 2], [3, 1]])
    y = model(index)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    assert torch.equal(y, F.embedding(index, table).to(dtype).float())
    g = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, table, g)
    torch.testing.assert_close(gradient[1], g[0, 0] + g[1, 1], rtol=0, atol=1e-7)
    assert not gradient[3].any()


def test_attention_has_one_precision_for_all_passes() -> None:
    mixed = Precision(forward="bf16", grad_input="fp32", grad_weight="fp32")
    with pytest.raises(TrimtabError, match="one precision for all its passes"):
        set_precision(nn.Sequential(Attention()), {"0/attention": mixed})
