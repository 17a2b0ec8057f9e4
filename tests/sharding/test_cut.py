"""What a rank leaves out counts as zero, exactly; what is imputed follows the book; nothing else changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import adamw, convert, random_assignment
from tests.sharding.models import loss_of, make
from torch import Tensor, nn

from trimtab.control.tensor.resizing import clear_resize, resized, set_resize, watch_resize
from trimtab.sharding import Checkpoint, assignment, assignment_for, clip_grad_norm_, move
from trimtab.sharding.cut import Cut, Slices
from trimtab.sharding.lease import lease
from trimtab.sharding.projection import InProjection
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

SLOW = 1
"""The rank that leaves something out."""


def left_out(model: nn.Module) -> dict[str, Tensor]:
    """By parameter: a mask of what is left out."""
    masks = {}
    for block, tensor in sharded_model(model, "test").tensors():
        if block.cut is not None:
            mask = torch.zeros(tensor.parameter.shape, dtype=torch.bool)
            frozen = block.cut.frozen(tensor, mask, into=isinstance(tensor.module, InProjection))
            if frozen is not None:
                view, dim, index = frozen
                view.index_fill_(dim, index, True)
                masks[tensor.name] = mask
    return masks


def zeroed_like(model: nn.Module, kind: str, p: float = 0.0, **options: Any) -> nn.Module:
    """The same model in full, with what `model` leaves out set to zero."""
    twin = convert(make(kind, p=p), **options)
    move(twin, None, assignment(model))
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, mask in left_out(model).items():
            twin.get_parameter(name)[mask] = 0
    return twin


def worst_gradient(model: nn.Module, twin: nn.Module) -> float:
    """The largest difference of gradients; those of what is left out must be zero in `model`."""
    frozen, worst = left_out(model), 0.0
    for name, parameter in model.named_parameters():
        actual, expected = parameter.grad, twin.get_parameter(name).grad
        assert actual is not None
        assert expected is not None
        if name in frozen:
            assert not actual[frozen[name]].any(), name
            expected = expected.masked_fill(frozen[name], 0)
        worst = max(worst, float((actual - expected).abs().max()))
    return worst


def against_zeroed(kind: str, form: Any, p: float, how: str) -> tuple[float, float, float, float]:
    """Differences of loss and gradients to the model with zeros, the part left out, the loss's size."""
    options: dict[str, Any] = {"shares": [1, 2], "headroom": 0.4}
    model = convert(make(kind, p=p), **options)
    if dist.get_rank() == SLOW:
        set_resize(model, 0.5, selection="random", form=form, seed=4)
    if how == "moved":
        move(model, None, random_assignment(model, random.Random(2)))
    if how == "leased":
        counts = {name: [len(units) for units in lists] for name, lists in assignment(model).items()}
        lease(model, {name: [first + 1, second - 1] for name, (first, second) in counts.items()})
    loss = loss_of(kind, model, 0)
    loss.backward()
    twin = zeroed_like(model, kind, p, **options)
    expected = loss_of(kind, twin, 0)
    expected.backward()
    off = float((loss - expected).detach().abs())
    return off, worst_gradient(model, twin), resized(model), float(expected.detach())


@pytest.mark.parametrize("form", ["unit", "column"])
@pytest.mark.parametrize(
    ("kind", "p", "how"),
    [
        ("gpt", 0.0, ""),
        ("gpt2", 0.3, ""),
        ("llama", 0.0, ""),
        ("vit", 0.2, ""),
        ("sequential", 0.0, ""),
        ("gpt", 0.2, "moved"),
        ("gpt2", 0.0, "leased"),
    ],
)
def test_equals_the_network_with_zeros(ranks: Pool, kind: str, p: float, how: str, form: str) -> None:
    for rank, (loss, gradient, part, size) in enumerate(ranks(2, against_zeroed, kind, form, p, how)):
        # A model of transformers computes its loss in single precision.
        precise = 1e-6 if kind in ("gpt2", "llama") else 1e-12
        assert loss < precise * max(1.0, size)
        assert gradient < precise
        assert (part > 0.2) == (rank == SLOW), "only the slow rank leaves something out"


def shapes_of_collectives(resize: bool) -> list[tuple[int, ...]]:
    model = convert(make("gpt"))
    optimizer = adamw(model)
    watch_resize(model, window=1)
    if resize and dist.get_rank() == SLOW:
        set_resize(model, 0.5)
    seen: list[tuple[int, ...]] = []
    plain = dist.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    try:
        for step in range(3):
            optimizer.zero_grad()
            loss_of("gpt", model, step).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
    finally:
        dist.all_reduce = plain
    return seen


def test_collectives_keep_number_order_and_shape(ranks: Pool) -> None:
    (even, other), (slow, fast) = (ranks(2, shapes_of_collectives, resize) for resize in (False, True))
    assert even == other == slow == fast
    assert len(even) == 3 * (2 * 4 + 1)


def evaluation() -> tuple[float, float, float]:
    model = convert(make("gpt2"))
    whole = float(loss_of("gpt2", model, 0).detach())
    if dist.get_rank() == SLOW:
        set_resize(model, 0.5, selection="random")
    trained = float(loss_of("gpt2", model, 0).detach())
    model.eval()
    evaluated = float(loss_of("gpt2", model, 0).detach())
    model.train()
    assert float(loss_of("gpt2", model, 0).detach()) == trained
    clear_resize(model)
    assert resized(model) == 0
    assert float(loss_of("gpt2", model, 0).detach()) == whole
    return whole, trained, evaluated


def test_evaluation_is_in_full(ranks: Pool) -> None:
    for whole, trained, evaluated in ranks(2, evaluation):
        assert evaluated == whole
        assert trained != whole


def clipped_and_saved(path: Path) -> float:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model = convert(make("gpt"), shares=[2, 1])
    if dist.get_rank() == SLOW:
        set_resize(model, 0.5, selection="random")
    optimizer = adamw(model)
    loss_of("gpt", model, 0).backward()
    twin = zeroed_like(model, "gpt", shares=[2, 1])
    loss_of("gpt", twin, 0).backward()
    assert float(clip_grad_norm_(model, 0.1)) == pytest.approx(float(clip_grad_norm_(twin, 0.1)), rel=1e-12)
    optimizer.step()
    save({"app": Checkpoint(model, optimizer)}, checkpoint_id=path)
    other = convert(make("gpt", seed=5), shares=[1, 3])
    load({"app": Checkpoint(other, adamw(other))}, checkpoint_id=path)
    for each in (model, other):
        each.eval()
    return float((loss_of("gpt", other, 1) - loss_of("gpt", model, 1)).detach().abs())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_clipping_and_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    assert max(ranks(2, clipped_and_saved, tmp_path / "c")) < 1e-12


def compiled() -> tuple[float, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = convert(make("shallow"))
    optimizer = adamw(model)
    watch_resize(model, window=1)
    graph: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    worst = 0.0
    for step in range(4):
        if step == 1 and dist.get_rank() == SLOW:
            set_resize(model, 0.5)
        twin = zeroed_like(model, "shallow")
        for each in (graph, twin):
            each.zero_grad()
            loss_of("shallow", each, step).backward()
        worst = max(worst, worst_gradient(model, twin))
        optimizer.step()
    return worst, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_model_leaves_out_too(ranks: Pool) -> None:
    results = ranks(2, compiled, timeout=150)
    assert max(worst for worst, _ in results) < 1e-12
    assert [graphs for _, graphs in results] == [1, 2], "one for all choices of a size"


KEPT, LEFT = torch.tensor([0, 2, 3]), torch.tensor([1, 4])


def passes(cut: Cut, x: Tensor, weight: Tensor, toward: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of one product whose columns are cut, as into a block."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = cut.input(x) @ cut.weight(weight, 7, 1, into=True).T
    y.backward(toward)
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("impute", ["zero", "average", "same"])
def test_columns_by_the_book(impute: Any) -> None:
    x, weight, toward = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 5), (4, 5), (6, 4)))
    first = Cut(impute=impute, places=(1, 1), ins=Slices(kept=LEFT, left=KEPT))
    _, _, before = passes(first, x, weight, 2 * toward)
    second = Cut(impute=impute, places=(1, 1), ins=Slices(kept=KEPT, left=LEFT), last=first.last)
    y, got_x, got_weight = passes(second, x, weight, toward)
    assert torch.allclose(y, x[:, KEPT] @ weight[:, KEPT].T, atol=1e-12)
    wanted_x, wanted_weight = torch.zeros_like(x), torch.zeros_like(weight)
    wanted_x[:, KEPT] = toward @ weight[:, KEPT]
    wanted_weight[:, KEPT] = toward.T @ x[:, KEPT]
    for column in LEFT.tolist():
        if impute == "average":
            wanted_x[:, column] = wanted_x[:, KEPT].mean(1)
            wanted_weight[:, column] = wanted_weight[:, KEPT].mean(1)
        if impute == "same":
            wanted_weight[:, column] = before[:, column]
    assert torch.allclose(got_x, wanted_x, atol=1e-12)
    assert torch.allclose(got_weight, wanted_weight, atol=1e-12)


@pytest.mark.parametrize("impute", ["zero", "average", "same"])
def test_units_by_the_book(impute: Any) -> None:
    """Units of two rows each: whole units are filled in, row by row of the unit."""
    weight, toward = (torch.randn(10, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64))
    leaf = weight.clone().requires_grad_()
    last: dict[int, Tensor] = {}
    earlier = Cut(impute=impute, places=(5, 5), units=Slices(kept=LEFT, left=KEPT), last=last)
    earlier.weight(leaf, 3, 2, into=True).backward(toward[:4])
    leaf.grad = None
    cut = Cut(impute=impute, places=(5, 5), units=Slices(kept=KEPT, left=LEFT), last=last)
    gathered = cut.weight(leaf, 3, 2, into=True)
    assert torch.equal(gathered, weight[[0, 1, 4, 5, 6, 7]])
    gathered.backward(toward)
    expected = torch.zeros_like(weight)
    expected[[0, 1, 4, 5, 6, 7]] = toward
    for place, unit in enumerate(LEFT.tolist()):
        for row in (0, 1):
            if impute == "average":
                expected[2 * unit + row] = toward[[row, 2 + row, 4 + row]].mean(0)
            if impute == "same":
                expected[2 * unit + row] = toward[2 * place + row]
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, expected, atol=1e-12)


def after_a_move() -> None:
    """The choice follows the units to their new slots, and goes on without those that left."""
    model = convert(make("gpt"))
    optimizer = adamw(model)
    set_resize(model, 0.5, selection="random")
    move(model, optimizer, assignment_for(model, {"blocks.0.mlp": [70, 26], "blocks.1.attention": [6, 0]}))
    for block in sharded_model(model, "test").blocks.values():
        if block.count == 0:
            assert block.cut is None
            continue
        assert block.cut is not None
        assert block.cut.units is not None
        both = torch.cat([block.cut.units.kept, block.cut.units.left]).sort().values
        assert both.tolist() == list(range(block.count))
    loss_of("gpt", model, 0).backward()
    optimizer.step()


def test_the_choice_follows_a_move(ranks: Pool) -> None:
    ranks(2, after_a_move)
