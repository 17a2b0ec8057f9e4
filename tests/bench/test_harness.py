"""The harness: order, counts, ratios."""

from __future__ import annotations

import json
import sys

import pytest

from trimtab.bench.harness import Result, Timing, environment, interleave, part


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


def test_jobs_of_equal_length_share_the_progress() -> None:
    moves: list[tuple[int, int]] = []
    second = part(lambda done, total: moves.append((done, total)), 1, 3)
    second(2, 10)
    assert moves == [(12, 30)]


def test_a_result_is_one_json_object() -> None:
    result = Result(bench="x", summary={"ratio": 1.23456789}, rows=[{"method": "a", "ms": None}])
    tree = json.loads(result.to_json())
    assert tree["summary"] == {"ratio": 1.2346}
    assert tree["rows"] == [{"method": "a", "ms": None}]
    assert {"date", "command", "cpu", "cores", "torch", "trimtab"} <= tree["environment"].keys()


def test_the_command_names_the_work_queues_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/trimtab", "bench", "fsdp"])
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert environment()["command"] == "trimtab bench fsdp"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert environment()["command"] == "CUDA_DEVICE_MAX_CONNECTIONS=8 trimtab bench fsdp"
