"""The tensor-parallel bench: every method trains the same model, and the figures have the agreed names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.tp import on_rank

if TYPE_CHECKING:
    from tests.support.pool import Pool

SMALL = {"width": 32, "heads": 4, "layers": 2, "batch": 2, "length": 16, "device": "cpu", "repeats": 2}


def measured(speed: float) -> list[dict[str, Any]]:
    return on_rank({**SMALL, "speed": speed}, lambda done, total: None)


@pytest.mark.parametrize(
    ("speed", "methods"),
    [
        (1.0, {"even", "even" + AA, "torch", "torch" + AA, "move", "ideal"}),
        (0.5, {"even", "even" + AA, "shares", "ideal"}),
    ],
)
def test_every_method_trains_alike(ranks: Pool, speed: float, methods: set[str]) -> None:
    rows = ranks(2, measured, speed)[0]
    assert {row["method"] for row in rows} == methods
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-4)
    assert all(row["step_ms"] > 0 and row["speed"] == speed for row in rows)
    assert all(row["over_ideal"] > 0 for row in rows if row["method"] != "move")
    for row in rows:
        if row["units"] is not None:
            assert [sum(counts) for counts in row["units"].values()] == [4, 128]
