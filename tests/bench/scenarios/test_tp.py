"""The tensor-parallel bench: every method trains the same model, and the figures have the agreed names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.tp import memory, replicas
from trimtab.bench.scenarios.tp.tp import on_rank

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


def in_replicas() -> list[dict[str, Any]]:
    spec = {**SMALL, "width": 64, "speed": 0.5, "settle": 2}
    return replicas.on_rank(spec, lambda done, total: None)


def test_replicas_train_alike_however_their_units_are_divided(ranks: Pool) -> None:
    rows = ranks(4, in_replicas, allow_groups=True, timeout=110)[0]
    assert [row["method"] for row in rows] == [f"2d {method}" for method in replicas.OPTIONS]
    summary = replicas.replica_summary(rows)
    assert summary["2d_loss_gap"] < 1e-4
    assert all(summary[name] > 0 for name in ("2d_shares_speedup", "2d_auto_speedup", "2d_aa_ratio"))
    for row in rows:
        assert [sum(counts) for replica in row["units"] for counts in replica.values()] == [4, 256, 4, 256]


def divided(what: str, entries: int | None) -> list[dict[str, Any]]:
    return memory.on_rank({**SMALL, "what": what, "entries": entries}, lambda done, total: None)


@pytest.mark.parametrize(
    ("what", "entries", "figure", "limit"),
    [("vocab", 2000, "vocab_memory", 0.7), ("sequence", None, "sequence_activations", 0.9)],
)
def test_what_is_divided_needs_less_memory_and_trains_alike(
    ranks: Pool, what: str, entries: int | None, figure: str, limit: float
) -> None:
    rows = ranks(2, divided, what, entries)[0]
    methods = [*memory.OPTIONS[what], *(["torch"] if what == "vocab" else [])]
    assert [row["method"] for row in rows] == [f"{what} {method}" for method in methods]
    summary = memory.memory_summary(rows)
    assert summary[f"{what}_loss_gap"] < 1e-4
    assert summary[figure] < limit
    if what == "vocab":
        assert summary["divided_memory_over_torch"] < limit
        assert summary["divided_time_over_torch"] > 0
