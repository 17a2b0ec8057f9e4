"""The harness: order, counts, ratios; and the comparison of losses on made-up figures."""

from __future__ import annotations

import json

import pytest

from trimtab.bench.harness import AA, Timing, interleave
from trimtab.bench.ranks import parse_rate
from trimtab.bench.result import Result
from trimtab.bench.scenarios.loss import CANARY, METHODS, compare
from trimtab.errors import TrimtabError


def test_cases_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    moves: list[tuple[int, int]] = []

    def case(name: str, seconds: float) -> object:
        def run() -> float:
            calls.append(name)
            return seconds * len(calls)

        return run

    cases = {"a": case("a", 1.0), "b": case("b", 2.0)}
    timings = interleave(
        cases,  # type: ignore[arg-type]
        warmup=1,
        repeats=2,
        progress=lambda done, total: moves.append((done, total)),
    )
    assert calls == ["a", "b"] * 3
    assert timings["a"].samples == (3.0, 5.0)
    assert timings["b"].samples == (8.0, 12.0)
    assert moves == [(1, 3), (2, 3), (3, 3)]


def test_a_case_that_does_not_time_itself_is_timed() -> None:
    timings = interleave({"x": lambda: None}, warmup=0, repeats=3)
    assert len(timings["x"].samples) == 3
    assert min(timings["x"].samples) >= 0


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was ten times slower in the second round: it says nothing about a and b.
    a, b = Timing(samples=(2.0, 20.0, 2.0)), Timing(samples=(1.0, 10.0, 1.0))
    assert a.ratio(b) == 2.0
    assert a.median_ms == 2000.0
    assert Timing(samples=(1.0,)).spread == 0.0
    assert b.spread == pytest.approx(4.5)


def made_up(**losses: list[float]) -> dict[str, list[float]]:
    equal = [2.0, 2.01, 1.99]
    return {
        method: losses.get(method, [x + 0.001 for x in equal] if method != "fp32" else equal)
        for method in METHODS
    }


def test_the_comparison_flags_damage_and_nothing_else() -> None:
    rows = {
        row["method"]: row for row in compare(made_up(**{CANARY: [2.0, 2.01, 50.0], "2": [2.1, 2.12, 2.09]}))
    }
    assert rows[CANARY]["worse"]
    assert rows["2"]["worse"]
    assert not any(
        rows[method]["worse"] for method in ("fp32", "fp32" + AA, "8", "4", "4-nearest", "2-feedback")
    )


def test_a_result_is_one_json_object() -> None:
    result = Result(bench="x", summary={"ratio": 1.23456789}, rows=[{"method": "a", "ms": None}])
    tree = json.loads(result.to_json())
    assert tree["summary"] == {"ratio": 1.2346}
    assert tree["rows"] == [{"method": "a", "ms": None}]
    assert {"date", "command", "cpu", "cores", "torch", "trimtab"} <= tree["environment"].keys()


def test_link_rates() -> None:
    assert parse_rate("1gbit") == 1.0
    assert parse_rate("100mbit") == pytest.approx(0.1)
    assert parse_rate("2.5Gbit") == 2.5
    for text in ("fast", "0gbit", "-1gbit", "gbit", "1"):
        with pytest.raises(TrimtabError, match="no link rate"):
            parse_rate(text)
