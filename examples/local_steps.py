"""Local steps over a very slow line: ranks train by themselves and agree on their weights now and then.

torchrun --nproc-per-node 2 examples/local_steps.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
trimtab.local_steps(ddp, every=5)  # "auto" measures the link and chooses
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
for _ in range(20):
    inputs = torch.randn(32, 64, generator=generator)
    loss = F.cross_entropy(ddp(inputs), inputs[:, :10].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.2f}; {trimtab.explain(ddp)}")
dist.barrier()
dist.destroy_process_group()
