"""`trimtab.Balance`: the defaults are exact, values are checked, and every field says what it is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from itertools import pairwise
from typing import Any

import pytest

import trimtab
from trimtab.planning.tensor import balance


def test_the_defaults_are_exact_and_cannot_be_changed() -> None:
    settings = trimtab.Balance()
    assert (settings.own, settings.lease, settings.resize) == (True, True, 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.resize = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        trimtab.Balance(True)  # type: ignore[call-arg]


def test_every_field_has_a_docstring() -> None:
    (body,) = [
        node.body for node in ast.parse(inspect.getsource(balance)).body if isinstance(node, ast.ClassDef)
    ]
    for field, after in pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(field)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"own": 1}, "own is True or False"),
        ({"resize": 1.0}, "resize must be at least 0 and below 1, got 1.0"),
        ({"resize": "half"}, "resize must be at least 0"),
        ({"window": 0}, "window is a whole number of at least 1, got 0"),
        ({"patience": 1.5}, "patience is a whole number"),
        ({"threshold": 0.9}, "threshold must be at least 1, got 0.9"),
        ({"margin": -0.1}, "margin must be at least 0"),
        ({"selection": "largest"}, "selection='largest' is unknown; choose random, priority"),
        ({"impute": "mean"}, "choose zero, average, same"),
        ({"own": False, "lease": False}, "leave nothing to do"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(trimtab.TrimtabError, match="Balance: ") as error:
        trimtab.Balance(**wrong)
    assert expected in str(error.value)


def test_what_is_left_out_is_chosen_by_activations_unless_told_otherwise() -> None:
    assert trimtab.Balance(resize=0.5).selection == "activation"
    assert trimtab.Balance(resize=0.5, selection="random").selection == "random"
