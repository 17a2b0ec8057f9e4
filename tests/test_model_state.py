"""One object of state on a model."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from trimtab.model_state import ModelState, attach_state, find_state, state_of, unchanged


def test_reading_leaves_a_module_as_it_is() -> None:
    module = nn.Linear(2, 2)
    attributes = set(module.__dict__)
    assert vars(state_of(module)) == vars(ModelState())
    assert find_state(module, "balancer") is None
    assert set(module.__dict__) == attributes


def test_attached_state_is_one_key_and_no_part_of_the_state_dict() -> None:
    module = nn.Linear(2, 2)
    attributes, names = set(module.__dict__), list(module.state_dict())
    attach_state(module).explanation = "because"
    assert attach_state(module) is state_of(module)
    assert state_of(module).explanation == "because"
    assert set(module.__dict__) - attributes == {"_trimtab"}
    assert list(module.state_dict()) == names
    assert list(dict(module.named_modules())) == [""]


def test_state_of_the_wrapped_model_is_found() -> None:
    wrapper, inner = nn.Module(), nn.Linear(2, 2)
    wrapper.module = inner
    attach_state(inner).balancer = "inner"
    assert find_state(wrapper, "balancer") == "inner"
    attach_state(wrapper).balancer = "outer"
    assert find_state(wrapper, "balancer") == "outer"
    assert find_state(inner, "balancer") == "inner"
    inner.module = 3  # type: ignore[assignment]  # something else by that name
    assert find_state(inner, "active_plan") is None


def test_copies_keep_what_their_forward_pass_needs() -> None:
    module = nn.Linear(2, 2)
    state = attach_state(module)
    state.explanation, state.functional_block = "because", ("block", "kind")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert state_of(other) is not state
        assert state_of(other).functional_block == ("block", "kind")
        assert state_of(other).explanation is None


class Remembering(nn.Module):
    """Keeps things between forward passes."""

    count: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None
        self.seen: list[int] = [0]
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.zeros(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.width = x.shape[1]
        self.late = x
        self.seen.append(len(x))
        self.count += 1
        return x + self.count


def test_a_model_that_ran_inside_is_as_it_was() -> None:
    inner = Remembering()
    model = nn.Sequential(inner)
    attributes, seen, table = set(vars(inner)), inner.seen, inner.table
    with unchanged(model):
        model(torch.ones(2, 5))
        assert (inner.width, inner.seen, float(inner.count)) == (5, [0, 2], 1.0)
    assert (inner.width, inner.seen, float(inner.count)) == (None, [0], 0.0)
    assert set(vars(inner)) == attributes
    assert inner.seen is seen
    assert inner.table is table
    model(torch.ones(2, 5))
    assert float(inner.count) == 1.0
