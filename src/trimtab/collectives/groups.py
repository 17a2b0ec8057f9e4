"""Private process groups: invisible to the script, with names that their ranks agree on.

`dist.new_group(use_local_synchronization=True)` names a group by how many groups *this process* has created, so
ranks in different subgroups wait for each other under different names, forever. It also ignores the timeout of the
parent group, and takes its backend from the default group. Here the first rank of the parent chooses the name, and
timeout and backend are those of the parent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.collectives.roll_call import roll_call, timeout_of

COMMUNICATION = 1
"""Multiprocessors of a GPU for collectives that travel while it computes: a kernel of NCCL occupies them for as long as
it waits for other ranks. One moves several GB/s of payload, more than any link on which compression pays."""


def shared_name(group: dist.ProcessGroup) -> str:
    """A unique name, the same on every rank of the group. Every rank calls it."""
    return roll_call(group, "trimtab", f"trimtab-{secrets.token_hex(8)}")[0]


def private_groups(
    parent: dist.ProcessGroup,
    device: torch.device,
    count: int,
    *,
    ranks: Sequence[int] | None = None,
    overlapped: bool = False,
) -> tuple[dist.ProcessGroup, ...]:
    """`count` groups of the parent's ranks for tensors on `device`. Every rank of the parent calls it.

    NCCL orders collectives by stream, so there one group is enough; its streams have high priority, so that
    its kernels need not wait for those of the backward pass.

    Args:
        ranks: the ranks of the parent (as the parent counts them) that form this rank's groups; all when None.
            Different ranks may name different, disjoint sets; one that names none gets no group.
        overlapped: whether payloads travel while the GPU computes: NCCL then uses `COMMUNICATION` multiprocessors.
    """
    every = dist.get_process_group_ranks(parent)
    members = sorted(every if ranks is None else [every[rank] for rank in ranks])
    base = shared_name(parent)
    if not members:
        return ()
    name = f"{base}-{'_'.join(map(str, members))}"
    if device.type == "cuda":
        return (_group(parent, device, members, name, overlapped),) * count
    return tuple(_group(parent, device, members, f"{name}-{index}", overlapped) for index in range(count))


def destroy_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Close the connections and threads of private groups; those that torch has already destroyed are skipped."""
    for group in dict.fromkeys(groups):
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def gloo_backend(
    store: Any, rank: int, size: int, *, timeout: Any, name: Any, global_ranks: Sequence[int]
) -> Any:
    """A Gloo backend, not registered with torch yet."""
    backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend.options.global_ranks_in_group, backend.options.group_name = list(global_ranks), name
    backend._set_sequence_number_for_group()
    return backend


def nccl_backend(
    store: Any, rank: int, size: int, options: Any, *, timeout: Any, name: Any, global_ranks: Sequence[int]
) -> Any:
    """An NCCL backend, not registered with torch yet."""
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(global_ranks), name
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def register_group(
    group: dist.ProcessGroup, name: Any, *, desc: str, backend: str, config: str, store: Any, ranks: Any
) -> None:
    """Register a group that torch did not create: these are the tables that `new_group` fills.

    `ranks` maps global ranks to the group's own.
    """
    world: Any = dist.distributed_c10d._world
    group._set_group_name(name)
    group._set_group_desc(desc)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = ranks
    world.pg_backend_config[group] = config
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    c10d._register_process_group(name, group)


def _group(
    parent: dist.ProcessGroup, device: torch.device, members: list[int], name: str, overlapped: bool
) -> dist.ProcessGroup:
    timeout = timeout_of(parent, device if device.type in _backends(parent) else None)
    kind = backend_kind(parent, device)
    rank, size = members.index(dist.get_rank()), len(members)
    default_store = dist.distributed_c10d._get_default_store()
    if kind not in ("gloo", "nccl"):  # somebody's own: as `new_group` makes it, but for the name
        c10d_python: Any = dist.distributed_c10d
        made: tuple[dist.ProcessGroup, Any] = c10d_python._new_process_group_helper(
            size, rank, members, dist.Backend(kind), default_store, name, timeout=timeout
        )
        c10d_python._world.pg_group_ranks[made[0]] = _places(members)
        return made[0]
    store = PrefixStore(f"{name}/", default_store)
    group = dist.ProcessGroup(store, rank, size)
    common: dict[str, Any] = {"timeout": timeout, "name": name, "global_ranks": members}
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if overlapped:
            options.config.min_ctas = options.config.max_ctas = COMMUNICATION
        backend = nccl_backend(store, rank, size, options, **common)
        kinds = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = gloo_backend(store, rank, size, **common)
        kinds = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, kinds, backend)
    group._set_default_backend(kinds)
    config, ranks = f"{device.type}:{kind}", _places(members)
    register_group(group, name, desc="trimtab", backend=kind, config=config, store=store, ranks=ranks)
    return group


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The names of the group's backends, by type of device."""
    config = str(dist.distributed_c10d._world.pg_backend_config[group])
    return dict(entry.split(":") for entry in config.split(","))


def backend_kind(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries the group's tensors on `device`: torch's own where there is none, or one of ours."""
    kind = _backends(group).get(device.type, "trimtab")
    return {"cpu": "gloo", "cuda": "nccl"}[device.type] if kind == "trimtab" else kind


def _places(members: Sequence[int]) -> dict[int, int]:
    return {global_rank: index for index, global_rank in enumerate(members)}
