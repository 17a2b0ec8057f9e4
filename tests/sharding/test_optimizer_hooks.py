"""What is left out stays to the bit, whatever the optimizer; what is in is updated as ever."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharding.jobs import adamw, convert
from tests.sharding.models import loss_of, make
from tests.sharding.test_cut import left_out
from torch.optim import optimizer as torch_optimizer

from trimtab.control.tensor.resizing import set_resize, watch_resize

if TYPE_CHECKING:
    from tests.support.pool import Pool

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"weight_decay": 0.3}),
    "AdamW, one by one": ("AdamW", {"weight_decay": 0.3, "foreach": False, "amsgrad": True}),
    "AdamW, fused": ("AdamW", {"weight_decay": 0.3, "fused": True}),
    "Adam with decay in the gradient": ("Adam", {"weight_decay": 0.3}),
    "SGD": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Rprop": ("Rprop", {}),
}


def held(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The parameter and its states of the same shape."""
    states = {k: v for k, v in optimizer.state[parameter].items() if v.shape == parameter.shape}
    return {"parameter": parameter.data, **states}


def stays(name: str, form: Any, warm: int) -> None:
    """Steps in full, then some with half left out: frozen to the bit, the rest as a plain step would do it."""
    kind, options = OPTIMIZERS[name]
    model = convert(make("gpt"))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)
    watch_resize(model, window=3)
    for step in range(warm + 3):
        if step == warm:
            set_resize(model, 0.5, form=form, selection="random")
        optimizer.zero_grad()
        loss_of("gpt", model, step).backward()
        masks = left_out(model)
        before = {
            n: {k: v.clone() for k, v in held(optimizer, model.get_parameter(n)).items()} for n in masks
        }
        # An optimizer with copies of all, which the hooks know nothing of.
        plain = copy.deepcopy(optimizer)
        copies = [parameter for group in plain.param_groups for parameter in group["params"]]
        twins = dict(zip((n for n, _ in model.named_parameters()), copies, strict=True))
        for n, twin in twins.items():
            twin.grad = model.get_parameter(n).grad
        plain.step()
        optimizer.step()
        if step < warm:
            assert not masks
            continue
        assert masks
        for parameter, mask in masks.items():
            now = held(optimizer, model.get_parameter(parameter))
            for key, value in held(plain, twins[parameter]).items():
                assert torch.equal(now[key][~mask], value[~mask]), (parameter, key)
                if key in before[parameter]:
                    assert torch.equal(now[key][mask], before[parameter][key][mask]), (parameter, key)
            assert not torch.equal(now["parameter"][~mask], before[parameter]["parameter"][~mask]), parameter


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_to_the_bit(ranks: Pool, name: str) -> None:
    ranks(1, stays, name, "unit", 2)
    ranks(1, stays, name, "column", 2)


@pytest.mark.parametrize("name", ["AdamW", "Adam with decay in the gradient", "SGD", "Rprop"])
def test_states_that_begin_while_frozen_begin_as_if_untouched(ranks: Pool, name: str) -> None:
    ranks(1, first_states, name)


def first_states(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = convert(make("gpt"))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)
    set_resize(model, 0.5, selection="random")
    loss_of("gpt", model, 0).backward()
    optimizer.step()
    masks = left_out(model)
    assert masks
    for parameter, mask in masks.items():
        for key, value in held(optimizer, model.get_parameter(parameter)).items():
            if key == "step_size":  # of Rprop, which begins at the learning rate
                assert value[mask].eq(1e-2).all()
            elif key != "parameter":
                assert not value[mask].any(), (parameter, key)


def imputed_moves(impute: Any) -> None:
    model = convert(make("gpt"))
    optimizer = adamw(model)
    set_resize(model, 0.5, selection="random", impute=impute)
    weight = model.get_parameter("blocks.0.up.weight")
    before = weight.detach().clone()
    loss_of("gpt", model, 0).backward()
    optimizer.step()
    assert (weight != before).any(1).all(), "imputed gradients train what is left out"


def test_only_zeros_freeze(ranks: Pool) -> None:
    ranks(1, imputed_moves, "average")


def two_optimizers() -> list[int]:
    """Windows go by the steps of one of several optimizers, and by another's when that one ends."""
    model = convert(make("gpt"))
    parameters = list(model.parameters())
    first = torch.optim.SGD(parameters[::2], lr=0.1)
    second = torch.optim.AdamW(parameters[1::2], lr=0.1, weight_decay=0.3)
    watch_resize(model, window=2)
    set_resize(model, 0.5, selection="random")
    changes = []
    for step in range(10):
        before = left_out(model)
        values = {name: model.get_parameter(name).detach().clone() for name in before}
        model.zero_grad()
        loss_of("gpt", model, step).backward()
        for optimizer in (first, second) if step < 6 else (second,):
            optimizer.step()
        for name, mask in before.items():
            assert torch.equal(model.get_parameter(name)[mask], values[name][mask]), name
        after = left_out(model)
        if any(not torch.equal(after[name], before[name]) for name in before):
            changes.append(step)
    return changes


def test_several_optimizers(ranks: Pool) -> None:
    (changes,) = ranks(1, two_optimizers)
    assert changes == [1, 3, 5, 7, 9], "no step is missed when the first ends"


def hooks_left() -> tuple[int, int]:
    gc.collect()  # what earlier tests left behind
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    model = convert(make("gpt"))
    watch_resize(model)
    during = len(torch_optimizer._global_optimizer_pre_hooks) - before
    del model
    gc.collect()
    return during, len(torch_optimizer._global_optimizer_pre_hooks) - before


def test_hooks_go_with_the_model(ranks: Pool) -> None:
    assert ranks(1, hooks_left) == [(1, 0)]
