"""`trimtab.explain` as text and in a notebook."""

from __future__ import annotations

import pytest
import torch

import trimtab
from trimtab.api.explain import Explanation
from trimtab.errors import TrimtabError


def test_a_module_that_was_not_adjusted() -> None:
    explanation = trimtab.explain(torch.nn.Linear(2, 2))
    assert explanation == "trimtab was not asked to adjust this module"
    assert isinstance(explanation, Explanation)
    assert explanation._repr_html_() == f"<b>trimtab</b><ul><li>{explanation}</li></ul>"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"expected an nn\.Module, got int"):
        trimtab.explain(3)  # type: ignore[arg-type]


def test_lowered_operators_are_counted() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    trimtab.set_precision(model, {"0": "int8", "*": "bf16"})
    assert trimtab.explain(model) == "operators by precision: 2 in bf16, 1 in int8"
    assert "not asked" in trimtab.explain(trimtab.set_precision(model, {}))


def test_a_notebook_shows_a_list_and_no_markup_of_names() -> None:
    shown = Explanation("4 bits; layer <script> is sent raw")._repr_html_()
    assert shown == "<b>trimtab</b><ul><li>4 bits</li><li>layer &lt;script&gt; is sent raw</li></ul>"
