"""The FSDP2 bench, end to end and small."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.support.requirements import requires

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.fsdp import BOTH, CANARIES, IDEAL, KEPT, METHODS


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc"])
def test_fsdp() -> None:
    """Two hosts, so that the bytes each rank sends can be told apart."""
    sizes = ["--link", "10gbit", "--layers", "1", "--repeats", "2", "--steps", "4", "--seeds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "bench", "fsdp", *sizes, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["method"]: row for row in result["rows"]}
    kept = {method + KEPT for method in METHODS if not method.endswith(AA)}
    assert rows.keys() == {*METHODS, *kept, IDEAL, *CANARIES}
    plain, gradients, both = (rows[method] for method in ("plain", "gradients 4", BOTH))
    # In fp32 Gloo sends the weights twice and the gradients, half a buffer too often, as much again. Then come
    # 4 bits of 32 without the excess, and 8 of 32; small parameters stay as they are.
    assert 0.45 < plain["weights_mb"] / plain["wire_mb_per_step"] < 0.55
    assert 0.5 < gradients["of_plain_bytes"] < 0.62
    assert 0.1 < both["of_plain_bytes"] < 0.25
    assert rows["plain" + KEPT]["wire_mb_per_step"] < 0.8 * plain["wire_mb_per_step"]
    assert rows[IDEAL]["wire_mb_per_step"] < 0.01 * plain["wire_mb_per_step"]
    assert {"trimtab_over_plain", "trimtab_of_ideal", "trimtab_worse", "canaries_flagged"} <= result[
        "summary"
    ].keys()
