"""`trimtab run --local-steps`: an unchanged DDP script whose ranks agree on their weights now and then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.cli.run import torchrun_command
from trimtab.errors import TrimtabError
from trimtab.run_settings import RunSettings

SCRIPT = """
import json, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(128, 128))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
apart = []
for step in range(9):
    weights = [torch.empty(128, 128) for _ in range(2)]
    dist.all_gather(weights, ddp.module.weight.detach())
    apart.append(bool((weights[0] != weights[1]).any()))
    ddp(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(json.dumps(apart))
dist.barrier()
dist.destroy_process_group()
"""


def test_an_unchanged_script_takes_local_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2", "--local-steps", "4"),
            str(tmp_path / "train.py"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout)
    assert apart[0] is False, "all begin alike"
    assert all(apart[1:]), "each goes its own way in between"
    assert "local steps" in done.stderr


def test_mistakes_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    command = torchrun_command(
        ["--nproc-per-node", "2", "--local-steps=auto", script, "--local-steps", "own"]
    )
    assert command[-5:] == [*RunSettings(local_steps="auto").arguments(), script, "--local-steps", "own"]
    with pytest.raises(TrimtabError, match="--local-steps 0: give a number"):
        torchrun_command(["--local-steps", "0", script])
    with pytest.raises(TrimtabError, match="--local-steps often: give a number"):
        torchrun_command(["--local-steps", "often", script])
