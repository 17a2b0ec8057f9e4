"""An FSDP2 loop as torchtitan writes it: every block its own unit, gradients and gathered weights in fewer bits.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trimtab
from trimtab.codec import Block
from trimtab.models.data import Passages
from trimtab.models.gpt import Gpt

steps, batch = 10, 4

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = Gpt(width=128, layers=2, heads=4, context=64).to(kind)
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
# Without a codec, trimtab.compress(model) decides by itself whether it pays; under `trimtab run` it is not needed.
trimtab.compress(model, Block(bits=4), weight_bits=8)  # type: ignore[arg-type]  # DDP or sharded
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text, losses = Passages(65), []
for step in range(steps):
    first = (step * dist.get_world_size() + dist.get_rank()) * batch
    loss = model(torch.stack([text[first + sample] for sample in range(batch)]).to(kind))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {trimtab.explain(model)}")
dist.barrier()
dist.destroy_process_group()
