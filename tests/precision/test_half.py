"""Attention and embeddings in half types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision_names import Precision

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
