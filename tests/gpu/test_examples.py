"""The examples on a GPU."""

from __future__ import annotations

import pytest
from tests.examples.test_examples import train
from tests.support.requirements import requires

pytestmark = requires(cuda=1)


@pytest.mark.parametrize("arguments", [[], ["--bf16=1"]])
def test_gpt_learns(arguments: list[str]) -> None:
    results = train("gpt.py", "--steps=30", "--device=cuda", *arguments)
    assert results["device"] == "cuda"
    assert results["final_loss"] < 4


@requires(modules=["sklearn"])
def test_digits_learns() -> None:
    assert train("digits.py", "--epochs=3", "--device=cuda")["accuracy"] > 0.8
