"""A training loop with Lightning Fabric on uneven ranks: `strategy="trimtab"`.

python examples/lightning_fabric.py                                  # Fabric starts the second rank itself
trimtab run --nproc-per-node 2 examples/lightning_fabric.py          # here strategy="ddp" would do as well
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
import trimtab.frameworks.lightning  # registers strategy="trimtab"

fabric = Fabric(strategy="trimtab", devices=2, accelerator="auto" if torch.cuda.device_count() > 1 else "cpu")
fabric.launch()
fabric.seed_everything(0, verbose=False)
dataset = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))
layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16, shuffle=True))

for inputs, targets in loader:
    fabric.backward(F.cross_entropy(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
fabric.print(trimtab.explain(model._forward_module))
fabric.barrier()
