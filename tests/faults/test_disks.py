"""Full and read-only disks: what is written is whole or the old one, and the error names the file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.requirements import requires

from trimtab.codec import Block
from trimtab.collectives import Piece
from trimtab.control.compression.agreement import _check_log
from trimtab.control.compression.layer_log import LayerLog
from trimtab.errors import TrimtabError
from trimtab.strict_files import replace_file

pytestmark = requires(root=True, tools=["mount", "umount"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


@pytest.mark.parametrize("problem", ["full", "read-only"])
def test_a_report_is_the_old_one_or_whole(disk: Path, problem: str) -> None:
    report = disk / "plan.json"
    replace_file(report, "old")
    if problem == "read-only":
        read_only(disk)
    with pytest.raises(TrimtabError, match=r"plan\.json: cannot be written: (No space|Read-only)"):
        replace_file(report, "new" * 100_000)
    assert report.read_text() == "old"
    assert [path.name for path in disk.iterdir()] == ["plan.json"]


def test_a_log_that_finds_no_room_ends_and_says_so(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LayerLog(disk / "layers.jsonl", lambda: Block(bits=4), every=1, seed=0, rank=0)
    piece = Piece(name="weight", offset=0, numel=1024, bits=4, block=1024)
    for step in range(2000):
        log(step, [piece], torch.ones(1024))
    log.close()
    assert capsys.readouterr().err.count("layers.jsonl ends here: [Errno 28]") == 1


def test_a_log_on_a_read_only_disk_is_refused_at_once(disk: Path) -> None:
    read_only(disk)
    with pytest.raises(TrimtabError, match=r"layers\.jsonl' cannot be written: .*Read-only"):
        _check_log(disk / "layers.jsonl")
