"""`trimtab emulate --run`: what `trimtab run` does, on emulated hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.emulate.machines import pair

from trimtab.cli.app import main
from trimtab.cluster import save_cluster

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
import torch, torch.distributed as dist, trimtab
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
if dist.get_rank() == 0:
    print(sys.argv[1:], __name__, trimtab.explain(ddp))
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("this is rank 1's own mistake")
"""


@pytest.mark.timeout(300)
def test_a_script_runs_as_under_run_and_its_failure_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    save_cluster(pair(speed=0.5), tmp_path / "cluster.json")
    command = ["emulate", "cluster.json", "--run", "--local-steps", "3", "--", "train.py", "--lr", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("['--lr', '0.1'] __main__ local steps: 2 workers agree every 3 steps")
    assert "trimtab: rank 1 (host b) failed:\nTraceback" in done.stderr
    assert done.stderr.endswith("ValueError: this is rank 1's own mistake\n")
    assert done.stderr.count("Traceback") == 1
    assert "bootstrap.py" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "--nnodes", "3"], "--nnodes is decided by the cluster file"),
        (["--run", "--local-steps", "none"], "--local-steps none: give a number of steps"),
        (["--run", "--plan", "nowhere.json"], "nowhere.json"),
        (["--plan", "plan.json"], "there is no option --plan"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it started')")
    save_cluster(pair(), tmp_path / "cluster.json")
    with pytest.raises(SystemExit) as exit_:
        main(["emulate", "cluster.json", *options, "--", "train.py"])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
