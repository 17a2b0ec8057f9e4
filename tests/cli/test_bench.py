"""Every bench end to end, small: the JSON form that scripts listen to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.requirements import requires

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.adaptive import TRAINED
from trimtab.bench.scenarios.loss import CANARY, METHODS
from trimtab.planning.compression.family import SGD


def bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.soak
def test_allreduce_unshaped() -> None:
    result = bench("allreduce", "--link", "none", "--size-mb", "1,2", "--repeats", "2")
    assert result["bench"] == "allreduce"
    assert [(row["method"], row["mb"]) for row in result["rows"]] == [
        ("all-reduce", 1),
        ("all-reduce" + AA, 1),
        ("all-reduce", 2),
        ("all-reduce" + AA, 2),
    ]
    # Each of two ranks sends half of the buffer, and half of the sums; the counters include protocol overhead.
    assert all(1 <= row["wire_mb"] / row["mb"] < 1.3 for row in result["rows"])
    assert result["summary"]["none_ms"] == result["rows"][2]["ms"]
    assert result["environment"]["command"].startswith("trimtab bench allreduce --link none")


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc"])
def test_allreduce_takes_at_least_what_the_link_takes() -> None:
    result = bench("allreduce", "--link", "100mbit", "--size-mb", "4", "--repeats", "2")
    assert all(row["over_floor"] > 0.9 for row in result["rows"])


def test_scale() -> None:
    result = bench("scale", "--ranks", "24", "--classes", "2", "--layers", "1", "--gbits", "10")
    assert [(row["ranks"], row["classes"]) for row in result["rows"]] == [(24, 2)]
    assert result["summary"]["predicted_over_ddp"] <= 1


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc"])
def test_hierarchy() -> None:
    result = bench("hierarchy", "--link", "10gbit", "--layers", "1", "--inside-mb", "1", "--repeats", "2")
    wire = {row["method"]: row.get("wire_mb_between_hosts") for row in result["rows"]}
    assert len(wire) == 11
    # Of 4 ranks' shares of a flat exchange half cross; in two levels each host sends its sums once.
    assert wire["hierarchical compressed, shared memory"] < 0.7 * wire["flat compressed"]
    assert wire["hierarchical compressed, gloo"] < 0.7 * wire["flat compressed"]
    assert wire["hierarchical plain, gloo"] < 0.8 * wire["flat plain"]
    assert {"hierarchical_compressed_over_best_other", "shared_memory_over_gloo_inside"} <= result[
        "summary"
    ].keys()


@pytest.mark.soak
def test_loss() -> None:
    result = bench("loss", "--steps", "10", "--seeds", "2")
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == list(METHODS)
    assert rows["fp32"]["gap"] == 0
    assert 2 < rows["fp32"]["final_loss"] < 5, "a model that has learned nothing has a loss of ln 256 = 5.5"
    for row in rows.values():
        assert row["gap"] == pytest.approx(row["final_loss"] - rows["fp32"]["final_loss"], abs=1e-3)
    assert result["summary"] == {
        "canary_flagged": rows[CANARY]["worse"],
        "4_bits_worse": rows["4"]["worse"],
        "4_bits_gap": rows["4"]["gap"],
        "aa_gap": rows["fp32" + AA]["gap"],
    }


@pytest.mark.soak
def test_adaptive() -> None:
    result = bench("adaptive", "--steps", "4", "--seeds", "2")
    rows = {(row["optimiser"], row["method"]): row for row in result["rows"]}
    assert list(rows) == [(optimizer, method) for optimizer, methods in TRAINED.items() for method in methods]
    full, four = (rows[SGD, method]["wire_mb"] for method in ("fp32", "uniform 4"))
    assert 1 / 8 < four / full < 1 / 6, "4 bits of 32, scales, and what is too small to be compressed"
    assert rows[SGD, "uniform 2"]["wire_mb"] < rows[SGD, "uniform 3"]["wire_mb"] < four
    assert {"canary_flagged", "default_worse", "adamw_default_worse"} <= result["summary"].keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "No such command 'nothing'"),
        (("allreduce", "--link", "warp"), "'warp' is not a link rate"),
        (("allreduce", "--size-mb", "0"), "not a list of whole numbers"),
        (("codec", "--bits", "9"), "Invalid value for '--bits'"),
        (("tp", "--speed", "2"), "'2' is not a list of speeds above 0 and up to 1"),
        (("loss", "--seeds", "1"), "Invalid value for '--seeds'"),
        (("ddp", "--model", "nonsense"), "choose gpt25m, gpt2, vit"),
        (("ddp", "--device", "cuda"), "--device cuda: torch finds no CUDA device here"),
        (("straggler", "--only", "nonsense"), "no setting 'nonsense'"),
        (("hybrid", "--only", "nonsense"), "no part 'nonsense' of this bench; choose 1.0/0.75"),
        (("hybrid", "--device", "tpu"), "--device 'tpu' is unknown; use cpu or cuda"),
        (("hybrid", "--only", "loss"), "name a cluster too"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
