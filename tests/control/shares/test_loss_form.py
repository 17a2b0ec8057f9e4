"""How a loss was reduced, from its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.control.shares.loss_form import grows_with_samples, loss_form

N, CLASSES = 6, 5


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES)


@pytest.fixture
def scores(layer: nn.Linear) -> torch.Tensor:
    logits: torch.Tensor = layer(torch.randn(N, 4))
    return logits


TARGETS = torch.tensor([3, 1, 4, 1, 0, 2])


def test_means(scores: torch.Tensor, layer: nn.Linear) -> None:
    penalty = 1e-3 * sum(parameter.square().sum() for parameter in layer.parameters())
    cases = {
        F.cross_entropy(scores, TARGETS): (N,),
        F.cross_entropy(scores, TARGETS) / 4 * 1024: (N,),
        F.cross_entropy(scores, TARGETS) + penalty: (N,),
        scores.square().mean(): (N * CLASSES,),
        scores.square().mean((0, 1)): (N * CLASSES,),
        F.mse_loss(scores, torch.zeros(N, CLASSES)): (N * CLASSES,),
        F.binary_cross_entropy_with_logits(scores, torch.ones(N, CLASSES)): (N * CLASSES,),
        F.cross_entropy(scores, TARGETS) + 0.1 * scores.square().mean(): (N, N * CLASSES),
        F.cross_entropy(scores, TARGETS, reduction="none").mean(): (N,),
        F.cross_entropy(scores, TARGETS, label_smoothing=0.1): (N,),
        F.cross_entropy(scores, TARGETS) + 0.1 * F.mse_loss(layer.weight, torch.zeros(CLASSES, 4)): (N,),
        (-layer.bias[0]).exp() * F.cross_entropy(scores, TARGETS) + layer.bias[0]: (N,),
        F.softplus(layer.bias[0]) * F.cross_entropy(scores, TARGETS) - layer.bias[0].sigmoid().log(): (N,),
    }
    for loss, means in cases.items():
        form = loss_form(loss)
        assert (form.problem, form.means, form.divisors) == (None, means, ())


def test_sums_and_what_they_are_divided_by(scores: torch.Tensor) -> None:
    cases = {
        F.cross_entropy(scores, TARGETS, reduction="sum"): (1,),
        scores.square().sum(): (1,),
        scores.square().sum() / N: (N,),
        scores.square().sum() / N / 4: (4 * N,),
        F.kl_div(scores.log_softmax(-1), scores.detach().softmax(-1), reduction="batchmean"): (N,),
    }
    for loss, divisors in cases.items():
        form = loss_form(loss)
        assert (form.problem, form.means, form.divisors) == (None, (), divisors)


def test_ignored_targets_are_counted(scores: torch.Tensor) -> None:
    ((counted, count),) = loss_form(F.cross_entropy(scores, torch.where(TARGETS == 1, -100, TARGETS))).counted
    assert (int(counted), count) == (N - 2, N)


def test_what_is_not_known_is_named(scores: torch.Tensor) -> None:
    whole = F.cross_entropy(scores, TARGETS)
    cases = {
        "weighted by class": F.cross_entropy(scores, TARGETS, weight=torch.arange(1.0, 6.0)),
        "product or quotient": whole * scores.square().mean(),
        "partly a mean": whole + scores.square().sum(),
        "stacked": torch.stack([whole, whole]).mean(),
        "not known (MaxBackward1)": scores.max(),
        "shape (6, 5)": scores,
        "divided by another tensor": scores.square().sum() / torch.tensor(5.5),
    }
    for words, loss in cases.items():
        problem = loss_form(loss).problem
        assert problem is not None
        assert words in problem


def test_numbers_that_scale_a_loss_are_kept(scores: torch.Tensor) -> None:
    loss = F.cross_entropy(scores, TARGETS)
    assert [float(scale) for scale in loss_form(2 * loss / loss.detach()).scales] == [loss.item(), 2.0]
    weighted = F.binary_cross_entropy_with_logits(
        scores, scores.detach().sigmoid(), pos_weight=torch.tensor(3.0)
    )
    assert [float(scale) for scale in loss_form(weighted).scales] == [3.0], "ranks may have found another one"


@pytest.mark.parametrize(
    ("loss", "sums"),
    [
        (lambda out: out.square().mean(), False),
        (lambda out: out.square().sum(), True),
        (lambda out: out.square().sum() / len(out), False),
        (lambda out: out.square().sum() * (1 / len(out)), False),
        (lambda out: out.square().sum() / 4, True),
        (lambda out: 0.3 * out.square().sum() / 4, True),
        (lambda out: out.square().mean() * len(out), True),
        (lambda out: out.square().mean() * 3, False),
        (lambda out: out.square().mean() * torch.tensor(float(len(out))), False),  # as a GradScaler's
        (lambda out: out.square().sum() / len(out) ** 2, None),
        (lambda out: out.square().sum() + out.abs().sum() / len(out), None),
    ],
)
def test_a_batch_of_another_size_tells_sums_from_means(
    layer: nn.Linear, loss: Callable[[torch.Tensor], torch.Tensor], sums: bool | None
) -> None:
    equal, other = (loss_form(loss(layer(torch.randn(size, 4)))) for size in (N, N + 3))
    assert grows_with_samples(other, equal, (N + 3) / N) is sums
