"""`trimtab run --plan`: the same script, unchanged, as its plan says; refused before a process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.control.plans.plan_cases import net, plan_for

from trimtab.cli.run import BOOTSTRAP, torchrun_command
from trimtab.errors import TrimtabError
from trimtab.planning.plan import save_plan
from trimtab.run_settings import RunSettings

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.control.plans.plan_cases import corpus, net
import trimtab
from trimtab.control.compression.ddp import compression_of
from trimtab.precision.setting import precisions_of

dist.init_process_group("gloo")
rank = dist.get_rank()
data = trimtab.loader(corpus(32), 8)
ddp = DistributedDataParallel(net())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
sizes = []
for (batch,) in data:
    data.weigh((ddp(batch) - batch).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    sizes.append(len(batch))
lowered = {k: str(v) for k, v in precisions_of(ddp).items()}
mine = [sizes, lowered, compression_of(ddp) is not None, ddp.bucket_bytes_cap]
every = [None] * dist.get_world_size()
dist.all_gather_object(every, mine)
if rank == 0:
    print(json.dumps({"argv": sys.argv[1:], "every": every, "said": trimtab.explain(ddp)}))
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    save_plan(plan_for(net(), bits=4, bucket_cap_mb=5.0), tmp_path / "plan.json")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2", "--plan", "plan.json"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, "train.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )


def test_an_unchanged_script_runs_as_planned(folder: Path) -> None:
    done = run(folder, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"] == ["--lr", "0.1"]
    cap = 5 << 20
    assert said["every"] == [[[5] * 4, {}, True, cap], [[3] * 4, {"up": "fp16", "down": "bf16"}, True, cap]]
    assert "gradients in 4 bits" in said["said"]
    assert "divides it itself" not in done.stderr


def test_the_plan_travels_to_the_bootstrap_and_not_to_torchrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("train.py").touch()
    path = folder / "plan.json"
    for given in (["--plan", str(path)], [f"--plan={path}"]):
        command = torchrun_command([*given, "--nproc-per-node", "2", "train.py", "--plan", "own"])
        assert command[1:] == [
            *("-m", "trimtab.cli.agent", "--nproc-per-node", "2"),
            *(
                "-m",
                BOOTSTRAP,
                *RunSettings(plan=str(path.resolve()), adjust="auto").arguments(),
                "train.py",
                "--plan",
                "own",
            ),
        ]


def test_plans_are_refused_before_a_process_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("train.py").touch()
    path = str(folder / "plan.json")
    with pytest.raises(TrimtabError, match=r"for 2 ranks \(1 x fast, 1 x slow\), and this job has 4"):
        torchrun_command(["--nproc-per-node", "2", "--nnodes", "2", "--plan", path, "train.py"])
    torchrun_command(["--nproc-per-node", "2", "--nnodes", "1:2", "--plan", path, "train.py"])
    save_plan(plan_for(net(), trimtab="0.0.1"), path)
    with pytest.raises(TrimtabError, match=r"made by trimtab 0\.0\.1"):
        torchrun_command(["--nproc-per-node", "2", "--plan", path, "train.py"])
    Path(path).write_text("{}")
    with pytest.raises(TrimtabError, match="version: missing"):
        torchrun_command(["--nproc-per-node", "2", "--plan", path, "train.py"])
    with pytest.raises(TrimtabError, match="cannot be read"):
        torchrun_command(["--plan", str(folder / "missing.json"), "train.py"])
