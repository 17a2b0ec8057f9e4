"""The wrapped process group, and its place in torch's registry of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Sequence


def plain_group(
    store: Any,
    rank: int,
    size: int,
    timeout: Any,
    *,
    name: str,
    global_ranks: Sequence[int],
    nccl_options: Any = None,
) -> dist.ProcessGroup:
    """Gloo for CPU tensors and, where there is a GPU, NCCL for CUDA ones; torch knows nothing of it yet."""
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gloo = c10d.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    gloo.options.global_ranks_in_group, gloo.options.group_name = list(global_ranks), name
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = nccl_options or dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group, options.group_name = list(global_ranks), name
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_default_backend(kinds.NCCL)
    return group


def register_view(group: dist.ProcessGroup, view: dist.ProcessGroup, name: str) -> str:
    """Let torch find `view` by `name`, as a group of the same ranks as `group`; gives the name.

    torch has no public way to add a group that it did not make itself: these are the tables that
    `new_group` fills.
    """
    world: Any = dist.distributed_c10d._world
    view._set_group_name(name)
    view._set_group_desc(f"{group.group_desc}: exact view")
    world.pg_map[view] = world.pg_map[group]
    world.pg_names[view] = name
    world.pg_group_ranks[view] = world.pg_group_ranks[group]
    world.pg_backend_config[view] = world.pg_backend_config[group]
    world.pg_to_tag[view] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(view)
    c10d._register_process_group(name, view)
    return name
