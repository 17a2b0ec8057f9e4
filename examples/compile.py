"""torch.compile before DDP or after it: gradients are compressed either way.

torchrun --nproc-per-node 2 examples/compile.py
torchrun --nproc-per-node 2 examples/compile.py after
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.codec import Block

backend = "inductor" if torch.cuda.is_available() else "aot_eager"  # inductor needs a C++ compiler on a CPU
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
layers = layers.to(device)
step: Any
if "after" in sys.argv:
    ddp = trimtab.compress(DistributedDataParallel(layers), Block(bits=4))
    step = torch.compile(ddp, backend=backend)
else:
    ddp = trimtab.compress(DistributedDataParallel(torch.compile(layers, backend=backend)), Block(bits=4))
    step = ddp
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
inputs, targets = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)
losses = []
for _ in range(10):
    loss = F.cross_entropy(step(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {trimtab.explain(ddp)}")
dist.barrier()
dist.destroy_process_group()
