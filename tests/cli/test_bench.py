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


def test_allreduce_unshaped() -> None:
    result = bench("allreduce", "--link", "none", "--size-mb", "1,2", "--repeats", "2")
    assert result["bench"] == "allreduce"
    assert [(row["method"], row["mb"]) for row in result["rows"]] == [
        ("all-reduce", 1),
        ("all-reduce" + AA, 1),
        ("all-reduce", 2),
        ("all-reduce" + AA, 2),
    ]
    assert all(row["ms"] > 0 and row["wire_mb"] >= row["mb"] * 0.9 for row in result["rows"])
    assert result["environment"]["command"].startswith("trimtab bench allreduce --link none")


@requires(root=True, tools=["ip", "tc"])
def test_allreduce_takes_at_least_what_the_link_takes() -> None:
    result = bench("allreduce", "--link", "100mbit", "--size-mb", "4", "--repeats", "2")
    assert all(row["over_floor"] > 0.9 for row in result["rows"])


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


def test_loss() -> None:
    result = bench("loss", "--steps", "10", "--seeds", "2")
    assert len(result["rows"]) == 8
    assert {"canary_flagged", "4_bits_worse"} <= result["summary"].keys()


@requires(modules=["transformers", "sklearn"])
def test_adaptive() -> None:
    result = bench("adaptive", "--steps", "10", "--seeds", "2")
    parts = [row["part"] for row in result["rows"]]
    assert (parts.count("policy"), parts.count("family"), parts.count("training")) == (15, 14, 19)
    assert all(row["error_over_uniform4"] <= 1 for row in result["rows"] if row["part"] == "policy")
    assert {"canary_flagged", "default_worse", "dynamic_ms_500_layers"} <= result["summary"].keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "No such command 'nothing'"),
        (("allreduce", "--link", "warp"), "'warp' is no link rate"),
        (("allreduce", "--size-mb", "0"), "no list of whole numbers"),
        (("codec", "--bits", "9"), "--bits"),
        (("ddp", "--model", "nonsense"), "choose gpt25m, gpt2, vit"),
        (("ddp", "--device", "cuda"), "cuda"),
        (("straggler", "--only", "nonsense"), "no setting 'nonsense'"),
        (("hybrid", "--only", "nonsense"), "no part 'nonsense' of this bench; choose 1.0/0.75"),
        (("hybrid", "--device", "tpu"), "no device 'tpu'"),
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
