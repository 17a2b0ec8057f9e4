"""Run every test that needs a GPU, and leave what happened as JSON:

    PYTHONPATH=src:. python3 -m tests.gpu gpu.json [pytest's arguments]

It needs torch, triton and pytest, no plugins and no installation of trimtab. The file is rewritten after each test,
so that a run which is cut short leaves what it has: the machine, versions, date and command, and for each test its
outcome, its seconds and the figures it recorded.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 9 * 60
"""Seconds after which the run shows where every thread is, and ends: a hang must not cost a day."""


SLICED = ("test_adaptive", "test_ddp", "test_doors", "test_local_steps", "test_shared_memory", "test_mps")
"""Tests that divide the GPU among ranks: they run first, before this process itself has a context on it."""


class Report:
    """A pytest plugin that keeps outcomes and figures (`record_property`)."""

    def __init__(self, path: Path, arguments: list[str]) -> None:
        from trimtab.bench.harness import environment

        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}
        self._environment = environment()
        self._environment["command"] = " ".join(["python3 -m tests.gpu", path.name, *arguments])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not any(name in item.nodeid for name in SLICED))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            # A skip carries (file, line, reason), a failure its traceback.
            test["reason"] = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-4000:]
            )
        if report.when == "teardown":
            if report.user_properties:
                test["figures"] = dict(report.user_properties)
            self._write()

    def _write(self) -> None:
        outcomes = [test["outcome"] for test in self._tests.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
        whole = {"environment": self._environment, **counts, "tests": self._tests}
        self._path.write_text(json.dumps(whole, indent=1) + "\n")


def main(path: str, *arguments: str) -> int:
    os.chdir(ROOT)
    # Ranks are processes of their own, which find the same sources.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compilers that outlives its test
    # Not pyproject.toml: it configures plugins that this machine may not have.
    settings = [
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
        "--confcutdir",
        str(ROOT),
        "--import-mode=importlib",
    ]
    settings += ["-p", "no:cacheprovider", "-W", "error::FutureWarning", "-ra", "--durations=10"]
    settings += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    report = Report(Path(path).absolute(), list(arguments))
    return int(pytest.main([*settings, "tests/gpu", *arguments], plugins=[report]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
