"""A rank that dies mid-step ends the job soon and clearly; torchrun's restart continues to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = r"""
import hashlib, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import trimtab
from trimtab.codec import Block

die, folder = sys.argv[1] == "die", sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
path = f"{folder}/rank-{rank}.pt"
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
trimtab.compress(ddp, Block(bits=2), error_feedback=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    first = saved["step"]
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trimtab.load_state_dict(ddp, saved["trimtab"])
for step in range(first, 8):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    loss = ddp(torch.randn(8, 64, generator=generator)).square().mean()
    if die and step == 4 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ddp.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.barrier()
    torch.save({"step": step + 1, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(),
                "trimtab": trimtab.state_dict(ddp)}, path)
    dist.barrier()
values = torch.cat([p.detach().flatten() for p in ddp.parameters()])
digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
os.write(1, f"digest {digest}\n".encode())  # in one piece: the ranks share the stream
dist.destroy_process_group()
"""


def train(folder: Path, word: str, restarts: int) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "--max-restarts", str(restarts), str(script), word, str(folder)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        # Otherwise torchrun's restart hands Gloo the dead workers' addresses now and then (torch 2.13).
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def digests(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line for line in done.stdout.splitlines() if line.startswith("digest")}


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_after_a_killed_rank_torchruns_restart_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    whole.mkdir()
    restarted.mkdir()
    expected = train(whole, "live", 0)
    assert expected.returncode == 0, expected.stderr
    assert len(digests(expected)) == 1
    done = train(restarted, "die", 1)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert digests(done) == digests(expected)
