"""The study of resizing: what is left out counts for nothing and stays as it is, and all methods leave out the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from benchmarks.studies.resizing import METHODS, rows_of, study
from benchmarks.studies.resizing_runs import RANKS, SLOW, WINDOW, Method, Run, Study
from benchmarks.studies.stacked_vit import Size, StackedVits, images

CPU = torch.device("cpu")
SIZE = Size(
    width=8, layers=1, heads=16, head_dim=2, hidden=32, image=8, train=64, epochs=6, test=250, batch=16
)


def trained(methods: Sequence[Method]) -> Study:
    """A study of one run each, after a few choices."""
    own = Study(SIZE, [Run(method=method, seed=0) for method in methods], 0.5, False, CPU)
    own.train(images(SIZE.train, SIZE, 1), lambda epoch, epochs: None)
    return own


def test_runs_of_one_seed_start_alike_and_do_not_meet() -> None:
    both = StackedVits(SIZE, [3, 4], CPU)
    alone = StackedVits(SIZE, [4], CPU)
    pixels, _ = images(5, SIZE, 1)
    together = both.logits(pixels.expand(2, -1, -1, -1))
    torch.testing.assert_close(together[1:], alone.logits(pixels[None]))
    together[0].sum().backward()
    assert all(p.grad is not None and not p.grad[1].any() for p in both.parameters)


def test_left_out_is_as_if_the_weights_were_zero_and_gets_no_gradient() -> None:
    own = trained([Method(), Method(form="column")])
    pixels, _ = images(5, SIZE, 2)
    pixels = pixels.expand(2, -1, -1, -1)
    masked = own.vits.logits(pixels)
    masked.square().sum().backward()
    for block in own.vits.blocks:
        assert block.in_mask is not None
        assert block.hidden_mask is not None
        assert block.out.grad is not None
        assert not block.out.grad[block.hidden_mask == 0].any()
        for weight in block.ins:
            assert weight.grad is not None
            assert not weight.grad[block.in_mask == 0].any()
    with torch.no_grad():
        for block in own.vits.blocks:
            assert block.in_mask is not None
            assert block.hidden_mask is not None
            block.out *= block.hidden_mask[..., None]
            for weight in block.ins:
                weight *= block.in_mask
            block.in_mask = block.hidden_mask = None
        torch.testing.assert_close(own.vits.logits(pixels), masked)


@pytest.mark.parametrize("method", [Method(), Method(score="change"), Method(form="column")])
def test_frozen_weights_stay_to_the_bit(method: Method) -> None:
    own = trained([method])
    before = {id(t): t.detach().clone() for block in own.vits.blocks for t in block.tensors}
    for p in own.optimizer.parameters:
        p.grad = torch.ones_like(p)
    own.optimizer.step(0.1, own.frozen)
    for block in own.vits.blocks:
        for tensor in block.tensors:
            frozen = own.frozen[id(tensor)]
            assert torch.equal(tensor[frozen], before[id(tensor)][frozen])
            assert (tensor != before[id(tensor)])[~frozen].all()


def test_all_methods_leave_the_same_part_of_one_rank_out() -> None:
    methods = [m for m in METHODS.values() if not m.off and not m.canary and m.form == "unit"]
    own = trained(methods)
    for name in ("attention", "mlp"):
        left = own.axes[f"0.{name}", "units"].left
        assert not left[:, [rank for rank in range(RANKS) if rank != SLOW]].any()
        for index, method in enumerate(methods):
            if not method.per_layer:
                assert left[index, SLOW].sum() == left.shape[2] // 2


def test_filled_in_gradients_are_of_the_ranks_own_units() -> None:
    own = trained([Method(impute="average"), Method(impute="same")])
    block = own.vits.blocks[1]
    left = own.left_units[block.name]
    for p in own.vits.parameters:
        p.grad = torch.randn_like(p)
    assert block.out.grad is not None
    given, last = block.out.grad.clone(), own.last[id(block.out)].clone()
    own._impute()
    rank = slice(SLOW * SIZE.hidden // RANKS, (SLOW + 1) * SIZE.hidden // RANKS)
    kept = ~left[0, rank]
    filled = block.out.grad[0, rank][~kept]
    torch.testing.assert_close(filled, given[0, rank][kept].mean(0).expand_as(filled))
    assert torch.equal(block.out.grad[1][left[1]], last[1][left[1]])
    assert torch.equal(block.out.grad[1][~left[1]], given[1][~left[1]])


def test_rows_compare_seed_by_seed() -> None:
    results = [
        ("nothing", 0, 0.9, 1.0),
        ("nothing", 1, 0.8, 2.0),
        ("random", 0, 0.8, 1.5),
        ("random", 1, 0.7, 2.5),
    ]
    rows = {row["method"]: row for row in rows_of({}, results)}
    assert rows["random"]["accuracy_over_nothing"] == pytest.approx(-0.1)
    assert rows["random"]["loss_over_nothing"] == pytest.approx(0.5)
    assert rows["random"]["loss_over_nothing_error"] == pytest.approx(0)


def test_study_has_a_row_for_every_method() -> None:
    assert SIZE.epochs * SIZE.steps_per_epoch > 2 * WINDOW
    rows = study(SIZE, CPU, 2, [(0.5, True)], lambda rows: None)
    assert {row["method"] for row in rows} == {*METHODS, "nothing, half the epochs"}
