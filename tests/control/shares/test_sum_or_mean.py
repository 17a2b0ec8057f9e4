"""Sums are told from means by a batch of another size, and what a loss is must stay so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trimtab.control.shares.loss_form import DIVISOR_VARIES, OTHER_DIVISOR, LossForm, loss_form
from trimtab.control.shares.sum_or_mean import CHANGED, FACTOR_VARIES, HIDDEN_NUMBER, SumOrMean

LAYER = nn.Linear(4, 5)
EQUAL, OWN = 8, 11
Loss = Callable[[torch.Tensor], torch.Tensor]


def form(loss: Loss, samples: int) -> LossForm:
    return loss_form(loss(LAYER(torch.randn(samples, 4))))


def known(loss: Loss) -> SumOrMean:
    """What is known after equal batches and a first one of another size."""
    kind = SumOrMean()
    for _ in range(3):
        assert kind.observe(form(loss, EQUAL), EQUAL) is None
        assert kind.follow(form(loss, EQUAL), EQUAL, equal=True) is None
    assert kind.follow(form(loss, OWN), OWN, equal=False) is None
    return kind


def total(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum()


def masked(out: torch.Tensor) -> torch.Tensor:
    """As many samples as are not masked: here all but two."""
    return out[2:].square().sum() / torch.tensor(float(len(out) - 2))


@pytest.mark.parametrize(
    ("loss", "later", "summed", "words"),
    [
        (lambda out: total(out) / len(out), masked, False, DIVISOR_VARIES),
        (lambda out: total(out) / len(out), lambda out: out.square().mean(), False, CHANGED),
        (lambda out: out.square().mean(), lambda out: total(out) / 4, False, CHANGED),
        (total, lambda out: total(out) / len(out), True, DIVISOR_VARIES),
        (total, lambda out: out.square().mean(), True, CHANGED),
        (total, lambda out: 0.5 * total(out), True, None),
        (lambda out: total(out) / len(out), lambda out: 0.5 * total(out) / len(out), False, None),
        (lambda out: out.square().mean(), lambda out: 0.5 * out.square().mean(), False, None),
    ],
)
def test_a_loss_that_becomes_another_one_is_seen(
    loss: Loss, later: Loss, summed: bool, words: str | None
) -> None:
    for size, equal in ((OWN, False), (EQUAL, True)):
        kind = known(loss)
        assert kind.summed is summed
        assert kind.follow(form(later, size), size, equal=equal) == words
    assert kind.is_sum(form(loss, OWN), OWN) is summed


def test_a_loss_of_another_kind_counts_as_what_it_looks_like_until_batches_are_equal() -> None:
    assert not known(total).is_sum(form(lambda out: out.square().mean(), OWN), OWN)
    mean = known(lambda out: out.square().mean())
    assert mean.is_sum(form(total, OWN), OWN)
    assert not mean.is_sum(form(lambda out: total(out) / len(out), OWN), OWN)


def test_annealing_does_not_hide_what_divides_a_loss() -> None:
    def annealed(step: int) -> Loss:
        return lambda out: total(out) / len(out) + 0.1 * step * out.abs().sum() / len(out)

    kind = SumOrMean()
    for step in range(3):  # the second term begins at zero
        assert kind.observe(form(annealed(step), EQUAL), EQUAL) is None
        kind.follow(form(annealed(step), EQUAL), EQUAL, equal=True)
    assert kind.follow(form(annealed(3), OWN), OWN, equal=False) is None
    assert kind.summed is False


def test_a_number_that_varies_may_have_the_samples_in_it() -> None:
    kind = SumOrMean()
    assert kind.observe(form(lambda out: 0.1 * total(out), EQUAL), EQUAL) is None
    assert kind.observe(form(lambda out: 0.2 * total(out), EQUAL), EQUAL) == FACTOR_VARIES
    assert kind.observe(form(lambda out: total(out) / 5, EQUAL), EQUAL) == DIVISOR_VARIES


def test_a_divisor_that_is_not_explained_is_no_mean() -> None:
    kind = SumOrMean()
    kind.follow(form(lambda out: total(out) / len(out) ** 2, EQUAL), EQUAL, equal=True)
    other = form(lambda out: total(out) / len(out) ** 2, OWN)
    assert kind.follow(other, OWN, equal=False) == OTHER_DIVISOR


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda out: total(out) * torch.tensor(1 / len(out)), True),
        (lambda out: total(out) * torch.tensor(3.0), True),
        (lambda out: out.square().mean() * torch.tensor(float(len(out))), True),
        (lambda out: total(out) * torch.tensor(65536.0), False),  # as a GradScaler's
        (lambda out: out.square().mean() * torch.tensor(65536.0), False),
        (lambda out: out.square().mean() * torch.tensor(0.1), False),
        (lambda out: total(out) * torch.tensor(1 / len(out), dtype=torch.float64), False),  # is read
    ],
)
def test_tensors_may_hide_the_number_of_samples(loss: Loss, seen: bool) -> None:
    assert SumOrMean().observe(form(loss, EQUAL), EQUAL) == (HIDDEN_NUMBER if seen else None)


def test_another_loader_may_have_other_batches() -> None:
    def mean(out: torch.Tensor) -> torch.Tensor:
        return total(out) / len(out)

    kind = known(mean)
    kind.forget()
    assert kind.summed is None
    assert kind.observe(form(mean, 2 * EQUAL), 2 * EQUAL) is None
    assert kind.follow(form(mean, 2 * EQUAL), 2 * EQUAL, equal=True) is None
    assert kind.follow(form(mean, OWN), OWN, equal=False) is None
    assert kind.summed is False


@pytest.mark.parametrize("loss", [total, lambda out: total(out) / len(out), lambda out: out.square().mean()])
def test_one_sample_shows_nothing(loss: Loss) -> None:
    kind = known(loss)
    single = form(lambda out: loss(out[:, :1]), 1)
    assert kind.follow(single, 1, equal=False) is None
    assert kind.is_sum(single, 1) is kind.summed
    unknown = SumOrMean()
    unknown.follow(form(loss, EQUAL), EQUAL, equal=True)
    means = not form(loss, EQUAL).divisors
    assert unknown.follow(single, 1, equal=False) == (None if means else OTHER_DIVISOR)
    assert unknown.is_sum(single, 1) is kind.summed


def test_a_graph_is_new_once() -> None:
    kind, out = SumOrMean(), LAYER(torch.randn(EQUAL, 4))
    for loss in (out.square().mean(), out.square().mean() + out.abs().mean()):
        assert kind.is_new(loss)
        assert not kind.is_new(loss)
    kind.forget()
    assert kind.is_new(out.square().mean())
