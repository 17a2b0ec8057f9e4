"""The family that is predicted fastest, among those whose loss was shown to match fp32's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.planning.compression.family import (
    ADAMW,
    BITS,
    BITS_FEEDBACK,
    BITS_SCALED,
    BITS_WIDE,
    LOSS_BENCH,
    POWERSGD,
    SGD,
    FamilyCandidate,
    choose_family,
    passed_families,
)

ROOT = Path(__file__).parents[3]
SLOW = {BITS: 0.925, BITS_FEEDBACK: 0.625, POWERSGD: 0.2}
FAST = {BITS: 0.051, BITS_FEEDBACK: 0.1005, POWERSGD: 0.03}
"""Seconds a step, by family: fewer bytes win on a slow link, less work on a fast one."""


def candidates(link: dict[str, float]) -> list[FamilyCandidate]:
    return [
        FamilyCandidate(family=family, seconds=seconds, how="measured in 2 bits")
        for family, seconds in link.items()
    ]


def test_a_slow_link_takes_fewer_bytes_and_a_fast_one_less_work() -> None:
    assert choose_family(candidates(SLOW)).family == BITS_FEEDBACK
    assert choose_family(candidates(FAST)).family == BITS


def test_what_did_not_pass_the_loss_bench_is_never_picked() -> None:
    everything = {BITS, BITS_FEEDBACK, POWERSGD}
    assert choose_family(candidates(SLOW), passed=everything).family == POWERSGD
    choice = choose_family(candidates(SLOW))
    assert choice.family != POWERSGD
    assert "powersgd" in choice.reason
    assert "left out: its loss was not shown to match fp32's" in choice.reason
    with pytest.raises(ValueError, match="none of the families powersgd passed"):
        choose_family(candidates(SLOW)[2:])


def test_the_reason_names_the_times_and_where_they_come_from() -> None:
    choice = choose_family(candidates(SLOW))
    assert choice.seconds == 0.625
    assert choice.reason.startswith(
        "bits-feedback takes least time on this link, 625 ms a step (measured in 2 bits)"
    )
    assert "bits 925 ms" in choice.reason


def test_verdicts_say_what_the_committed_results_say() -> None:
    trained = [row for row in _rows("adaptive.json") if row.get("part") == "training"]
    worse = {(row["optimiser"], row["method"]): row["worse"] for row in trained}
    passed = {(verdict.optimizer, verdict.family): verdict.passed for verdict in LOSS_BENCH}
    assert worse[SGD, "1-nearest (canary)"]
    assert worse[ADAMW, "1-nearest (canary)"]
    assert passed[SGD, BITS] == (not worse[SGD, "uniform 4"]) == (not worse[SGD, "adaptive, bits"])
    assert passed[SGD, BITS_FEEDBACK] == (not worse[SGD, "uniform 2, feedback"])
    for key in ((SGD, BITS_FEEDBACK), (ADAMW, BITS_FEEDBACK), (ADAMW, BITS_SCALED)):
        assert passed[key] == (not worse[key[0], f"adaptive, {key[1]}"])
    assert passed[ADAMW, BITS_WIDE] == (not worse[ADAMW, "uniform 4"])
    link = {row["method"]: row for row in _rows("ddp-100mbit-untrained.json")}
    assert not passed[ADAMW, POWERSGD]
    assert link["powersgd4"]["loss"] > link["ddp"]["loss"] + 0.05
    for verdict in LOSS_BENCH:
        assert (ROOT / verdict.evidence).exists()
    assert passed_families() == {BITS, BITS_FEEDBACK}
    assert passed_families(optimizer=ADAMW) == {BITS_SCALED, BITS_WIDE}


def test_verdicts_hold_on_three_models() -> None:
    """Those of the adaptive families and of PowerSGD, on every model that can see damage: whose canary is flagged."""
    rows = _rows("bit-verdicts.json")
    worse = {(row["optimizer"], row["model"], row["method"]): row["worse"] for row in rows}
    seeing = [(o, m) for o, m, method in worse if "1 bit" in method and worse[o, m, method]]
    assert {optimizer for optimizer, _ in seeing} == {SGD, ADAMW}
    for verdict in LOSS_BENCH:
        method = "PowerSGD 4" if verdict.family == POWERSGD else f"adaptive, {verdict.family}"
        found = [worse.get((o, m, method)) for o, m in seeing if o == verdict.optimizer]
        if None not in found:  # AdamW was not trained with the families of SGD
            assert verdict.passed == (not any(found)), verdict


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows


@pytest.mark.parametrize(("slower", "chosen"), [(1.05, BITS), (1.2, BITS_FEEDBACK)])
def test_of_two_that_are_about_as_fast_the_one_that_errs_less_is_taken(slower: float, chosen: str) -> None:
    two = [
        FamilyCandidate(family=BITS_FEEDBACK, seconds=0.1, how="measured"),
        FamilyCandidate(family=BITS, seconds=0.1 * slower, how="measured"),
    ]
    choice = choose_family(two)
    assert choice.family == chosen
    assert all(c.family in choice.reason for c in two)
