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
    LOSS_BENCH,
    POWERSGD,
    SGD,
    Candidate,
    LinkCost,
    choose_family,
    measured,
    passed_families,
    predicted_bits,
    predicted_powersgd,
)
from trimtab.planning.compression.payoff import Exchange

ROOT = Path(__file__).parents[3]
SLOW = LinkCost(s_per_byte=8 / 100e6, latency_s=1e-4)
FAST = LinkCost(s_per_byte=8 / 100e9, latency_s=1e-5)


def candidates(link: LinkCost) -> list[Candidate]:
    values = 25_000_000
    return [
        predicted_bits(BITS, values * 3.5 / 8, link, values=values, codec_s_per_value=2e-9),
        predicted_bits(BITS_FEEDBACK, values * 2.1 / 8, link, values=values, codec_s_per_value=4e-9),
        predicted_powersgd([(512, 2048)] * 24, 4, link, raw_bytes=10**5, flop_per_s=5e10),
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
    assert choice.seconds == pytest.approx(1e-4 + 25e6 * 2.1 / 8 * 8e-8 + 0.1)
    assert choice.reason.startswith("bits-feedback takes least time on this link, 625 ms a step")
    assert "predicted: 6.56 MB, 100 ms of computing" in choice.reason
    assert "bits 925 ms" in choice.reason


def test_measured_exchanges_are_scaled_to_the_gradients() -> None:
    tried = {
        BITS: Exchange(nbytes=1000, plain_s=8.0, compressed_s=2.0, bits=3),
        BITS_FEEDBACK: Exchange(nbytes=1000, plain_s=8.0, compressed_s=1.5, bits=2),
    }
    choice = choose_family([measured(name, exchange, 4000) for name, exchange in tried.items()])
    assert (choice.family, choice.seconds) == (BITS_FEEDBACK, 6.0)
    assert "measured in 2 bits" in choice.reason


def test_latency_counts_for_every_round() -> None:
    many = LinkCost(s_per_byte=0.0, latency_s=1e-3)
    one = predicted_bits(BITS, 1e6, many, values=0, codec_s_per_value=0.0, rounds=1)
    four = predicted_bits(BITS_FEEDBACK, 1.0, many, values=0, codec_s_per_value=0.0, rounds=4)
    assert choose_family([four, one]).family == BITS


def test_powersgd_counts_its_factors_and_products() -> None:
    # Rank 4 of a 3 × 100 matrix is rank 3.
    link = LinkCost(s_per_byte=1.0, latency_s=1e6)
    thin = predicted_powersgd([(3, 100)], 4, link, raw_bytes=8, flop_per_s=1e3)
    assert thin.seconds == pytest.approx(4 * 3 * 103 + 8 + 2e6 + 6 * 3 * 300 / 1e3)


def test_verdicts_say_what_the_committed_results_say() -> None:
    trained = [row for row in _rows("adaptive.json") if row.get("part") == "training"]
    worse = {(row["optimiser"], row["method"]): row["worse"] for row in trained}
    passed = {(verdict.optimiser, verdict.family): verdict.passed for verdict in LOSS_BENCH}
    assert worse[SGD, "1-nearest (canary)"]
    assert worse[ADAMW, "1-nearest (canary)"]
    assert passed[SGD, BITS] == (not worse[SGD, "uniform 4"]) == (not worse[SGD, "adaptive, bits"])
    assert passed[SGD, BITS_FEEDBACK] == (not worse[SGD, "uniform 2, feedback"])
    for key in ((SGD, BITS_FEEDBACK), (ADAMW, BITS_FEEDBACK), (ADAMW, BITS_SCALED)):
        assert passed[key] == (not worse[key[0], f"adaptive, {key[1]}"])
    link = {row["method"]: row for row in _rows("ddp-100mbit-untrained.json")}
    assert not passed[ADAMW, POWERSGD]
    assert link["powersgd4"]["loss"] > link["ddp"]["loss"] + 0.05
    for verdict in LOSS_BENCH:
        assert (ROOT / verdict.evidence).exists()
    assert passed_families() == {BITS, BITS_FEEDBACK}
    assert passed_families(optimiser=ADAMW) == {BITS_SCALED}


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows


@pytest.mark.parametrize(("slower", "chosen"), [(1.05, BITS), (1.2, BITS_FEEDBACK)])
def test_of_two_that_are_about_as_fast_the_one_that_errs_less_is_taken(slower: float, chosen: str) -> None:
    two = [
        Candidate(family=BITS_FEEDBACK, seconds=0.1, how="measured"),
        Candidate(family=BITS, seconds=0.1 * slower, how="measured"),
    ]
    choice = choose_family(two)
    assert choice.family == chosen
    assert all(c.family in choice.reason for c in two)
