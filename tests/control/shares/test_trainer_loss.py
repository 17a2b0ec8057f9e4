"""The Transformers Trainer passes the number of all ranks' tokens; whether a loss was divided by it is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.shares.test_takeover import taken_over, train

from trimtab.control.shares.loss_form import loss_form
from trimtab.control.shares.trainer_loss import divided_by

if TYPE_CHECKING:
    from tests.support.pool import Pool

OWN = (11, 5)
ITEMS = 16
"""Samples of both ranks."""


def of_items(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As models do that are told the number; the Trainer multiplies by the number of ranks, which then average."""
    return F.cross_entropy(scores, targets, reduction="sum") / ITEMS * 2


def of_classes(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As scripts do that override `compute_loss` to weigh rare classes."""
    return F.cross_entropy(scores, targets, weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=scores.dtype))


def test_a_loss_shows_whether_it_was_divided_by_the_number_it_was_told() -> None:
    scores, targets = torch.randn(8, 4, requires_grad=True), torch.arange(8) % 4
    summed = F.cross_entropy(scores, targets, reduction="sum")
    for told in (ITEMS, torch.tensor(ITEMS)):
        for loss in (
            summed / told,
            summed / told * 2,
            summed / told + scores.logsumexp(1).sum() / (told * 4),
        ):
            assert divided_by(loss_form(loss), told)
    for loss in (summed / 8, summed / torch.tensor(8), summed, summed / 8 * 2):
        assert not divided_by(loss_form(loss), ITEMS)
    assert not divided_by(loss_form(F.cross_entropy(scores, targets)), ITEMS)
    assert not divided_by(loss_form(of_classes(scores, targets)), ITEMS)
    assert not divided_by(loss_form(summed / ITEMS), None)


def on_rank() -> None:
    own = OWN[dist.get_rank()]
    expected, _, _ = train(None, loss=of_items)
    with taken_over(OWN) as takeover:
        takeover.losses.scope, takeover.losses.items = "all ranks", ITEMS
        found, sizes, _ = train(takeover, loss=of_items)
    assert own in sizes
    assert (found - expected).abs().max() < 1e-10
    with taken_over(OWN) as takeover:
        takeover.losses.scope, takeover.losses.items = "all ranks", ITEMS
        _, sizes, _ = train(takeover, loss=of_classes)
    assert set(sizes) == {8, 1}
    assert any("weighted by class" in said for said in takeover.texts)


def test_a_loss_that_ignores_the_number_is_looked_at_as_any_other(ranks: Pool) -> None:
    ranks(2, on_rank)
