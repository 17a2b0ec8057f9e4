"""A Lightning script under `trimtab run --auto` on two unequal ranks: it gets a plan, and trains as one device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")
rank = int(os.environ["RANK"])
os.environ["TRIMTAB_DEVICE_CLASS"] = ("quick", "lame")[rank]
import lightning, torch, torch.distributed as dist, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.model_state import state_of
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
STEPS, LR = 16, 0.01
data = TensorDataset(torch.randn(16 * STEPS, 8), torch.randint(0, 4, (16 * STEPS,)))

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.004 * len(x) if rank else 0)
        return x

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4), Slow())

class Module(lightning.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.net, self.sizes, self.planned = net(), [], []
        self.seen = torch.zeros(())
        self.automatic_optimization = not manual
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, index):
        assert self.global_step >= 0
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.sizes.append(len(batch[0]))
        self.seen = self.seen + loss.detach()
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss
    def validation_step(self, batch, index):
        self.log("held_out", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)
    def on_train_batch_end(self, *_):
        ddp = self.trainer.strategy.model
        pilot = state_of(ddp).autopilot
        if pilot is not None and pilot._future is not None:
            pilot._future.exception()  # planning takes longer than these steps
        self.planned.append(active_plan_of(ddp) is not None)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

order = list(DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0))
alone = net()
optimizer = torch.optim.AdamW(alone.parameters(), lr=LR, weight_decay=0.0)
for step in range(STEPS):
    inputs, classes = data[order[16 * step : 16 * step + 16]]
    F.cross_entropy(alone[:3](inputs), classes).backward()
    optimizer.step()
    optimizer.zero_grad()

module = Module(manual=sys.argv[1] == "manual")
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", num_sanity_val_steps=1, **quiet
)
trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=64))
gap = max((a - b).abs().max().item() for a, b in zip(module.net.parameters(), alone.parameters(), strict=True))
found = {"sizes": module.sizes, "planned": module.planned, "gap": gap}
with open(f"rank-{rank}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def train(folder: Path, kind: str) -> tuple[list[dict[str, Any]], str]:
    """What the ranks of the script found, and what it logged."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    flags = ["--auto", "--adjust", "exact", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", "run", *flags, str(script), kind],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], done.stderr


def sizes_add_up(quick: dict[str, Any], lame: dict[str, Any]) -> bool:
    """Whether each step was run once, on the global batch of the script."""
    return [a + b for a, b in zip(quick["sizes"], lame["sizes"], strict=True)] == [16] * 16


@pytest.mark.timeout(200)
def test_a_lightning_script_gets_a_plan_and_stays_exact(tmp_path: Path) -> None:
    (quick, lame), log = train(tmp_path, "automatic")
    assert quick["planned"] == lame["planned"], "all ranks between the same two steps"
    assert quick["planned"][-1], log
    assert not quick["planned"][2]
    assert sizes_add_up(quick, lame)
    assert quick["sizes"][-1] > lame["sizes"][-1], log
    assert max(quick["gap"], lame["gap"]) < 1e-10
    assert log.count("operators timed in") == 1
    assert "DDP's buckets" not in log


@pytest.mark.timeout(200)
def test_manual_optimization_is_left_as_it_is(tmp_path: Path) -> None:
    (quick, lame), log = train(tmp_path, "manual")
    assert not any(quick["planned"] + lame["planned"])
    assert sizes_add_up(quick, lame)
    assert max(quick["gap"], lame["gap"]) < 1e-10
    reason = "no plan is made (Module optimizes manually, so its training_step cannot be repeated)"
    assert log.count(reason) == 1, log
