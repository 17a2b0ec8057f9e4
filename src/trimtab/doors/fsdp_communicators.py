"""Communicators of their own for what FSDP2 sends at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from trimtab.collectives.groups import backend_kind, private_groups


def gather_groups(
    param_groups: Iterable[Any], device: torch.device
) -> dict[dist.ProcessGroup, dist.ProcessGroup]:
    """For each NCCL group that shards parameters another one of the same ranks, to gather weights in. Collective.

    A communicator of NCCL does one thing at a time: gradients would wait for weights that nobody needs yet.
    """
    gathers: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for sharded in param_groups:
        group = getattr(sharded.mesh_info, "shard_process_group", None)
        if group is None or group in gathers or backend_kind(group, device) != "nccl":
            continue
        ranks = dist.get_process_group_ranks(group)
        if ranks == sorted(ranks):  # a private group numbers its ranks so
            gathers[group] = private_groups(group, device, 1)[0]
    return gathers
