"""A training loop with Accelerate on uneven ranks.

trimtab run --nproc-per-node 2 examples/accelerate_loop.py      # `enable` may go
accelerate launch --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
import trimtab.frameworks

trimtab.frameworks.enable()  # before `prepare`; not needed under `trimtab run`
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for inputs, targets in loader:
    loss = F.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(trimtab.explain(model))
accelerator.wait_for_everyone()
accelerator.end_training()
