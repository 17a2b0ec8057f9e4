"""The checks behind `trimtab doctor`, where something is broken or missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.measure import health
from trimtab.measure.health import Finding, RankReport, compare_versions, examine_rank


def report(rank: int, **versions: str) -> RankReport:
    return RankReport(
        rank=rank,
        host=f"h{rank}",
        versions={"trimtab": "1", "torch": "2.11", "python": "3.11.1", **versions},
        findings=[],
    )


def test_ranks_that_differ_are_named() -> None:
    assert compare_versions([report(0), report(1)]).status == "ok"
    torch_differs = compare_versions([report(0), report(1), report(2, torch="2.13")])
    assert torch_differs.status == "broken"
    assert torch_differs.found == "torch: rank 0 has 2.11, rank 2 (h2) has 2.13"
    python_differs = compare_versions([report(0), report(1, python="3.12.0")])
    assert python_differs.status == "limited"
    assert "rank 1 (h1) has 3.12.0" in python_differs.found


def test_a_report_survives_the_way_to_another_rank() -> None:
    own = examine_rank()
    assert RankReport.from_tree(own.as_tree()) == own
    assert replace(own, findings=[]) != own


def test_an_old_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    (finding,) = health._versions()
    assert (finding.status, finding.change) == ("broken", "install torch 2.11 or newer")


def test_a_missing_library_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise TrimtabError("libtrimtab.so is missing. Install a C++ compiler")

    monkeypatch.setattr(health, "NativeKernels", missing)
    finding, *_ = health._kernels()
    assert finding.status == "limited"
    assert finding.change == "libtrimtab.so is missing. Install a C++ compiler"


def test_shared_memory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FOLDER", tmp_path / "none")
    (finding,) = health._shared_memory()
    assert finding.status == "limited"
    assert "No such file" in finding.found


def test_a_check_that_fails_is_a_finding() -> None:
    def odd_check() -> Iterator[Finding]:
        raise OSError("no such thing")
        yield

    (*_, finding) = examine_rank([odd_check]).findings
    assert (finding.check, finding.status) == ("odd check", "broken")
    assert "no such thing" in finding.found
