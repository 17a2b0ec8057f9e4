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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(128, 128))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
data = TensorDataset(torch.randn(72, 128))
apart, sizes = [], []
for (inputs,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    sizes.append(len(inputs))
    weights = [torch.empty(128, 128) for _ in range(2)]
    dist.all_gather(weights, ddp.module.weight.detach())
    apart.append(bool((weights[0] != weights[1]).any()))
    ddp(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(json.dumps([apart, sizes]))
dist.barrier()
dist.destroy_process_group()
"""


def run(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`trimtab run` on two ranks, which has to succeed."""
    done = subprocess.run(
        [*(sys.executable, "-m", "trimtab.cli", "run", "--nproc-per-node", "2"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done


def test_an_unchanged_script_takes_local_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("--local-steps", "4", "--batch-sizes", "6,2", tmp_path / "train.py")
    apart, sizes = json.loads(done.stdout)
    assert apart[0] is False, "all begin alike"
    assert all(apart[1:]), "each goes its own way in between"
    assert sizes == [4] * 3 + [6] * 6
    assert "local steps" in done.stderr


OTHERS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    def forward(self, inputs):
        return (inputs.to(torch.complex64) @ self.weight).abs()

dist.init_process_group("gloo")
torch.manual_seed(0)
hooked = DistributedDataParallel(nn.Linear(8, 8))
hooked.register_comm_hook(None, fp16_compress_hook)
for ddp in (DistributedDataParallel(Complex()), hooked):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(9):
        ddp(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


def test_auto_steps_aside_and_a_script_may_have_its_own_hook(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OTHERS)
    done = run("--local-steps", "auto", tmp_path / "train.py")
    assert "weight is complex" in done.stderr
    assert "gradients are exchanged in every step" in done.stderr


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
    with pytest.raises(TrimtabError, match=r"max_penalty=2\.0: use a number between 0 and 1"):
        torchrun_command(["--local-steps", "auto", "--max-penalty", "2", script])


ELASTIC = """
import os, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import trimtab

path, steps = sys.argv[1], 14
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    step = saved["step"]
    optimizer.load_state_dict(saved["optimizer"])
    trimtab.load_state_dict(ddp, saved["trimtab"])
    same = torch.equal(ddp.module.weight, saved["trimtab"]["local_steps"]["agreed"]["weight"])
    os.write(1, f"rank {rank} from step {step} at the agreement {same}\\n".encode())
while step < steps:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ddp(torch.randn(4, 64, generator=generator)).square().mean().backward()
    if first and step == 10 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    state = {"step": step, "optimizer": optimizer.state_dict(), "trimtab": trimtab.state_dict(ddp)}
    if step == 6 and rank == 0:
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
with trimtab.agreed_weights(ddp):
    weights = [torch.empty(64, 64) for _ in range(2)]
    dist.all_gather(weights, ddp.module.weight.detach())
os.write(1, f"rank {rank} ends with equal weights {torch.equal(*weights)}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_lost_worker_comes_back_at_the_last_agreement(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    script, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    done = run("--max-restarts", "1", "--local-steps", "4", script, checkpoint, timeout=500)
    for rank in range(2):
        assert f"rank {rank} from step 6 at the agreement True" in done.stdout
        assert f"rank {rank} ends with equal weights True" in done.stdout
    assert "workers continue from their last agreement" in done.stderr
