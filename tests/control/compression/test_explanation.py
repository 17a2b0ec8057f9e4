"""What was decided is logged once, however often it is decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import nn

import trimtab
from trimtab.control.compression import explanation

if TYPE_CHECKING:
    import pytest


def test_the_same_decision_is_logged_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(explanation, "logger", lambda: SimpleNamespace(info=logged.append))
    model = nn.Linear(2, 2)
    for text in ("one rank", "one rank", "compressing", "one rank"):
        explanation.record_explanation(model, text)
        assert trimtab.explain(model) == text
    explanation.record_explanation(nn.Linear(2, 2), "one rank")
    assert logged == ["one rank", "compressing", "one rank", "one rank"]
