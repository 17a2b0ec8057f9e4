"""Which ranks take local steps as one worker."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.collectives import find_hosts
from trimtab.doors.ddp import has_other_hook
from trimtab.errors import TrimtabError

WhoWorks = Literal["auto", "ranks", "hosts"]


def ranks_of_workers(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, who: WhoWorks
) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of each worker; None where every rank is one. Collective."""
    if who == "ranks":
        return None
    hosts = find_hosts(group, device).ranks
    several = 1 < len(hosts) < group.size()
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if who == "auto":
        return hosts if several and ddp is not None and not has_other_hook(ddp) else None
    if ddp is None:
        raise TrimtabError(
            "local_steps: workers='hosts' averages the gradients of a host's ranks by DistributedDataParallel; "
            "wrap the model in it first"
        )
    if has_other_hook(ddp):
        raise TrimtabError(
            "local_steps: this module has a communication hook of its own; use workers='ranks'"
        )
    return hosts if several else None
