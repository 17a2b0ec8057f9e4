"""Run by every rank: reduces a bucket by every route and counts what passes its host's interface and is posted.

Rank 0 prints a row for each route: bytes received and sent by each host, and the most messages that a rank
posts itself, one after another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimtab._compat import reduce_scatter_single
from trimtab.codec import Block
from trimtab.collectives import Hierarchy, Method, Piece, Reduction, find_hosts, finish, reduction_for

NUMEL, BITS, BLOCK = 1 << 19, 8, 1024
CPU = torch.device("cpu")
CALLS = 3
"""Of which the least is counted: on a busy machine TCP sends some packets again."""


def through_interface() -> list[int]:
    """Bytes received and sent by this host, without its loopback."""
    totals = [0, 0]
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, figures = line.split(":")
        if name.strip() != "lo":
            totals = [
                total + int(figures.split()[place]) for total, place in zip(totals, (0, 8), strict=True)
            ]
    return totals


def _reduce(reduction: Reduction, flat: torch.Tensor) -> None:
    finish(reduction.steps(flat, step=0, scale=1.0))


def counts(run: Callable[[], object], posted: list[int]) -> dict[str, Any]:
    """What every host receives and sends in a call, and the most that a rank posts."""
    run()  # opens the connections
    least = [sys.maxsize] * 2
    for _ in range(CALLS):
        dist.barrier()
        posted[0], before = 0, through_interface()
        dist.barrier()
        run()
        dist.barrier()
        passed = (now - then for now, then in zip(through_interface(), before, strict=True))
        least = [min(pair) for pair in zip(least, passed, strict=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (int(os.environ["GROUP_RANK"]), least, posted[0]))
    return {
        "passed": {str(host): both for host, both, _ in everyone},
        "posted": max(count for _, _, count in everyone),
    }


def main() -> None:
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    hosts = find_hosts(group, CPU)
    hierarchy = Hierarchy(group, CPU) if hosts.flat_reason() is None else None
    posted = [0]
    torch_distributed: Any = dist
    post = dist.batch_isend_irecv

    def counted(operations: Any) -> Any:
        posted[0] += 1
        return post(operations)

    torch_distributed.batch_isend_irecv = counted
    methods: tuple[Method | None, ...] = (None, "all_gather", "scatter_reduce", "ring", "tree", "halving")
    rows = []
    for method in methods:
        for level in (None, hierarchy) if hierarchy else (None,):
            piece = Piece(name="w", offset=0, numel=NUMEL, bits=BITS, block=BLOCK)
            flat = torch.randn(NUMEL)
            reduction = reduction_for(
                [(piece, flat.shape)],
                flat.dtype,
                CPU,
                (group, group),
                Block(bits=BITS),
                seed=0,
                hierarchy=level,
                method=method,
            )
            reduce = partial(_reduce, reduction, flat)
            rows.append({"method": method, "two_levels": level is not None, **counts(reduce, posted)})
    piece = Piece(name="w", offset=0, numel=NUMEL, bits=BITS, block=BLOCK)
    flat = torch.randn(NUMEL)
    last = hosts.ranks[-1]
    sparing = reduction_for(
        [(piece, flat.shape)], flat.dtype, CPU, (group, group), Block(bits=BITS), seed=0, spared=last
    )
    counted_bytes = counts(partial(_reduce, sparing, flat), posted)
    rows.append({"method": None, "two_levels": False, "spared": list(last), **counted_bytes})
    values, own = torch.zeros(NUMEL), torch.zeros(NUMEL // dist.get_world_size())
    if len(own) * dist.get_world_size() == NUMEL:
        scatter = partial(reduce_scatter_single, own, values, group, dist.ReduceOp.SUM)
        rows.append({"method": "reduce_scatter", "two_levels": False, **counts(scatter, posted)})
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.barrier()
    if hierarchy is not None:
        hierarchy.close()
    dist.destroy_process_group()


main()
