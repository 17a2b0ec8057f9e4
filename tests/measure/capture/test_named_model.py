"""Workloads of models that are given by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import workload_of

if TYPE_CHECKING:
    from pathlib import Path


def test_models_are_captured_without_being_made() -> None:
    found = workload_of("gpt", samples=3)
    assert found.batch_size == 3
    assert found.buckets


def test_a_model_that_looks_at_values_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peeking.py").write_text(
        "import torch\nfrom tests.measure.capture.models import Peeks\n\n"
        "def make():\n    return Peeks(), torch.zeros(2, 8), lambda y: y.sum()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrimtabError, match=r"peeking:make.*depends on values.*--real"):
        workload_of("peeking:make")
    assert workload_of("peeking:make", real=True).operators
