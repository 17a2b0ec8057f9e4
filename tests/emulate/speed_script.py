"""Run by every rank: windows of a matrix-product loop, an optimizer step after each.

Rank 0 prints, for each window, the products each rank did and the part of its core that
each of them had: without nearly all of its core, a free rank does not show its rate.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import distributed

windows, seconds = int(sys.argv[1]), float(sys.argv[2])
distributed.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
matrix = torch.randn(256, 256)
rows = []
for _ in range(windows):
    distributed.barrier()
    start, busy, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(matrix, matrix)
        count += 1
    share = (time.process_time() - busy) / (time.perf_counter() - start)
    row = torch.zeros(distributed.get_world_size(), 2)
    row[distributed.get_rank()] = torch.tensor([count / seconds, share])
    distributed.all_reduce(row)
    rows.append(row.tolist())
    weight.grad = torch.ones(1)
    optimizer.step()
if distributed.get_rank() == 0:
    print(json.dumps(rows))
distributed.destroy_process_group()
