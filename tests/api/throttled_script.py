"""Run by every rank: trains a small network with `trimtab.loader`; rank 0 prints the shares of every step."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from trimtab.api.loader import loader

steps = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = loader(TensorDataset(torch.randn(512 * steps, 256)), 512)
shares = []
for (inputs,) in data:
    shares.append(data.shares)
    data.weigh((ddp(inputs) - inputs).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(json.dumps(shares))
dist.destroy_process_group()
