"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on sound and on hostile calls."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.requirements import requires

SOURCES = Path(__file__).parents[2] / "csrc"
SANITIZERS = "-fsanitize=address,undefined"
# Not optimized: the sanitized kernels compile in a quarter of the time, and every access is still there.
COMMON = ["-w", "-std=c++17", "-O0", "-ffp-contract=off", SANITIZERS, "-fno-sanitize-recover=all"]
X86 = {
    "avx2.cpp": ["-mavx2", "-mf16c"],
    "avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}


@requires(compiler=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [100, pytest.param(5000, marks=pytest.mark.soak)])
def test_no_call_reads_or_writes_out_of_bounds(rounds: int, tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))))
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    if subprocess.run(
        [compiler, SANITIZERS, probe, "-o", tmp_path / "probe"], capture_output=True
    ).returncode:
        pytest.skip("the compiler has no sanitizers")

    files: dict[str, list[str]] = {"api.cpp": [], "portable.cpp": [], "fuzz/main.cpp": []}
    if platform.machine() in ("x86_64", "AMD64"):
        files = {name: [*flags, "-DTRIMTAB_X86=1"] for name, flags in {**files, **X86}.items()}
    objects, builds = [], []
    for name, flags in files.items():
        objects.append(tmp_path / (name.replace("/", "-") + ".o"))
        command = [compiler, *COMMON, *flags, "-c", str(SOURCES / name), "-o", str(objects[-1])]
        builds.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for build in builds:
        _, errors = build.communicate()
        assert build.returncode == 0, errors
    subprocess.run([compiler, SANITIZERS, "-pthread", *objects, "-o", tmp_path / "fuzz"], check=True)

    runs = [
        subprocess.Popen(
            [tmp_path / "fuzz", str(rounds), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for run in runs:
        out, errors = run.communicate(timeout=600)
        assert run.returncode == 0, errors
        assert out.startswith(f"{rounds} rounds")
