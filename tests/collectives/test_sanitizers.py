"""Shared memory's C++ under AddressSanitizer and UndefinedBehaviorSanitizer, on sound and on hostile calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.requirements import requires

SOURCES = Path(__file__).parents[2] / "csrc"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]


@requires(compiler=True)
def test_no_exchange_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))))
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    if subprocess.run([compiler, *FLAGS, probe, "-o", tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip("the compiler has no sanitizers")
    sources = [SOURCES / "shared_memory.cpp", SOURCES / "fuzz" / "shared_memory.cpp"]
    subprocess.run([compiler, *FLAGS, *sources, "-o", tmp_path / "fuzz"], check=True)
    for seed in range(3):
        run = subprocess.run(
            [tmp_path / "fuzz", "60", str(seed)], capture_output=True, text=True, timeout=100
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("60 rounds")
