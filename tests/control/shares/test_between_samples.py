"""What makes samples of a batch depend on each other is seen in the graph of a loss; what does not is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.control.shares.between_samples import (
    compares_samples,
    has_standardized_columns,
    is_standardized,
    problem_of_gradient,
)
from trimtab.control.shares.loss_form import UNREADABLE, loss_form

SAMPLES = 6
LAYER = nn.Linear(5, 4)
INPUTS = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 3, 1, 0])
WEIGHTS = torch.arange(1.0, 1.0 + SAMPLES)
ADVANTAGES = (WEIGHTS.square() - WEIGHTS.square().mean()) / WEIGHTS.square().std()
BY_SAMPLE = F.layer_norm(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2)), (4,))
SIGNS = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
ORDER = torch.tensor([2, 0, 1, 4, 5, 3])
TABLE = nn.Parameter(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
Loss = Callable[[torch.Tensor], torch.Tensor]


def each(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, TARGETS, reduction="none")


def tokens() -> torch.Tensor:
    """A weight for each of the four tokens of a sample."""
    return torch.arange(1.0, 1.0 + 4 * SAMPLES).reshape(SAMPLES, 4)


def heads(out: torch.Tensor) -> torch.Tensor:
    """Attention inside each sample, tokens of which come last."""
    tokens = out.unsqueeze(-1)
    scores: torch.Tensor = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    return scores.square().mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out: out.log_softmax(0).mean(), "LogSoftmaxBackward0 along the batch"),
        (lambda out: (each(out).softmax(0) * each(out).detach()).sum(), "SoftmaxBackward0"),
        (lambda out: (out - out.roll(1, 0)).square().mean(), "RollBackward0"),
        (lambda out: (out * out.flip(0)).mean(), "FlipBackward0"),
        (lambda out: out.cumsum(0).square().mean(), "CumsumBackward0"),
        (lambda out: (out * out[torch.tensor([1, 0, 3, 2, 5, 4])]).mean(), "IndexBackward0"),
        (lambda out: (out[:3] - out[3:]).square().mean(), "SliceBackward0"),
        (lambda out: torch.stack(out.chunk(2)).square().mean(), "SplitBackward0"),
        (lambda out: (out[:, None] - out[None]).square().mean(), "in-batch negatives"),
        (lambda out: ((out - out.mean(0)) / out.std(0)).square().mean(), "along the batch"),
        (lambda out: (out / out.norm()).square().sum(1).mean(), "LinalgVectorNormBackward0"),
        (
            lambda out: F.batch_norm(out, None, None, training=True).square().mean(),
            "NativeBatchNormBackward0",
        ),
        (lambda out: (each(out) * (WEIGHTS / WEIGHTS.max())).mean(), "normalized by those of their batch"),
        (lambda out: (WEIGHTS / WEIGHTS.mean() * each(out)).mean(), "normalized by those of their batch"),
        (lambda out: (out * (tokens() / tokens().sum())).sum(), "normalized by those of their batch"),
        (lambda out: F.triplet_margin_loss(out, out.roll(1, 0), out.detach()), "RollBackward0"),
        (lambda out: (out - out[ORDER]).square().mean(), "IndexBackward0"),
        (lambda out: (out - out[TARGETS]).square().mean(), "IndexBackward0"),
        (lambda out: (out - out.index_select(0, ORDER)).square().mean(), "IndexSelectBackward0"),
        (lambda out: (out[None].expand(6, 6, 4).sin() - out[:, None]).square().mean(), "in-batch negatives"),
        (lambda out: F.softplus(out[:, 0, None] - out[None, :, 0]).mean(), "in-batch negatives"),
        (lambda out: LAYER(F.pad(out - out.mean(0), (0, 1))).square().mean(), "MeanBackward1"),
        (lambda out: (each(out) * (WEIGHTS / WEIGHTS.sum())).sum(), "normalized by those of their batch"),
        (lambda out: (each(out) * (WEIGHTS / WEIGHTS.mean())).mean(), "normalized by those of their batch"),
        (lambda out: -(out[:, 0] * ADVANTAGES).mean(), "normalized by those of their batch"),
        (
            lambda out: torch.min(
                out.exp() * ADVANTAGES[:, None], out.clamp(-1, 1) * ADVANTAGES[:, None]
            ).mean(),
            "normalized by those of their batch",
        ),
        (lambda out: F.mse_loss(out[:, 0], ADVANTAGES), "targets of samples are standardized"),
        (lambda out: F.mse_loss(out[:, 0], WEIGHTS / WEIGHTS.std()), "targets of samples are standardized"),
        (
            lambda out: F.binary_cross_entropy_with_logits(
                out[:, 0], (SIGNS > 0).float(), WEIGHTS / WEIGHTS.mean()
            ),
            "normalized by those of their batch",
        ),
        (
            lambda out: (each(out) * torch.full((SAMPLES,), 1 / SAMPLES)).sum(),
            "may be divided by their number",
        ),
        (lambda out: (out * (out.detach().sigmoid() / SAMPLES)).sum(), "may be divided by their number"),
        (lambda out: (out - out[0]).square().mean(), "one of the samples of a batch by itself"),
        (lambda out: each(out).mean() + out[-1].square().sum(), "one of the samples of a batch by itself"),
        (lambda out: out.t().square().mean(1).sum(), "MeanBackward1 along the batch"),  # sequences first
        (lambda out: out.t().square().sum(1).mean(), "SumBackward1 along the batch"),
        (lambda out: sum(row.square().mean() for row in out), "a term for each sample"),
        (lambda out: sum(out[k].square().mean() for k in range(SAMPLES)) / SAMPLES, "a term for each sample"),
    ],
)
def test_what_mixes_samples_is_named(loss: Loss, words: str) -> None:
    assert words in (compares_samples(loss(LAYER(INPUTS)), SAMPLES) or "")


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(out, TARGETS, label_smoothing=0.1),
        lambda out: (each(out) * WEIGHTS).mean(),
        lambda out: (each(out) * torch.ones(SAMPLES)).mean(),
        lambda out: each(out).mean(0) + out.square().mean((0, 1)) + 0.1 * LAYER.weight.norm(),
        lambda out: F.layer_norm(out, (4,)).softmax(-1).cumsum(1).flip(1).roll(1, 1).square().sum(1).mean(),
        lambda out: out.t().contiguous().softmax(0).mean(0).square().sum(),  # sequences first
        lambda out: out.t().square().sum(0).mean(),
        lambda out: out[torch.arange(SAMPLES), TARGETS].square().mean(),
        lambda out: out[TARGETS > 0].square().mean(),
        lambda out: (
            torch.stack(torch.cat([out, 2 * out]).chunk(2)).square().mean()
        ),  # two views of each sample
        lambda out: (out @ LAYER.weight[:4].softmax(0)[:, :4]).square().mean(),
        lambda out: (out + TABLE[ORDER]).square().mean(),
        lambda out: (out * out[:, :1]).square().mean(),
        lambda out: (each(out) * (WEIGHTS > 2)).mean(),
        lambda out: (each(out) * torch.full((SAMPLES,), 1 / SAMPLES)).mean(),
        lambda out: (out * torch.full((SAMPLES, 4), 0.1)).sum(1).mean(),
        lambda out: -(each(out) * WEIGHTS).sum(),
        lambda out: (out - out.mean(1, True)).abs().sum(),
        lambda out: (out * BY_SAMPLE).mean() + F.mse_loss(out, BY_SAMPLE),  # as teachers' normalized features
        lambda out: (out * (1 + BY_SAMPLE)).mean(),
        lambda out: F.relu(1 - out[:, 0] * SIGNS).mean(),
        lambda out: F.softplus(2 * out * (TARGETS > 0)[:, None] / 0.5).mean(),
        lambda out: F.binary_cross_entropy_with_logits(out[:, 0], (SIGNS > 0).float(), WEIGHTS),
        lambda out: torch.stack([row.softmax(0) for row in out]).square().mean(),  # samples of unlike lengths
        lambda out: out.square().mean() + TABLE[0].square().mean(),
        lambda out: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))(out).square().mean(),
        heads,
    ],
)
def test_what_keeps_samples_apart_is_left_alone(loss: Loss) -> None:
    assert compares_samples(loss(LAYER(INPUTS)), SAMPLES) is None


def test_inputs_that_were_standardized_in_their_batch_are_seen() -> None:
    whole = INPUTS.square()
    assert has_standardized_columns((whole - whole.mean(0)) / whole.std(0), SAMPLES)
    for inputs in (whole, F.layer_norm(whole, (5,)), SIGNS, torch.zeros(SAMPLES, 3), TARGETS, whole[:1]):
        assert not has_standardized_columns(inputs, len(inputs))
        assert not is_standardized(inputs, len(inputs))
    for together in (
        (whole - whole.mean()) / whole.std(),
        whole / whole.std(),
        whole / whole.std(correction=0),
    ):
        assert is_standardized(together, SAMPLES)
    assert not has_standardized_columns(INPUTS - INPUTS.mean(0), SAMPLES + 1), "these rows are no samples"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_tensors_without_rows_of_equal_size_end_no_job(layout: torch.layout) -> None:
    whole = INPUTS.square()
    for inputs in (whole.to_sparse(), whole.to_sparse_csr()):
        assert not has_standardized_columns(inputs, SAMPLES)
        loss = torch.sparse.mm(inputs, LAYER.weight.t()).square().mean()
        assert compares_samples(loss, SAMPLES) is None
        assert loss_form(loss).means == (4 * SAMPLES,)
    lists = torch.nested.nested_tensor([whole[: 1 + row] for row in range(SAMPLES)], layout=layout)
    assert not has_standardized_columns(lists, SAMPLES)
    loss = torch.nested.to_padded_tensor(LAYER(lists), 0.0).square().mean()
    assert loss_form(loss).means == (4 * SAMPLES**2,)
    assert compares_samples(loss, SAMPLES) in (None, UNREADABLE)


def test_gradients_of_means_have_the_batch_size_in_them() -> None:
    scores = LAYER(INPUTS)
    for mean in (scores.mean(), F.cross_entropy(scores, TARGETS), scores.sum() / SAMPLES):
        assert "gradients of a mean" in (problem_of_gradient([mean]) or "")
    for each_by_itself in (scores, scores.sum(), scores[:, 0].sum(), LAYER.weight.square().sum()):
        assert problem_of_gradient([each_by_itself]) is None


def test_classes_of_few_samples_count_up_by_chance() -> None:
    for few in (2, 3):
        assert compares_samples(F.cross_entropy(LAYER(INPUTS[:few]), TARGETS[:few]), few) is None


def test_a_batch_of_one_sample_shows_nothing() -> None:
    assert compares_samples(LAYER(INPUTS[:1]).softmax(0).sum(), 1) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.square().mean(0).sum(),
        lambda out: out.sum(0).square().mean(),
        lambda out: (out - out.mean(0, keepdim=True)).square().mean(),
        lambda out: out.std(0).mean(),
        lambda out: (out.softmax(1).mean(0) * out.detach().mean(0)).sum(),  # balances the load of experts
        lambda out: (out / out.sum()).square().sum(),
        lambda out: (out - out.mean(-2)).square().mean(),
        lambda out: out[TARGETS > 0].mean(0).square().sum(),  # no longer as many rows as samples
    ],
)
def test_what_is_reduced_over_the_batch_in_two_places_is_named(loss: Loss) -> None:
    assert "along the batch" in (compares_samples(loss(LAYER(INPUTS)), SAMPLES) or "")


def test_attention_does_not_compare_samples() -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert compares_samples(attention(torch.randn(SAMPLES, 3, 8)).square().mean(), SAMPLES) is None
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    seen = decoder(torch.randn(SAMPLES, 2, 8), attention(torch.randn(SAMPLES, 3, 8)))
    assert compares_samples(seen.square().mean(), SAMPLES) is None, "its projections are parts of one matrix"


def test_experts_may_order_tokens() -> None:
    tokens = LAYER(INPUTS).repeat_interleave(3, 0)
    order = torch.randperm(3 * SAMPLES, generator=torch.Generator().manual_seed(0))
    parts = tokens[order].split([5, 6, 7])
    out = torch.cat([(1 + k) * part for k, part in enumerate(parts)])[order.argsort()]
    assert compares_samples(out.square().mean(), SAMPLES) is None


def test_samples_that_are_compared_are_seen() -> None:
    scores, other = LAYER(INPUTS), LAYER(INPUTS.flip(0))
    for loss in (
        (scores @ other.T).square().mean(),
        torch.einsum("nc,kc->nk", scores, other).mean(),
        torch.cdist(scores, other).mean(),
        F.cross_entropy(torch.cat([scores, scores], 1), torch.arange(SAMPLES)),
        (scores[None] * scores[:, None]).sum(-1).mean(),
    ):
        assert "in-batch negatives" in (compares_samples(loss, SAMPLES) or "")
