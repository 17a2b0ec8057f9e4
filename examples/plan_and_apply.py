"""Measure, plan, apply: what each rank should do, decided from measurements, then done.

torchrun --nproc-per-node 2 examples/plan_and_apply.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.measure.probe import probe
from trimtab.models.data import Passages
from trimtab.models.gpt import Gpt

global_batch = 8

dist.init_process_group("gloo")
cluster = probe(
    "gpt", batches=(2, 4), precisions=(), bits=(4,), seconds=60
)  # `trimtab probe` writes it to a file
plan = trimtab.plan("gpt", cluster, global_batch, layout="data")  # `trimtab plan` does
torch.manual_seed(0)
ddp = DistributedDataParallel(Gpt(width=128, layers=4, heads=4, context=128))
trimtab.apply(ddp, plan)
loader = trimtab.loader(Passages(129), batch_size=global_batch, plan=ddp)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
for step, text in enumerate(loader):
    loader.weigh(ddp(text)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 9:
        break
if dist.get_rank() == 0:
    print(f"shares {plan.shares}; {trimtab.explain(ddp)}")
dist.barrier()
dist.destroy_process_group()
