"""What is call of a model's operators is what autograd computes, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.measure.damage.recorder import Recorder


class Twice(nn.Module):
    """A layer called twice, an activation in place, a weight used by two operators, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.mix = Attention()
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.tokens(ids))
        x = F.silu(self.shared(x), inplace=True)
        x = self.shared(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unsqueeze(1)
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
        return F.scaled_dot_product_attention(y, y, value=y, attn_mask=mask).squeeze(1)


def ids() -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_every_call_is_seen_with_its_own_gradients() -> None:
    torch.manual_seed(0)
    model = Twice()
    plain = torch.autograd.grad(model(ids()), list(model.shared.parameters()))
    with Recorder(model) as recorder:
        model(ids()).backward()
    assert [call.name for call in recorder.calls] == ["tokens", "mix/attention", "shared", "shared", "head"]
    first, second = recorder.calls[2:4]
    weight = torch.zeros_like(plain[0])
    for call in (first, second):
        assert call.result_grad is not None
        assert call.operand_grads[0] is not None
        torch.testing.assert_close(call.operand_grads[0], call.result_grad @ model.shared.weight)
        # As it was before the activation changed it in place.
        torch.testing.assert_close(call.result, F.linear(call.operands[0], call.weight, call.bias))  # type: ignore[arg-type]
        weight += call.result_grad.flatten(0, 1).t() @ call.operands[0].flatten(0, 1)
    torch.testing.assert_close(weight, plain[0])
    assert model.shared.weight.grad is not None
    torch.testing.assert_close(model.shared.weight.grad, plain[0])
    attention = recorder.calls[1]
    assert len(attention.operands) == 3  # the mask is none
    # One tensor three times: the gradients of the three uses are told apart, and add up.
    total = sum(g for g in attention.operand_grads if g is not None)
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(total.squeeze(1), recorder.calls[0].result_grad)
    assert hooks(model) == 0


def test_products_are_seen_however_they_are_written() -> None:
    class Spelled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.einsum("bid,bjd->bij", [x, x]).softmax(-1)
            positions = torch.arange(5.0).double()[:, None] @ torch.ones(1, 8).double()  # keeps its type
            return torch.baddbmm(positions.float(), batch1=scores, batch2=x)

    model = nn.Sequential(nn.Linear(8, 8), Spelled())
    with Recorder(model) as recorder:
        model(torch.randn(3, 5, 8)).square().sum().backward()
    assert [call.name for call in recorder.calls] == ["0", "1/attention", "1/attention"]
    assert [len(call.operands) for call in recorder.calls] == [1, 2, 3]
    assert all(call.operand_grads[-1] is not None for call in recorder.calls[1:])


def test_a_gradient_that_training_does_not_need_is_given_when_asked_for() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with Recorder(model) as recorder:
        model(x).sum().backward()
    assert recorder.calls[0].operand_grads == [None]
    with Recorder(model, every=True) as recorder:
        loss = model(x).sum()
        torch.autograd.grad(loss, [*model.parameters(), *recorder.leaves])
    (grad,) = recorder.calls[0].operand_grads
    assert grad is not None
    torch.testing.assert_close(grad, model.weight.sum(0).expand(2, 4))
    assert recorder.calls[0].wanted == [False]


def test_recomputation_is_not_seen_as_another_call() -> None:
    layer = nn.Linear(4, 4)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(lambda y: self.layer(y).relu(), x, use_reentrant=False)

    model = Checkpointed()
    for every in (False, True):
        with Recorder(model, every=every) as recorder:
            torch.autograd.grad(model(torch.randn(2, 4)).sum(), [*model.parameters(), *recorder.leaves])
        (call,) = recorder.calls
        assert call.result_grad is not None


def test_hooks_go_when_the_model_fails() -> None:
    model = Twice()
    with pytest.raises(IndexError), Recorder(model):
        model(torch.full((1, 2), 99))
    assert hooks(model) == 0


def test_without_gradients_nothing_is_kept() -> None:
    model = Twice()
    with torch.no_grad(), Recorder(model) as recorder:
        model(ids())
    assert recorder.calls == []
