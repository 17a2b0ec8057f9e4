"""The family that is predicted fastest, among those whose loss was shown to match fp32's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.plan.bits import Assignment
from trimtab.plan.family import (
    BITS,
    BITS_FEEDBACK,
    LOSS_BENCH,
    POWERSGD,
    Candidate,
    LinkCost,
    bits_candidate,
    choose_family,
    passed_families,
    powersgd_candidate,
)

ROOT = Path(__file__).parents[2]
SLOW = LinkCost(s_per_byte=8 / 100e6, latency_s=1e-4)
FAST = LinkCost(s_per_byte=8 / 100e9, latency_s=1e-5)


def candidates() -> list[Candidate]:
    values = 25_000_000
    return [
        bits_candidate(
            BITS, values * 3.5 / 8, values=values, raw_bytes=10**5, codec_s_per_value=2e-9, rounds=1
        ),
        bits_candidate(
            BITS_FEEDBACK, values * 2.1 / 8, values=values, raw_bytes=10**5, codec_s_per_value=4e-9, rounds=1
        ),
        powersgd_candidate([(512, 2048)] * 24, 4, raw_bytes=10**5, flop_per_s=5e10, rounds=1),
    ]


def test_a_slow_link_takes_fewer_bytes_and_a_fast_one_less_work() -> None:
    assert choose_family(candidates(), SLOW).family == BITS_FEEDBACK
    assert choose_family(candidates(), FAST).family == BITS


def test_what_did_not_pass_the_loss_bench_is_never_picked() -> None:
    everything = {BITS, BITS_FEEDBACK, POWERSGD}
    assert choose_family(candidates(), SLOW, passed=everything).family == POWERSGD
    choice = choose_family(candidates(), SLOW)
    assert choice.family != POWERSGD
    assert "powersgd" in choice.reason
    assert "left out" in choice.reason
    with pytest.raises(ValueError, match="none of the families powersgd passed"):
        choose_family(candidates()[2:], SLOW)


def test_the_reason_names_times_and_bytes_of_each() -> None:
    choice = choose_family(candidates(), SLOW)
    assert choice.reason.startswith("bits-feedback is predicted fastest on this link: 6")
    assert "6.66 MB" in choice.reason
    assert "bits 9" in choice.reason
    assert choice.seconds == pytest.approx(1e-4 + 6.6625e6 * 8e-8 + 0.1)


def test_latency_counts_for_every_round() -> None:
    many = LinkCost(s_per_byte=0.0, latency_s=1e-3)
    one = Candidate(family=BITS, nbytes=1e6, compute_s=0.0, rounds=1)
    four = Candidate(family=BITS_FEEDBACK, nbytes=1.0, compute_s=0.0, rounds=4)
    assert choose_family([four, one], many).family == BITS


def test_candidates_count_what_travels() -> None:
    found = Assignment(options={"a": 2}, cost=1000.0, error=0.1, policy="dynamic", met=True)
    assert (
        bits_candidate(BITS, found, values=4000, raw_bytes=24, codec_s_per_value=1e-9, rounds=2).nbytes
        == 1024
    )
    # Rank 4 of a 3 × 100 matrix is rank 3.
    thin = powersgd_candidate([(3, 100)], 4, raw_bytes=8, flop_per_s=1.0, rounds=1)
    assert (thin.nbytes, thin.compute_s, thin.rounds) == (4 * 3 * 103 + 8, 6 * 3 * 300, 2)


def test_verdicts_say_what_the_committed_results_say() -> None:
    loss = {row["method"]: row for row in _rows("loss.json")}
    said = {verdict.family: verdict for verdict in LOSS_BENCH}
    assert said[BITS].passed == (not loss["4"]["worse"])
    assert said[BITS_FEEDBACK].passed == (not loss["2-feedback"]["worse"])
    link = {row["method"]: row for row in _rows("ddp-100mbit.json")}
    assert not said[POWERSGD].passed
    assert link["powersgd4"]["loss"] > link["ddp"]["loss"] + 0.05
    for verdict in LOSS_BENCH:
        assert (ROOT / verdict.evidence).exists()
    assert passed_families() == {BITS, BITS_FEEDBACK}


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows
