"""Uneven tensor parallelism: one rank holds two thirds of every layer's units, the other one third.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import trimtab
from trimtab.models.data import Passages
from trimtab.models.gpt import Gpt

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = trimtab.tensor_parallel(Gpt(width=96, layers=2, heads=6, context=64), mesh, shares=[2, 1])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text, losses = Passages(65), []
for step in range(10):  # the ranks of a tensor-parallel group have the same samples
    loss = model(torch.stack([text[8 * step + sample] for sample in range(8)]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    own = sum(parameter.numel() for parameter in model.parameters())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; rank 0 holds {own} values")
dist.barrier()
dist.destroy_process_group()
