"""The wrapped process group, and its place in torch's registry of groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.collectives.groups import gloo_backend, nccl_backend, register_group


def plain_group(described: Any, nccl_options: Any = None) -> dist.ProcessGroup:
    """Gloo for CPU tensors and, where there is a GPU, NCCL for CUDA tensors; not registered with torch yet.

    `described` is what torch gives the creator of a backend: store, ranks, timeout and name of the group.
    """
    store, rank, size = described.store, described.group_rank, described.group_size
    common = {
        "timeout": described.timeout,
        "name": described.group_id,
        "global_ranks": described.global_ranks_in_group,
    }
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gloo = gloo_backend(PrefixStore("gloo/", store), rank, size, **common)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = nccl_options or dist.ProcessGroupNCCL.Options()
        nccl = nccl_backend(PrefixStore("nccl/", store), rank, size, options, **common)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_default_backend(kinds.NCCL)
    return group


OPERATIONS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Operations of a process group in torch 2.11 to 2.13; some exist under one name in one version only."""


class ForwardingGroup(dist.ProcessGroup):
    """A process group in Python that forwards every operation to a plain one; subclasses change some.

    Operations are forwarded, not left to the base class, because that calls the backend while holding the GIL, and
    Gloo's thread may be waiting for the GIL while holding a lock of its own, in order to free a tensor of the
    previous operation. The plain group's methods release the GIL. They are bound without a Python function in
    between, which torch.compile would try to trace.
    """

    def __init__(self, plain: dist.ProcessGroup) -> None:
        super().__init__(plain.rank(), plain.size())  # type: ignore[call-arg]
        self._plain = plain
        # Code that looks up a device's backend (DeviceMesh, FSDP2) finds the plain group's.
        kinds = dist.ProcessGroup.BackendType
        for device in plain._device_types:
            kind = kinds.NCCL if device.type == "cuda" else kinds.GLOO
            self._register_backend(device, kind, plain._get_backend(device))
            self._set_default_backend(kind)
        for name in OPERATIONS:
            inherited = getattr(dist.ProcessGroup, name, None)
            if inherited is not None and getattr(type(self), name) is inherited:
                setattr(self, name, partial(inherited, plain))


def register_view(group: dist.ProcessGroup, view: dist.ProcessGroup, name: Any) -> str:
    """Let torch find `view` by `name`, as a group of the same ranks as `group`; returns the name."""
    world: Any = dist.distributed_c10d._world
    backend, store = world.pg_map[group]
    register_group(
        view,
        name,
        desc=f"{group.group_desc}: exact view",
        backend=backend,
        config=world.pg_backend_config[group],
        store=store,
        ranks=world.pg_group_ranks[group],
    )
    return str(name)
