"""`trimtab probe --nproc-per-node`: the same command on its own ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.cli.probe import _check_ranks, _ranks_command, probe
from trimtab.errors import TrimtabError


@pytest.mark.parametrize("own", [["--nproc-per-node", "2"], ["--nproc-per-node=2"]])
def test_ranks_get_the_other_options(own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trimtab", "probe", "--model", "gpt2", *own, "--out", "c.json"])
    command = _ranks_command(2)
    start = command.index("probe")
    assert command[start + 1 :] == ["--model", "gpt2", "--out", "c.json"]
    assert command[start - 2 : start] == ["-m", "trimtab.cli"]
    assert command[3:6] == ["--standalone", "--nproc-per-node", "2"]


def test_what_every_rank_would_refuse_is_refused_before_they_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **_: started.append(arguments))
    for batch in ("4", "4,4"):
        with pytest.raises(TrimtabError, match="at least two sizes are needed"):
            probe(out=tmp_path / "cluster.json", batch=batch, nproc_per_node=2)
    with pytest.raises(TrimtabError, match=r"probe: bits \[4, 9\]: .* 1 to 8 bits"):
        probe(out=tmp_path / "cluster.json", bits="4,9", nproc_per_node=2)
    assert not started


def test_contradictions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TrimtabError, match="--merge measures nothing"):
        _check_ranks(2, "cpu", [Path("a.json")])
    with pytest.raises(TrimtabError, match="one rank for each"):
        _check_ranks(1000, "cuda", None)
    _check_ranks(2, "cpu", None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TrimtabError, match="torchrun has started this rank already"):
        _check_ranks(2, "cpu", None)
